"""Other engines: the same dataset from Ray, the same samples for Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, samples, settings, snapshot

from diffusion.prepare.engines import part_rows, run_on_ray
from diffusion.prepare.engines import samples as spark_samples
from diffusion.prepare.pipeline import prepare
from diffusion.storage import mds

SOURCE = DrawnSource(4, 15, broken=7)


@pytest.fixture(scope='module')
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    patch.setenv('RAY_AUTH_MODE', 'disabled')
    # Its workers find the modules of these tests.
    patch.setenv('PYTHONPATH', str(Path(__file__).parent), prepend=':')
    ray = pytest.importorskip('ray')
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()
    patch.undo()


@pytest.mark.slow
@pytest.mark.filterwarnings(r'ignore::DeprecationWarning:ray\.')  # of settings that Ray itself makes
def test_ray_makes_the_same_dataset_and_tells_the_same_errors(tmp_path: Path, ray: Any) -> None:
    values: dict[str, Any] = {'aspects': 'sdxl', 'duplicates': 'near', 'shard_mb': 0.01}
    assert prepare(settings(tmp_path / 'ray', **values), source=SOURCE, run=run_on_ray) is not None
    prepare(settings(tmp_path / 'processes', **values), source=SOURCE)
    assert snapshot(tmp_path / 'ray') == snapshot(tmp_path / 'processes')
    (tmp_path / 'gone').mkdir()
    (tmp_path / 'gone/drawn-1').touch()
    source = DrawnSource(2, 3, gone=str(tmp_path / 'gone'))
    with pytest.raises(ValueError, match=r'part 1 \(drawn-1\): cannot be read'):
        prepare(settings(tmp_path / 'failed'), source=source, run=run_on_ray)


def test_samples_for_spark_are_those_of_the_dataset(tmp_path: Path) -> None:
    pandas = pytest.importorskip('pandas')
    from streaming import MDSWriter

    chosen = settings(tmp_path / 'out', aspects='sdxl')
    report = prepare(chosen, source=SOURCE)
    assert report is not None
    frame = pandas.DataFrame(part_rows(SOURCE))
    assert [json.loads(text)['name'] for text in frame['part']] == [f'drawn-{n}' for n in range(4)]
    for bucket in report.buckets:
        # What dataframe_to_mds does with its udf_iterable.
        with MDSWriter(out=str(tmp_path / bucket), columns=mds.COLUMNS, hashes=list(mds.HASHES)) as writer:
            for sample in spark_samples(frame, settings=chosen, bucket=bucket, source=SOURCE):
                writer.write(sample)
        assert samples(tmp_path / bucket) == samples(tmp_path / 'out' / bucket)


def test_a_bucket_that_is_none_is_an_error(tmp_path: Path) -> None:
    pandas = pytest.importorskip('pandas')
    frame = pandas.DataFrame(part_rows(SOURCE))
    with pytest.raises(ValueError, match="bucket: '8px' is none of the preparation; it has 16px, 32px"):
        next(spark_samples(frame, settings=settings(tmp_path), bucket='8px', source=SOURCE))
