"""Ray gives the same dataset as local processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, settings, snapshot

from diffusion.prepare.pipeline import prepare
from diffusion.prepare.worker_pool import run_on_ray

SOURCE = DrawnSource(4, 15, broken=7)


@pytest.fixture(scope='module')
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    patch.setenv('RAY_AUTH_MODE', 'disabled')
    # So that Ray's workers can import the modules of these tests.
    patch.setenv('PYTHONPATH', str(Path(__file__).parent), prepend=':')
    ray = pytest.importorskip('ray')
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()
    patch.undo()


@pytest.mark.slow
@pytest.mark.filterwarnings(r'ignore::DeprecationWarning:ray\.')  # from settings that Ray uses itself
def test_ray_gives_the_same_dataset_and_the_same_errors(tmp_path: Path, ray: Any) -> None:
    values: dict[str, Any] = {'aspects': 'sdxl', 'duplicates': 'near', 'shard_mb': 0.01}
    assert prepare(settings(tmp_path / 'ray', **values), source=SOURCE, run=run_on_ray) is not None
    prepare(settings(tmp_path / 'processes', **values), source=SOURCE)
    assert snapshot(tmp_path / 'ray') == snapshot(tmp_path / 'processes')
    (tmp_path / 'gone').mkdir()
    (tmp_path / 'gone/drawn-1').touch()
    source = DrawnSource(2, 3, gone=str(tmp_path / 'gone'))
    with pytest.raises(ValueError, match=r'part 1 \(drawn-1\): cannot be read'):
        prepare(settings(tmp_path / 'failed'), source=source, run=run_on_ray)
