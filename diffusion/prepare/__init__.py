"""Convert images and captions into MDS shards, one folder per resolution bucket.

Modules, in the order of the data flow:

| step | module | purpose |
|---|---|---|
| command | `cli` | options of `diffusion prepare` |
| | `settings` | settings from YAML files and command-line options, validated |
| | `pipeline` | runs all steps; resumable at any point |
| | `work_dir` | layout and lock of the work folder; divides parts among machines |
| source | `source` | the source interface: a source has parts, a part yields entries (image, captions, metadata) |
| | `folder_source` | image files in a folder; `caption_files` reads captions from tables, or beside an image |
| | `webdataset` | tar files from img2dataset; damaged ones are read up to the damage |
| | `parquet` | Parquet and Arrow files with an image column; `image_table` finds the columns and reads the rows |
| | `tfrecord` | TFRecord files, whose records it checks and parses |
| | `huggingface_source` | a split of a Hugging Face dataset, read with the readers above |
| | `dataset_choice` | chooses what to read of a dataset: configuration, kind of files and split |
| | `dataset_splits` | finds configurations and splits in a dataset's card, or by names of folders and files |
| | `hub_repository` | lists and downloads a Hub dataset's files at one commit |
| | `openmoji` | emoji from an installed package, rendered at each size |
| | `caption_table` | joins captions from tables, and columns for filters, to the images of another source by key |
| | `file_listing` | lists and sorts files in a local folder or an object store |
| | `extra_columns` | converts metadata to JSON types; computes columns with a user's function |
| plan | `input_plan` | settings, versions and parts, fixed before work starts; divides parts into jobs |
| jobs | `worker_pool` | runs jobs in local processes, on Ray, or on another engine |
| parts | `convert_part` | converts one input part into one folder of shards |
| | `process_sample` | converts an entry into one sample per matching bucket, or rejects it with a reason |
| | `image_decoding` | decodes images (including optional formats) with `data.image_reading`; encodes them for storage |
| | `optional_formats` | HEIC, JPEG XL and SVG, which need extra packages; `svg_process` renders SVG files |
| | `filters` | cleans captions; limits size, aspect ratio, caption length and metadata values |
| | `image_hashes` | exact and perceptual hashes; search for duplicates |
| | `part_shards` | shards and tables of a part: all inputs (kept and rejected) and all stored samples |
| shards | `catalog` | combined tables of all parts; removes duplicates and holds out images |
| | `output_folders` | output datasets, local or in an object store, and the jobs that write final shards |
| changes | `append` | adds a delivery (images from another input) to a finished dataset |
| | `remove` | removes images from a dataset; finds latents and runs made from it |
| | `remove_cli` | options of `diffusion data remove` |
| | `caption_packing` | writes a dataset again with captions of `diffusion caption` in its shards |
| | `shard_rewriting` | copies shards without some samples, including shards without a record, such as latents |
| | `dataset_record` | a dataset's record: its settings, deliveries and shards |
| | `image_record` | keys, hashes and shards of a delivery's images |
| report | `counts_report` | counts as JSON, as text and as an HTML page |
| | `report_content` | thumbnails, histograms, and the training images' captions with their lengths in CLIP tokens |
| | `dataset_reports` | combined report of several deliveries |
"""
