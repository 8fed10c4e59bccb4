"""The same preparation on more machines: Ray, Spark, or any other engine that can run jobs.

The machines see one work folder (NFS, Lustre, a mounted bucket), and each input where its location says.

- Ray: `diffusion prepare RECIPE.yaml --engine ray`, on a cluster that `ray start` made, or on this machine.
- No engine: `--share 0/16` to `--share 15/16`, one a machine, then once without it.
- Another engine: `prepare(settings, run=function)`, where the function runs jobs, which can be pickled, and yields what
  they return: for Spark `lambda jobs: spark.sparkContext.parallelize(list(jobs)).map(do).toLocalIterator()`.
"""

import os
import pickle
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.pipeline import Run
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.worker_pool import WorkerJob, run_jobs


def run_on(engine: str, settings: PrepareSettings) -> Run:
    """Return the function that runs the jobs of a preparation: on `processes` of this machine, or on `ray`."""
    if engine == 'ray':
        return partial(run_on_ray, workers=settings.workers)
    return partial(run_jobs, workers=settings.worker_count)


def run_on_ray(jobs: Iterable[WorkerJob], *, workers: int | None = None) -> Iterator[Any]:
    """Run jobs on Ray, by Ray Data; yields their results as they come.

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
    """Run a job without taking its notes on progress."""
    return job(lambda text: None)


def _done(item: dict[str, Any]) -> dict[str, bytes]:
    """Return the result or the error of a pickled job, pickled: Ray would wrap an error in several of its own."""
    job: WorkerJob = pickle.loads(item['job'])
    try:
        return {'outcome': pickle.dumps((do(job), None))}
    except Exception as error:
        return {'outcome': pickle.dumps((None, error))}
