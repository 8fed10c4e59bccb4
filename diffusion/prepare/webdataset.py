"""Source for tar files of images and captions in webdataset format, as written by img2dataset."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.prepare.extra_columns import read_columns
from diffusion.prepare.file_listing import as_utf8, list_files, local_copy, single_file_part
from diffusion.prepare.source import IMAGE_SUFFIXES, Entry, Part
from diffusion.prepare.tar_reading import DamagedTar, Member, members

SUFFIXES = ('.tar', '.tar.gz', '.tgz')
KNOWN = frozenset({*IMAGE_SUFFIXES, 'txt', 'json'})


@dataclass(frozen=True)
class WebDatasetSource:
    """Tar files in a folder, a single tar, or a pattern with braces; each tar is a part.

    A sample is a run of adjacent members with the same stem: the image `000000012.jpg`, the caption `000000012.txt` and
    the metadata `000000012.json`. Its key is the stem of the tar plus its own, `00000/000000012`. Captions come from
    `captions` in the JSON, else from the .txt, else from `caption` in the JSON; other JSON columns are metadata. Other
    files are ignored, such as the `00000.parquet` and `00000_stats.json` that img2dataset writes beside its tars.
    """

    location: str

    def parts(self) -> list[Part]:
        """Return one part (unit of input that one job converts) per tar.

        Raises:
            ValueError: There is no tar, or the location cannot be listed.
        """
        return [single_file_part(file, SUFFIXES[0]) for file in list_files(self.location, SUFFIXES)]

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield the samples in tar order; for a damaged tar, those before the damage, then an entry that reports it.

        Raises:
            ValueError: The store denies access to the tar.
            OSError: The tar cannot be read at the moment.
        """
        stem, size = part.where['stem'], part.where['size']
        with local_copy(part.where['url'], size=size) as path:
            yield from _entries(path, stem)


@dataclass
class _Sample:
    """One image with its caption and metadata files: adjacent members of a tar with the same stem."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)
    """Members by suffix."""

    @property
    def image(self) -> Member | None:
        return next((self.members[suffix] for suffix in IMAGE_SUFFIXES if suffix in self.members), None)


def _entries(path: Path, stem: str) -> Iterator[Entry]:
    # A key that appears a second time would become two samples with one key. If both have an image it is a duplicate;
    # otherwise the members of one sample were not adjacent, so that image and caption were read as two samples.
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
    """Group adjacent members of a tar with the same stem into samples; a repeated suffix starts a new sample."""
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
        # If the damaged member belongs to another sample, the last sample is complete. Otherwise, or if the name of the
        # damaged member is unknown, members of the last sample may be missing.
        if sample is not None and damage.name is not None and _split(damage.name)[0] != sample.key:
            yield sample
        raise
    if sample is not None:
        yield sample


def _split(name: str) -> tuple[str, str]:
    """Return (key, suffix) of a member, split at the first dot of the file name as webdataset does."""
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
