"""Convert images and captions into MDS shards, one folder per resolution bucket.

Modules, in the order of the data flow:

| step | module | purpose |
|---|---|---|
| command | `cli` | options of `diffusion prepare` |
| | `settings` | settings from YAML files and command-line options, validated |
| | `pipeline` | runs all steps; resumable at any point |
| | `work_dir` | layout and lock of the work folder; shares for several machines |
| source | `source` | the source interface: a source has parts, a part yields entries (image, captions, metadata) |
| | `folder_source` | image files in a folder; `caption_files` reads captions from tables, or beside an image |
| | `webdataset` | tar files written by img2dataset; `tar_reading` reads a damaged tar up to the damage |
| | `parquet` | Parquet and Arrow files with an image column; `image_table` finds the columns and reads the rows |
| | `huggingface_source` | a split of a Hugging Face dataset, read by the readers above |
| | `dataset_choice` | files and card of a dataset; what to read: configuration, layout and split |
| | `dataset_splits` | configurations and splits by the card of a dataset, and by names of folders and files |
| | `hub_repository` | lists and downloads the files of a dataset on the Hub at one commit |
| | `openmoji` | emoji from an installed package, rendered at each size |
| | `file_listing` | lists and sorts files in a local folder or an object store |
| | `extra_columns` | converts metadata to JSON types; computes columns by a user's function |
| plan | `input_plan` | settings, versions and parts, fixed before work begins; divides parts among jobs |
| jobs | `worker_pool` | runs jobs in local processes, on Ray or another engine |
| parts | `convert_part` | converts one input part into one folder of shards |
| | `process_sample` | converts an entry into a sample per bucket that it fills, or rejects it with a reason |
| | `image_decoding` | decodes an image file by `data.image_reading`, also in optional formats; encodes it for storage |
| | `optional_formats` | HEIC, JPEG XL and SVG, which need extra packages; `svg_process` renders SVG |
| | `filters` | cleans captions; limits on size, aspect ratio, caption length and metadata columns |
| | `image_hashes` | exact and perceptual hashes; search for duplicates |
| | `part_shards` | shards and tables of a part: all inputs, kept and rejected, and all stored samples |
| shards | `catalog` | the tables of all parts combined; removes duplicates, holds images out |
| | `output_folders` | the output datasets, local or in an object store, and the jobs that write final shards |
| changes | `append` | adds a delivery to a finished dataset |
| | `remove` | removes images from it; finds latents and runs that were made from it |
| | `remove_cli` | options of `diffusion data remove` |
| | `shard_rewriting` | copies shards without some samples, also shards without a record, such as latents |
| | `dataset_record` | the record of a dataset: its settings, deliveries and shards |
| | `image_record` | keys, hashes and shards of the images of a delivery |
| report | `counts_report` | counts as JSON, as text and as an HTML page |
| | `report_content` | thumbnails, histograms, lengths of captions in CLIP tokens, captions of the training images |
| | `dataset_reports` | the report of several deliveries together |
"""
