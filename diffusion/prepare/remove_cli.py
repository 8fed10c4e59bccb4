"""Command line of `diffusion data remove`."""

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffusion.config.options import DIR, DIR_OR_URL, Option
from diffusion.errors import UserError, printable

if TYPE_CHECKING:
    from diffusion.prepare.dataset_record import RecordedDataset
    from diffusion.prepare.remove import Selection


DatasetPlace = Annotated[str, Option(positional=True, files=True)]


@dataclass(frozen=True)
class RemoveOptions:
    """Options of `diffusion data remove`."""

    dataset: DatasetPlace
    """Folder or URL of a dataset from `diffusion prepare`, or of latents."""
    keys: Path | None = None
    """Text file with the keys of the images to remove, one per line."""
    key: list[str] = field(default_factory=list)
    """Keys of the images to remove."""
    hash: Annotated[list[str], Option('HEX')] = field(default_factory=list)
    """Pixel hashes of the images to remove (exact_hash in images.parquet)."""
    image: list[Path] = field(default_factory=list)
    """Image files; images with the same pixels are removed."""
    where: Annotated[list[str], Option('CONDITION')] = field(default_factory=list)
    """Remove images by their answers to a question of diffusion caption: watermark=yes, score<5 or score>8, with the
    name of the column first. Images without an answer are listed, not removed."""
    dry_run: bool = False
    """Show affected shards and counts without changing anything."""
    missing_ok: bool = False
    """Skip keys and hashes that do not exist (default: exit with an error)."""
    keep_old_shards: bool = False
    """Keep the old shards for running jobs; delete them later with --purge."""
    purge: bool = False
    """Delete old shards that were kept."""
    latents: Annotated[list[str], DIR_OR_URL] = field(default_factory=list)
    """Folders or URLs of latents; shows which of them were made from the dataset."""
    runs_dir: Annotated[Path | None, DIR] = None
    """Folder of runs; shows which of them read the dataset."""
    work: Annotated[Path | None, DIR] = None
    """Folder for temporary copies of a few shards (default: the temporary folder)."""


def check_dataset(place: str) -> None:
    if '://' not in place and not Path(place).is_dir():
        raise UserError(f'DATASET: {place} is not a folder; give a folder that `diffusion prepare` has written')


def run_remove(options: RemoveOptions) -> int:
    from diffusion.prepare.dataset_record import RECORD, RecordedDataset
    from diffusion.storage.places import is_url, place_at

    keys = _keys(options)
    check_dataset(options.dataset)
    if options.purge and options.keep_old_shards:
        raise UserError('--purge: deletes what --keep-old-shards keeps; give one of them')
    if options.work is not None and not options.work.is_dir():
        raise UserError(f'--work: {options.work} is not a folder; create it, or leave it out')
    keys += [key for condition in options.where for key in _keys_where(options.dataset, condition)]
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        if place_at(options.dataset).read(RECORD) is None:
            return _remove_by_scan(options, keys, Path(temporary))
        place = options.dataset.rstrip('/')
        datasets = [RecordedDataset(place, Path(temporary, 'data'))]
        whole_bucket = is_url(place) and '/' not in place.partition('://')[2]
        held_out = f'{place}-held-out'
        if not whole_bucket and place_at(held_out).read(RECORD) is not None:
            # Remove held-out images first. Otherwise, a killed removal could leave a held-out image that the
            # training set's record does not list any more.
            datasets.insert(0, RecordedDataset(held_out, Path(temporary, 'held-out')))
        return _remove(options, keys, datasets)


def _remove(options: RemoveOptions, keys: list[str], datasets: 'Sequence[RecordedDataset]') -> int:
    """Remove images from datasets with a record of their images; the last one is the dataset given by the user."""
    from diffusion.prepare.dataset_reports import finish_change
    from diffusion.prepare.remove import missing_problem, purge, remove, select

    hashes = [_checked_hash(text) for text in options.hash] + [_hash_of(path, datasets[-1]) for path in options.image]
    if not options.dry_run:
        for dataset in datasets:
            finish_change(dataset)
    selections = [select(dataset, keys, hashes) for dataset in datasets]
    # A key may exist in only one of the two: the training set or its held-out dataset.
    missing = [name for name in selections[-1].missing if all(name in each.missing for each in selections)]
    if missing and not options.missing_ok:
        raise UserError(missing_problem(datasets[-1], missing))
    if missing:
        print(f'skipped {len(missing)} keys and hashes that no image has')
    for dataset, selection in zip(datasets, selections, strict=True):
        _print_selection(dataset, selection, dry_run=options.dry_run)
    affected = any(selection.images for selection in selections)
    if affected:
        _print_affected(options, datasets)
    if options.dry_run:
        return 0
    for dataset, selection in zip(datasets, selections, strict=True):
        if selection.images:
            removal = remove(dataset, keys, hashes, keep_old_shards=options.keep_old_shards)
            _print_effect(dataset, removal.rewritten, removal.old_indexes, kept=options.keep_old_shards)
    if options.purge:
        for dataset in datasets:
            print(f'{dataset.folder}: deleted {len(purge(dataset))} old shards that were kept')
    return 0


def _print_selection(dataset: 'RecordedDataset', selection: 'Selection', *, dry_run: bool) -> None:
    if selection.gone:
        print(printable(f'{dataset.folder}: removed before: {_some(selection.gone)}'))
    if not selection.images:
        return
    samples = ', '.join(f'{bucket} {count}' for bucket, count in sorted(selection.samples.items()))
    shards = sum(map(len, selection.shards.values()))
    verb = 'would remove' if dry_run else 'removing'
    print(f'{dataset.folder}: {verb} {selection.images} images ({samples or "no samples"}) from {shards} shards')
    if dry_run:
        for bucket, numbers in sorted(selection.shards.items()):
            print(f'  {bucket}: shards {", ".join(map(str, sorted(numbers)))}')
    if selection.copies:
        print(printable(f'  other images have the same pixels and stay: {_some(selection.copies)}'))


def _print_affected(options: RemoveOptions, datasets: 'Sequence[RecordedDataset]') -> None:
    """Print which latents (--latents) were made from the datasets, and which runs (--runs-dir) read either."""
    from diffusion.prepare.remove import latents_of

    stale = []
    for dataset in datasets:
        for latents, bucket in latents_of(dataset.record.indexes, options.latents) if options.latents else ():
            stale.append(latents)
            print(f'stale: {latents} was made from {bucket}; remove the images there too:')
            print(f'  diffusion data remove {latents} --keys FILE --missing-ok')
    if options.latents and not stale:
        print('no latents of these folders were made from the dataset')
    if options.runs_dir is not None:
        places = [*(str(dataset.folder) for dataset in datasets), *stale]
        if not _print_runs(places, options.runs_dir):
            print(f'no run in {options.runs_dir} reads the dataset')


def _print_runs(places: Sequence[str], runs_dir: Path) -> bool:
    """Print the runs that read any of the datasets; return True if there are any."""
    from diffusion.prepare.remove import runs_with

    runs = list(runs_with(places, runs_dir))
    for name, streams in runs:
        print(printable(f'run {name} reads the dataset ({", ".join(streams)}) and may have trained on the images'))
    return bool(runs)


def _print_effect(dataset: 'RecordedDataset', rewritten: list[str], old_indexes: list[str], *, kept: bool) -> None:
    print(f'{dataset.folder}: rewrote {len(rewritten)} shards')
    if not rewritten:
        return
    if kept:
        print('  the old shards are kept, and running jobs go on with them; delete them later with --purge')
    else:
        print('  a running job goes on until it needs an old shard that it has not cached, then stops with an error')
    print('  the order of samples changes: a run resumes on this version only with allow_data_change: true')
    versions = ', '.join(sorted({digest[:16] for digest in old_indexes}))
    print(f'  cached copies of old shards are in these folders of loader.cache_folder on each machine: {versions}')


def _remove_by_scan(options: RemoveOptions, keys: list[str], scratch: Path) -> int:
    """Remove samples from the shards of a dataset without a record of its images, by reading all shards."""
    from diffusion.prepare.shard_rewriting import remove_scanned, scan, superseded
    from diffusion.storage.places import place_at

    if options.hash or options.image or options.purge or options.latents or options.keep_old_shards:
        raise UserError(
            f'DATASET: {options.dataset} has no record of its images, so that only --keys, --key, --dry-run, '
            '--missing-ok and --runs-dir apply; leave out the other options'
        )
    folder = place_at(options.dataset, scratch)
    # Delete the old shards left by a removal that was killed after replacing an index.
    if not options.dry_run:
        folder.delete(superseded(folder, options.dataset))
    scanned = scan(folder, options.dataset, set(keys), scratch)
    missing = sorted(set(keys).difference(*(found for each in scanned for found in each.holding.values())))
    if missing and not options.missing_ok:
        raise UserError(
            printable(f'{options.dataset}: no sample has these keys, so nothing was removed: {_some(missing)}; ')
            + 'correct them, or add --missing-ok to remove the others'
        )
    for each in scanned:
        if each.holding:
            samples = sum(map(len, each.holding.values()))
            verb = 'would remove' if options.dry_run else 'removing'
            print(f'{folder.locate(each.name)}: {verb} {samples} samples from {len(each.holding)} shards')
    if options.runs_dir is not None and any(each.holding for each in scanned):
        _print_runs([options.dataset], options.runs_dir)
    if not options.dry_run:
        old = remove_scanned(folder, scanned, set(keys), scratch)
        folder.delete(old)
        print(f'{options.dataset}: rewrote {len(old)} shards; running jobs stop when they need an old one')
    return 0


def _keys(options: RemoveOptions) -> list[str]:
    keys = list(options.key)
    if options.keys is not None:
        try:
            lines = options.keys.read_text(encoding='utf-8-sig').splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'--keys: {options.keys} cannot be read ({error}); give a text file in UTF-8') from error
        keys += [line for line in lines if line]
    if not (keys or options.hash or options.image or options.where or options.purge):
        raise UserError('no image selected; give --keys FILE, --key KEY, --hash HEX, --image FILE or --where CONDITION')
    return list(dict.fromkeys(keys))


def _keys_where(place: str, condition: str) -> list[str]:
    """Return keys of images whose `diffusion caption` answers fulfill a condition such as score<5 (yes is 1, no 0)."""
    from diffusion.prepare.filters import number_in
    from diffusion.prepare.shard_rewriting import indexed_folders
    from diffusion.storage.caption_tables import complete_tables, read_table
    from diffusion.storage.places import place_at
    from diffusion.storage.shard_writer import FETCHES

    parts = re.fullmatch(r'([\w.-]+)([=<>])(.+)', condition)
    limit = number_in(parts[3]) if parts else None
    if parts is None or (limit is None and parts[2] != '='):
        raise UserError(f'--where: {condition!r} is not a condition; write one such as watermark=yes or score<5')
    column, sign, wanted = parts.groups()
    folder, tables = place_at(place), list[str]()
    for each in indexed_folders(folder, place):
        found = complete_tables(folder, each.name, column, each.entries)
        if found is None:
            print(f'{folder.locate(each.name)}: no complete column {column}; no image is selected here')
        tables += (found or {}).values()
    if not tables:
        raise UserError(f'--where: {place} has no answers {column!r}; ask for them with diffusion caption')

    def compare(table: str) -> tuple[set[str], dict[str, str]]:
        rows, matching, unanswered = read_table(folder, table), set(), {}
        for key, answer, rule in zip(*(rows[name].to_pylist() for name in ('key', 'caption', 'rejected')), strict=True):
            number = number_in(answer)
            if answer is None or (number is None and limit is not None):
                unanswered[key] = rule or repr((answer or '')[:40])
            elif number is None or limit is None:
                matching |= {key} if answer.strip().casefold() == wanted.strip().casefold() else set()
            elif {'=': number == limit, '<': number < limit, '>': number > limit}[sign]:
                matching.add(key)
        return matching, unanswered

    with ThreadPoolExecutor(FETCHES) as threads:
        answers = list(threads.map(compare, tables))
    matching = sorted(set().union(*(keys for keys, _ in answers)))
    unanswered = [*dict.fromkeys(f'{key} ({why})' for _, reasons in answers for key, why in reasons.items())]
    print(f'{condition}: {len(matching)} images')
    if unanswered:
        print(printable(f'  {len(unanswered)} answers cannot be compared and select no image: {_some(unanswered)}'))
    return matching


def _checked_hash(text: str) -> str:
    if not re.fullmatch(r'[0-9a-fA-F]{16}', text):
        raise UserError(
            f'--hash: {text!r} is not a hash of pixels (16 hexadecimal digits); correct it, or give --image FILE'
        )
    return text.lower()


def _hash_of(path: Path, dataset: 'RecordedDataset') -> str:
    """Return the pixel hash of an image file, decoded in the same way as the dataset's images."""
    from diffusion.prepare.image_decoding import decode_image
    from diffusion.prepare.image_hashes import exact_hash
    from diffusion.prepare.process_sample import Buckets, resized_to
    from diffusion.prepare.source import Unfit

    settings = dataset.record.settings
    # With `fast_jpeg`, the dataset's hashes are those of JPEGs decoded at a reduced size, so do the same here.
    smaller = None
    if settings.get('fast_jpeg'):
        every = settings['buckets'] == 'every'
        smaller = resized_to(Buckets(settings['sizes'], settings['aspects'], every=every, step=settings['step']))
    try:
        decoded = decode_image(
            path.read_bytes(),
            background=settings['background'],
            max_pixels=settings['max_pixels'],
            formats=settings['formats'],
            svg_side=max(settings['sizes']),
            resized_to=smaller,
        )
    except OSError as error:
        raise UserError(f'--image: {path} cannot be read ({error}); give an image file') from error
    except Unfit as unfit:
        raise UserError(f'--image: {path} cannot be decoded ({unfit}); give an image file') from unfit
    return f'{exact_hash(decoded.image, size=(decoded.width, decoded.height)):016x}'


def _some(names: Sequence[str]) -> str:
    return ', '.join(names[:10]) + (f' and {len(names) - 10} more' if len(names) > 10 else '')
