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
| | `dataset_listing` | the files of a dataset, on the Hub or in a folder, and its card |
| | `dataset_choice` | what to read of a dataset: configuration, layout and split |
| | `dataset_splits` | configurations and splits by the card of a dataset, and by names of folders and files |
| | `hub_repository` | lists and downloads the files of a dataset on the Hub at one commit |
| | `openmoji` | emoji from an installed package, rendered at each size |
| | `file_listing` | lists files in a local folder or an object store |
| | `extra_columns` | converts metadata to JSON types; computes columns by a user's function |
| | `table_values` | rows of an Arrow table as Python objects, whatever bytes and times they hold |
| plan | `input_plan` | settings, versions and parts, fixed before work begins; divides parts among jobs |
| jobs | `worker_pool` | runs jobs in local processes; reports the job whose process died |
| | `engines` | runs jobs on Ray or another engine |
| parts | `convert_part` | converts one input part into one folder of shards |
| | `process_sample` | converts an entry into a sample per bucket, or rejects it with a reason |
| | `image_decoding` | decodes an image file by `data.image_reading`, also in optional formats; encodes it for storage |
| | `optional_formats` | HEIC, JPEG XL and SVG, which need extra packages; `svg_process` renders SVG |
| | `caption_cleaning` | cleans captions |
| | `filters` | limits on size, aspect ratio, caption length and metadata columns |
| | `bucket_choice` | selects the buckets of an image |
| | `image_hashes` | exact and perceptual hashes; search for duplicates |
| | `part_shards` | shards and tables of a part, in its folder or in an object store |
| | `sample_table` | tables of a part: all inputs, kept and rejected, and all stored samples |
| shards | `catalog` | the tables of all parts combined; removes duplicates, holds images out |
| | `pack_shards` | copies samples from the parts into final shards; writes their indexes |
| | `output_folders` | the output datasets: local folders or object store folders |
| changes | `append` | adds a delivery to a finished dataset |
| | `remove` | removes images from it; `remove_by_scan` from shards without a record, such as latents |
| | `remove_cli` | options of `diffusion data remove` |
| | `shard_rewriting` | copies a shard without some of its samples |
| | `affected_copies` | latents and runs that were made from a dataset |
| | `dataset_record` | the record of a dataset: its settings, deliveries and shards |
| | `image_record` | keys, hashes and shards of the images of a delivery |
| report | `counts_report` | counts as JSON and text |
| | `report_content` | thumbnails, histograms, lengths of captions in CLIP tokens, captions of the training images |
| | `dataset_reports` | the report of several deliveries together |
| | `html_report` | the report as an HTML page |
"""
