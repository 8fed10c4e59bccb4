"""Tars of images and captions, as img2dataset writes them and webdataset reads them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.prepare.extra_columns import read_columns
from diffusion.prepare.file_listing import as_utf8, list_files, local_copy, whole_file
from diffusion.prepare.source import IMAGE_SUFFIXES, Entry, Part
from diffusion.prepare.tar_reading import DamagedTar, Member, members

SUFFIXES = ('.tar', '.tar.gz', '.tgz')
KNOWN = frozenset({*IMAGE_SUFFIXES, 'txt', 'json'})


@dataclass(frozen=True)
class WebDatasetSource:
    """Tars of a folder, a file, or a pattern in braces; a part a tar, a sample an image.

    A sample is what stands side by side under one name: `000000012.jpg`, the caption in `000000012.txt`, metadata in
    `000000012.json`. Its key is the tar's name and its own, `00000/000000012`. Captions are the JSON's `captions`, or
    else the .txt, or else the JSON's `caption`; the JSON's other columns are metadata. Other files are passed over,
    such as the `00000.parquet` and `00000_stats.json` that img2dataset puts beside its tars.
    """

    location: str

    def parts(self) -> list[Part]:
        """Return a part for each tar.

        Raises:
            ValueError: There is none, or the location cannot be listed.
        """
        return [whole_file(file, SUFFIXES[0]) for file in list_files(self.location, SUFFIXES)]

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield the samples in the tar's order; of a damaged tar, those before the damage and then one that names it.

        Raises:
            ValueError: A store refuses to give the tar.
            OSError: It cannot be read now.
        """
        stem, size = part.where['stem'], part.where['size']
        with local_copy(part.where['url'], size=size) as path:
            yield from _entries(path, stem)


@dataclass
class _Sample:
    """Members of one name that stand side by side."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)
    """The members by suffix."""

    @property
    def image(self) -> Member | None:
        return next((self.members[suffix] for suffix in IMAGE_SUFFIXES if suffix in self.members), None)


def _entries(path: Path, stem: str) -> Iterator[Entry]:
    had_image: dict[str, bool] = {}
    try:
        for sample in _samples(path):
            has_image = sample.image is not None
            if sample.key not in had_image:
                yield _entry(sample, stem)
            else:
                both = has_image and had_image[sample.key]
                yield Entry(_key(sample, stem), problem='duplicate_key' if both else 'sample_scattered')
            had_image[sample.key] = has_image or had_image.get(sample.key, False)
    except DamagedTar as damage:
        yield Entry(f'{stem} at byte {damage.byte}', problem=f'part_{damage}')


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield runs of members of one name; a suffix that comes again begins a new sample."""
    sample = None
    try:
        for member in members(path):
            key, suffix = _split(member.name)
            if suffix not in KNOWN:
                continue
            if sample is None or sample.key != key or suffix in sample.members:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            sample.members[suffix] = member
    except DamagedTar as damage:
        # The last sample is whole if the damage is in another's member; else what it lacks may be behind it.
        if sample is not None and damage.name is not None and _split(damage.name)[0] != sample.key:
            yield sample
        raise
    if sample is not None:
        yield sample


def _split(name: str) -> tuple[str, str]:
    """Return key and suffix; webdataset cuts the last piece of a path at its first dot."""
    folder, slash, last = name.removeprefix('./').rpartition('/')
    stem, _, suffix = last.partition('.')
    return folder + slash + stem, suffix.lower() if stem else ''


def _key(sample: _Sample, stem: str) -> str:
    return f'{stem}/{as_utf8(sample.key)}'


def _entry(sample: _Sample, stem: str) -> Entry:
    metadata = read_columns(sample.members['json'].content or b'') if 'json' in sample.members else {}
    captions, caption = metadata.pop('captions', None), metadata.pop('caption', None)
    entry = Entry(_key(sample, stem), metadata=metadata)
    if sample.image is None or not sample.image.is_file:
        entry.problem = 'no_image'
    elif sample.image.content is None:
        entry.problem = 'file_too_large'
    else:
        entry.image = sample.image.content
    if isinstance(captions, list):
        entry.captions = captions
    elif 'txt' in sample.members:
        try:
            entry.captions = [str(sample.members['txt'].content or b'', 'utf-8-sig')]
        except UnicodeDecodeError:
            entry.problem = entry.problem or 'caption_not_utf8'
    elif caption is not None:
        entry.captions = [caption]
    return entry
