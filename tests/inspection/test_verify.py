"""`diffusion data verify` on undamaged and damaged shards."""

import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streaming import MDSWriter
from streaming.base.compression import decompress

from diffusion.cli import main
from diffusion.inspection.verify import VerifyReport
from diffusion.models import batch_keys
from tests.golden import check_golden

UNDAMAGED, DAMAGED, USER_ERROR = 0, 3, 2


@pytest.fixture
def verify(write_recipe, capsys):
    def run(streams, *arguments, **sections):
        path = write_recipe(streams={name: {'resolution': 32} | stream for name, stream in streams.items()}, **sections)
        status = main(['data', 'verify', str(path), '--jobs', '1', *arguments])
        captured = capsys.readouterr()
        return status, (captured.out + captured.err).splitlines()

    return run


@pytest.fixture
def copied(pictures, tmp_path):
    return Path(shutil.copytree(pictures[32], tmp_path / 'copied'))


def first_shard(folder):
    return sorted(folder.glob('shard.*.mds'))[0]


def write(folder, samples, columns, **options):
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return {'local': str(folder)}


def jpeg(side=32, height=None):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height or side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, 'JPEG')
    return buffer.getvalue()


def test_undamaged_streams_are_ok_and_counted(verify, pictures):
    status, lines = verify({'small': {'local': str(pictures[32])}, 'large': {'local': str(pictures[64])}})
    assert status == UNDAMAGED
    shards = {side: len(list(folder.glob('*.mds'))) for side, folder in pictures.items()}
    size = {side: sum(path.stat().st_size for path in folder.glob('*.mds')) for side, folder in pictures.items()}
    size_text = f'{size[64] / 1e6:.1f} MB'
    assert lines[0].startswith(f'streams.large: ok; {shards[64]} of {shards[64]} shards, 24 samples, {size_text}')
    assert re.match(rf'streams.small: ok; {shards[32]} of {shards[32]} shards, 40 samples, .* \d\d?\.\d s ', lines[1])
    report = VerifyReport(1, 2, 3, bytes=6_000_000, seconds=2.0)
    assert [*report.lines('a')] == ['a: ok; 1 of 2 shards, 3 samples, 6.0 MB, 2.0 s (3 MB/s)']


@pytest.mark.slow
def test_several_processes_report_same_defects(write_recipe, copied, pictures, capsys):
    first_shard(copied).write_bytes(b'')
    path = write_recipe(streams={'a': {'local': str(copied), 'resolution': 32}})
    reports = []
    for jobs in ('1', '2'):
        assert main(['data', 'verify', str(path), '--jobs', jobs]) == DAMAGED
        reports.append([line.partition(' MB,')[0] for line in capsys.readouterr().out.splitlines()])
    assert reports[0] == reports[1]


def test_changed_truncated_and_missing_shards_are_reported(verify, copied):
    shard, stream = first_shard(copied), {'a': {'local': str(copied)}}
    content, size = bytearray(shard.read_bytes()), shard.stat().st_size
    expected = hashlib.sha1(content).hexdigest()
    content[-20] ^= 1
    shard.write_bytes(content)
    status, lines = verify(stream)
    assert status == DAMAGED
    assert f'  {shard.name}: sha1 {hashlib.sha1(content).hexdigest()}, expected {expected}' in lines

    samples = json.loads((copied / 'index.json').read_text())['shards'][0]['samples']
    shard.write_bytes(content[: size // 2])
    status, lines = verify(stream)
    assert status == DAMAGED
    assert f'  {shard.name}: {size // 2} bytes, expected {size}' in lines
    rows = rf'  {shard.name}, rows \d+-{samples - 1}: it is past the end of the file'
    assert sum(re.fullmatch(rows, line) is not None for line in lines) == 1
    assert len(lines) < 8
    shard.unlink()
    status, lines = verify(stream)
    assert status == DAMAGED and f'  {shard.name}: the file does not exist' in lines


def test_bad_images_and_captions_are_reported_by_row_as_reviewed(verify, tmp_path):
    """Pillow decodes an image with zeroed bytes without an error, and the loader rejects it."""
    zeroed, stray = bytearray(jpeg(256)), jpeg(256)[:-2] + bytes(7) + b'\xff\xd9'
    zeroed[20_000:22_000] = bytes(2000)
    good = {'image': jpeg(), 'rejected_image': jpeg(48), 'captions': ['a'], 'width': 32, 'height': 32}
    changes = ({}, {'image': b'not an image'}, {'captions': []}, {'captions': ['']}, {'width': 31}, {'captions': [1]})
    more = ({'image': bytes(zeroed)}, {'image': stray, 'width': 256, 'height': 256}, {'rejected_image': jpeg()[:50]})
    turned = ({'image': jpeg(32, 48), 'width': 48, 'height': 32}, {'captions': ['', 'a']}, {'captions': ['', ' ']})
    columns = {'image': 'bytes', 'rejected_image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int'}
    rows = [good | change for change in (*changes, *more, *turned, {'captions': ['']})]
    status, lines = verify({'a': write(tmp_path / 'd', rows, columns), 'b': write(tmp_path / 'e', [good], columns)})
    assert status == DAMAGED
    # The messages of libjpeg and Pillow depend on their versions.
    shown = [re.sub(r'(cannot be decoded \(|libjpeg reports: )(\w*).*', r'\1\2 ...', line) for line in lines]
    shown = [re.sub(r'[\d.]+ MB, [\d.]+ s \(\d+ MB/s\)', 'SIZE, TIME', line) for line in shown]
    check_golden(Path(__file__).parent / 'golden' / 'verify', {'report.txt': '\n'.join([*shown, ''])})


def test_compressed_shards_are_checked(verify, tmp_path):
    stream = write(tmp_path / 'd', [{'image': jpeg()}] * 5, {'image': 'bytes'}, compression='zstd', hashes=['sha1'])
    assert verify({'a': stream})[0] == UNDAMAGED
    (packed,) = (tmp_path / 'd').glob('shard.*')
    content = packed.read_bytes()
    packed.write_bytes(content[:-9])
    status, lines = verify({'a': stream})
    assert status == DAMAGED
    assert any('expected' in line for line in lines)
    assert any(line.startswith('  shard.00000.mds: it cannot be read (') for line in lines)
    # Streaming has unpacked the shard, and reads the compressed file no more.
    packed.with_name('shard.00000.mds').write_bytes(decompress('zstd', content))
    assert verify({'a': stream})[0] == UNDAMAGED


def latents(folder, shape=(8, 4, 4), posterior='sample', **change):
    from diffusion.data.latents import LatentManifest

    manifest = LatentManifest('v', [0.0] * 4, [1.0] * 4, shape='32x32', posterior=posterior, dtype='float16')
    moments = np.zeros(shape, np.float16)
    samples = [{batch_keys.LATENT_MOMENTS: moments, 'captions': ['a']}] * 2
    columns = {batch_keys.LATENT_MOMENTS: 'ndarray', 'captions': 'json'}
    samples.append({batch_keys.LATENT_MOMENTS: change.get('last', moments), 'captions': ['b']})
    stream = write(folder, samples, columns)
    (folder / 'manifest.json').write_text(manifest.text())
    return stream


def test_latents_must_be_finite_and_match_manifest(verify, tmp_path):
    assert verify({'a': latents(tmp_path / 'good')})[0] == UNDAMAGED
    for side in (32, 16, 8, 2, 1):  # a VAE downscales by a power of two
        streams = {'a': latents(tmp_path / f'mean{side}', shape=(4, side, side), posterior='mean')}
        assert verify(streams)[0] == UNDAMAGED
    infinite = np.full((8, 4, 4), np.inf, np.float16)
    status, lines = verify({'a': latents(tmp_path / 'infinite', last=infinite)})
    assert status == DAMAGED
    assert lines[1] == '  shard.00000.mds, row 2: its latent_moments are not finite'
    status, lines = verify({'a': latents(tmp_path / 'other', shape=(4, 4, 4))})
    assert status == DAMAGED
    assert lines[1].startswith(
        '  shard.00000.mds, rows 0-2: its latent_moments have shape [4, 4, 4]; the manifest states 8'
    )
    (tmp_path / 'good/manifest.json').unlink()
    status, lines = verify({'a': {'local': str(tmp_path / 'good')}})
    assert status == DAMAGED and 'no manifest.json next to its shards' in lines[1]


def test_sample_option_checks_fraction_of_shards_chosen_by_seed(verify, pictures):
    stream = {'small': {'local': str(pictures[32])}}
    shards = len(list(pictures[32].glob('*.mds')))
    assert shards > 1
    for share, checked in (('0.01', 1), ('0.5', round(shards / 2))):
        status, lines = verify(stream, '--sample', share)
        assert status == UNDAMAGED
        assert lines[0].startswith(f'streams.small: ok; {checked} of {shards} shards')
    counts = {verify(stream, '--sample', '0.01', '--seed', str(seed))[1][0].split(' samples')[0] for seed in range(8)}
    assert len(counts) > 1  # the last shard is shorter


def test_streams_are_selected_by_name_in_all_sections(verify, pictures):
    small, large = ({'local': str(pictures[side]), 'resolution': side} for side in (32, 64))
    sections = {'eval_streams': {'held': large}, 'precompute': {'out': 'x', 'streams': {'raw': large}}}
    streams = {'small': small, 'other': {'remote': '???', 'local': 'here'}}
    for names, expected in (
        (['small'], ['streams.small']),
        (['held', 'raw'], ['eval_streams.held', 'precompute.streams.raw']),
        (['precompute.streams.raw'], ['precompute.streams.raw']),
    ):
        status, lines = verify(streams, *names, **sections)
        assert status == UNDAMAGED
        assert [line.partition(':')[0] for line in lines] == expected
    status, lines = verify(streams, **sections)
    assert status == UNDAMAGED
    expected = ['streams.small', 'eval_streams.held']  # training does not read precompute.streams
    assert [line.partition(': ')[0] for line in lines[:-1]] == expected
    assert lines[-1].startswith('skipped: streams.other.remote: is still ???')
    status, lines = verify(streams, 'other', **sections)
    assert status == USER_ERROR
    assert 'streams.other.remote: is still ???' in '\n'.join(lines)


def test_aspect_buckets_are_verified_separately(verify, pictures, tmp_path):
    from shards import write_buckets

    from diffusion.config.image_shapes import Shape

    root = tmp_path / 'photos'
    for name in ('64x32', '32x64'):
        shutil.copytree(pictures[32], root / name)
    write_buckets(root, 32, {Shape(64, 32): {'samples': 40}, Shape(32, 64): {'samples': 40}})
    status, lines = verify({'photos': {'local': str(root), 'aspects': True}})
    assert status == UNDAMAGED
    assert [line.partition(':')[0] for line in lines] == ['streams.photos/32x64', 'streams.photos/64x32']


def test_invalid_folder_is_a_defect_and_other_streams_are_checked(verify, pictures, tmp_path):
    (tmp_path / 'odd').mkdir()
    (tmp_path / 'odd/index.json').write_text('{"shards": [{"version": 2}]}')
    write(tmp_path / 'empty', [], {'image': 'bytes'})
    folders = {f'a_{name}': tmp_path / name for name in ('none', 'empty', 'odd')} | {'c_good': pictures[32]}
    streams = {name: {'local': str(folder)} for name, folder in folders.items()}
    status, lines = verify(streams)
    assert status == DAMAGED
    problem = f'  {tmp_path}/none: cannot read index.json ({tmp_path}/none is not a folder); check the path or URL'
    assert any(line.startswith(problem) for line in lines)
    assert any('odd: index.json is not an index of MDS shards' in line for line in lines)
    empty = lines.index('streams.a_empty: DAMAGED; 0 of 0 shards, 0 samples, 0.0 MB, 0.0 s (0 MB/s)')
    assert lines[empty + 1] == '  it has no shards'
    assert lines[-1].startswith('streams.c_good: ok')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['smal'], "smal: no such stream in the recipe; did you mean 'small'?"),
        (['--sample', '0'], 'argument --sample: 0 is not a fraction in (0, 1], such as 0.4'),
        (['--jobs', '0'], 'argument --jobs: 0 is less than 1; use 1 or more'),
        (['streams.small.resolution=x'], 'streams.small.resolution'),
    ],
)
def test_invalid_arguments_are_reported(verify, pictures, capsys, arguments, message):
    try:
        status, lines = verify({'small': {'local': str(pictures[32])}}, *arguments)
    except SystemExit as stop:
        status, lines = stop.code, capsys.readouterr().err.splitlines()
    assert status == USER_ERROR
    assert message in '\n'.join(lines)


@pytest.mark.slow
def test_remote_is_checked_shard_by_shard_without_leftover_files(verify, store, pictures, tmp_path, monkeypatch):
    url = store.upload(pictures[32])
    scratch = tmp_path / 'scratch'
    scratch.mkdir()
    monkeypatch.setattr('tempfile.tempdir', str(scratch))
    stream = {'remote': url, 'local': str(tmp_path / 'cache'), 'download_retry': 0}
    status, lines = verify({'a': stream})
    assert status == UNDAMAGED
    assert ', 40 samples' in lines[0]
    store.delete(url, 'shard.00000.mds')
    store.put(url, 'shard.00001.mds', b'cut')
    status, lines = verify({'a': stream})
    assert status == DAMAGED
    assert any('shard.00000.mds: it cannot be downloaded' in line for line in lines)
    assert any('shard.00001.mds: 3 bytes, expected' in line for line in lines)
    assert not list(scratch.iterdir())
    assert not (tmp_path / 'cache').exists()
