"""Engines that run the jobs of `diffusion prepare` on several machines: Ray, Spark or others; or no engine at all.

All machines need access to the input at the same location, and to the work folder (NFS, Lustre). Shares do not need a
common work folder if `PrepareSettings.parts` is in an object store.

- Ray: `diffusion prepare RECIPE.yaml --engine ray` on a cluster started with `ray start`; without one, Ray uses only
  this machine.
- No engine: run the command with `--share 0/16` to `--share 15/16`, one per machine, which converts a 16th of the
  input each; then run it once without `--share`.
- Another engine: `prepare(settings, run=function)`, where the function runs picklable jobs and yields their results.
  For Spark: `lambda jobs: spark.sparkContext.parallelize(list(jobs)).map(run_job).toLocalIterator()`.
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
from diffusion.storage.host_memory import keep_freed_memory


def run_on(engine: str, settings: PrepareSettings) -> Run:
    """Return the function that runs jobs on an engine: `processes` (on this machine) or `ray`."""
    if engine == 'ray':
        return partial(run_on_ray, workers=settings.workers)
    return partial(run_jobs, workers=settings.worker_count)


def run_on_ray(jobs: Iterable[WorkerJob], *, workers: int | None = None) -> Iterator[Any]:
    """Run jobs with Ray Data and yield their results as they finish.

    Args:
        jobs: Jobs; each one is a Ray task that uses one core.
        workers: Maximum number of concurrent tasks; None for one per core of the cluster.

    Raises:
        UserError: Ray is not installed.
    """
    # Ray starts a local cluster if there is none, which would send usage statistics to Anyscale.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray.data
    except ImportError as error:
        raise UserError(
            f"--engine ray: Ray is not installed ({error}); pip install 'diffusion-recipes[ray]'"
        ) from error
    items = [{'job': pickle.dumps(job)} for job in jobs]
    if not items:
        return
    # One block per job: Ray schedules blocks, so a larger block would run its jobs one after the other.
    data = ray.data.from_items(items, override_num_blocks=len(items))
    for row in data.map(_run_pickled, concurrency=workers).iter_rows():
        result, error = pickle.loads(row['outcome'])
        if error is not None:
            raise error
        yield result


def run_job(job: WorkerJob) -> Any:
    """Run a job of `diffusion prepare` in the calling process and return its result: the function to map in Spark."""
    return job(lambda text: None)


def _run_pickled(item: dict[str, Any]) -> dict[str, bytes]:
    """Run a pickled job as a Ray task; return its pickled (result, error)."""
    # Ray would wrap an exception in several of its own, and callers could not catch UserError or DataError.
    keep_freed_memory()
    job: WorkerJob = pickle.loads(item['job'])
    try:
        return {'outcome': pickle.dumps((run_job(job), None))}
    except Exception as error:
        return {'outcome': pickle.dumps((None, error))}
