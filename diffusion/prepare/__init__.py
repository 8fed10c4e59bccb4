"""Preparing images and captions: MDS shards, one folder per resolution bucket.

The modules in the order of the data flow:

| step | module | what it does |
|---|---|---|
| command | `cli` | options of `diffusion prepare` |
| | `settings` | settings from YAML and options, checked |
| | `pipeline` | a preparation from beginning to end, resumable at any point |
| | `work_dir` | the folder of unfinished work: its files, its lock, shares of several machines |
| source | `source` | what a source is: parts, which yield entries (an encoded image with captions and metadata) |
| | `folder_source` | image files of a folder; `caption_files` reads a CSV or JSONL of captions |
| | `webdataset` | tars as img2dataset writes them; `tar_reading` reads damaged ones as far as they go |
| | `parquet` | Parquet files with a column of images |
| | `openmoji` | emoji of an installed package, drawn at each size |
| | `file_listing` | files of a local folder or an object store |
| | `extra_columns` | metadata in JSON's types |
| plan | `input_plan` | settings, versions and parts, pinned before work begins |
| jobs | `worker_pool` | jobs over processes of this machine; a job that kills its process is named |
| | `engines` | jobs on Ray or another engine |
| parts | `convert_part` | one part of the input into one folder of shards |
| | `process_sample` | an entry into a sample, or the reason why it is left out |
| | `image_decoding` | an image file into upright sRGB pixels; `color_profiles` applies ICC profiles |
| | `caption_cleaning` | captions into clean text |
| | `filters` | limits on size, aspect, captions and columns |
| | `bucket_choice` | the bucket of an image |
| | `image_hashes` | exact and perceptual hashes, and finding equal and similar images among many |
| | `sample_table` | a table of every input of a part, kept or left out |
| shards | `catalog` | the tables of all parts together; leaves out duplicates |
| | `pack_shards` | samples of parts into final shards, and their indexes |
| | `output_folders` | the dataset's place: a local folder or an object store |
| report | `counts_report` | counts as JSON and text |
| | `histograms` | statistics of the kept images |
| | `html_report` | the report as an HTML page; `report_thumbnails` chooses its images |
"""
