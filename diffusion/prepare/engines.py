"""The same preparation on more machines: Ray, Spark, or any other engine that can do jobs somewhere.

The machines see one work folder (NFS, Lustre, a mounted bucket), and each input where its location says.

- Ray: `diffusion prepare RECIPE.yaml --engine ray`, on a cluster that `ray start` made, or on this machine.
- No engine: `--share 0/16` to `--share 15/16`, one a machine, then once without it.
- Another engine: `prepare(settings, run=function)`, where the function does jobs, which can be pickled, and yields what
  they return: for Spark `lambda jobs: spark.sparkContext.parallelize(list(jobs)).map(do).toLocalIterator()`.
- Spark with Streaming's `dataframe_to_mds` in the place of ours: `samples` below. It has no work folder, so it does not
  go on after a failure, does not find duplicates and writes no report.
"""

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion.errors import UserError
from diffusion.prepare.pipeline import Run
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Part, Source
from diffusion.prepare.worker_pool import WorkerJob, run_jobs

if TYPE_CHECKING:
    import pandas as pd


def run_on(engine: str, settings: PrepareSettings) -> Run:
    """Where the jobs of a preparation are done: `processes` of this machine, or `ray`."""
    if engine == 'ray':
        return partial(run_on_ray, workers=settings.workers)
    return partial(run_jobs, workers=settings.worker_count)


def run_on_ray(jobs: Iterable[WorkerJob], *, workers: int | None = None) -> Iterator[Any]:
    """Do jobs on Ray, by Ray Data; yields their results as they come.

    Args:
        jobs: Each is done by one task of one core.
        workers: Tasks at a time; None is as many as the cluster has cores.

    Raises:
        UserError: Ray is not installed.
    """
    # Without a cluster to connect to, Ray starts one here, which would report its use to its makers.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray.data
    except ImportError as error:
        raise UserError(f"--engine ray: Ray is not installed ({error}); pip install 'diffusion[ray]'") from error
    items = [{'job': pickle.dumps(job)} for job in jobs]
    if not items:
        return
    data = ray.data.from_items(items, override_num_blocks=len(items))
    for row in data.map(_done, concurrency=workers).iter_rows():
        result, error = pickle.loads(row['outcome'])
        if error is not None:
            raise error
        yield result


def do(job: WorkerJob) -> Any:
    """Do a job where nobody watches over it."""
    return job(lambda text: None)


def part_rows(source: Source) -> list[dict[str, str]]:
    """Rows of a Spark data frame for `samples`: one a part, with the part as JSON."""
    return [{'part': json.dumps(asdict(part))} for part in source.parts()]


def samples(
    rows: 'pd.DataFrame', *, settings: PrepareSettings, bucket: str, source: Source | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of one bucket, in the form that Streaming's `dataframe_to_mds` asks of its `udf_iterable`.

    `settings` and `bucket` go into its `udf_kwargs`, and `mds.COLUMNS` as `columns` into its `mds_kwargs`:

        frame = spark.createDataFrame(part_rows(settings.source.open())).repartition(parts)
        mds_kwargs = {'out': 's3://bucket/mds/512px', 'columns': COLUMNS, 'hashes': list(HASHES), 'compression': None}
        dataframe_to_mds(frame, mds_kwargs=mds_kwargs, udf_iterable=samples,
                         udf_kwargs={'settings': settings, 'bucket': '512px'})

    Args:
        rows: With a column `part`, as `part_rows` makes it.
        settings: Of which `out`, `workers` and `duplicates` do not matter here.
        bucket: `512px`, or `512px/640x384` where there are aspects; the others' samples are left out.
        source: Read instead of what the settings name.
    """
    from diffusion.prepare.bucket_choice import Buckets
    from diffusion.prepare.image_decoding import Unfit
    from diffusion.prepare.process_sample import take
    from diffusion.prepare.sample_table import SampleRow

    buckets = Buckets(settings.sizes, settings.aspects)
    if bucket not in buckets.names:
        raise UserError(f'bucket: {bucket!r} is none of the preparation; it has {", ".join(buckets.names)}')
    source = source or settings.source.open()
    for text in rows['part']:
        for entry in source.read(Part(**json.loads(text))):
            row = SampleRow(entry.key)
            try:
                sample = take(entry, row, settings=settings, buckets=buckets)
            except Unfit:
                continue
            if row.bucket == bucket:
                yield sample


def _done(item: dict[str, Any]) -> dict[str, bytes]:
    """What became of a pickled job, pickled: Ray would wrap an error in several of its own."""
    job: WorkerJob = pickle.loads(item['job'])
    try:
        return {'outcome': pickle.dumps((do(job), None))}
    except Exception as error:
        return {'outcome': pickle.dumps((None, error))}
