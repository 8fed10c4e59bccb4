"""Source for tar files of images and captions in webdataset format, as written by img2dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.prepare.caption_files import read_sidecars
from diffusion.prepare.dataset_splits import refuse_mixed_splits
from diffusion.prepare.file_listing import (
    as_utf8,
    is_pattern,
    list_files,
    local_copy,
    single_file_part,
    with_passed_over,
)
from diffusion.prepare.source import IMAGE_SUFFIXES, CaptionText, Entry, Part, PassedOver, column_list
from diffusion.prepare.tar_reading import DamagedTar, Member, members

SUFFIXES = ('.tar', '.tar.gz', '.tgz')


@dataclass(frozen=True)
class WebDatasetSource:
    """Tar files in a folder, a single tar file, or a pattern with braces; each tar file is one part.

    A sample is a group of adjacent members with the same stem: image `000000012.jpg`, caption `000000012.txt` and
    metadata `000000012.json`. Its key joins the stems of tar file and members: `00000/000000012`. Captions are
    taken from `captions` in the .json member, otherwise from the .txt member, otherwise from `caption` in the .json
    member; other JSON keys become metadata.

    A stem ends at the first dot, as in webdataset. But the stem of a name with more dots, such as `photo.v2.jpg`, is
    `photo.v2`; beside an image `photo.jpg`, this is a separate sample only if it has its own caption or metadata.

    Other files are skipped, such as `00000.parquet` and `00000_stats.json`, which img2dataset writes beside tar files.
    """

    location: str
    caption_text: CaptionText = 'whole'
    caption_column: str | Sequence[str] | None = None
    """Keys of .json members with captions, and `txt` for .txt members; None means those described for this class."""
    image_suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    caption_suffix: str = 'txt'

    def parts(self) -> list[Part]:
        """Return one part (unit of input that one job converts) per tar file."""
        files, others = list_files(self.location, SUFFIXES)
        if not is_pattern(self.location):
            refuse_mixed_splits(self.location, [file.name for file in files], 'webdataset')
        return with_passed_over([single_file_part(file, SUFFIXES[0]) for file in files], others)

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        """Yield samples in tar order; if damaged, yield the samples before the damage and an entry that reports it."""
        with local_copy(part.where['url'], size=part.where['size']) as path:
            yield from self.read_tar(path, part.where['stem'])

    def read_tar(self, path: Path, stem: str) -> Iterator[Entry | PassedOver]:
        """Yield a local tar file's samples, with keys that begin with this stem; see `read`."""
        # Reject a sample whose key has appeared before. If both samples have an image, it is a duplicate key.
        # Otherwise, a sample's members were not adjacent, so image and caption were read as two samples.
        had_image: dict[str, bool] = {}
        try:
            for sample in _samples(path, self.image_suffixes, (self.caption_suffix, 'json')):
                if isinstance(sample, Member):
                    yield PassedOver(f'{stem}/{as_utf8(sample.name)}')
                    continue
                has_image = sample.image is not None
                if sample.key not in had_image:
                    yield self._entry(sample, stem)
                else:
                    both = has_image and had_image[sample.key]
                    yield Entry(_key(sample, stem), problem='duplicate_key' if both else 'sample_scattered')
                had_image[sample.key] = has_image or had_image.get(sample.key, False)
        except DamagedTar as damage:
            yield Entry(f'{stem} at byte {damage.byte}', problem=f'part_{damage}')

    def _entry(self, sample: '_Sample', stem: str) -> Entry:
        entry = Entry(_key(sample, stem))
        if sample.image is None or not sample.image.is_file:
            entry.problem = 'no_image'
        elif sample.image.content is None:
            entry.problem = 'file_too_large'
        else:
            entry.image = sample.image.content
        names = (self.caption_suffix, 'json')
        text, columns = (sample.members[name].content or b'' if name in sample.members else None for name in names)
        read_sidecars(entry, text, columns, rule=self.caption_text, caption_columns=column_list(self.caption_column))
        return entry


@dataclass
class _Sample:
    """One image with caption and metadata: adjacent members of a tar file with the same stem."""

    key: str
    image_suffixes: Sequence[str]
    members: dict[str, Member] = field(default_factory=dict)

    @property
    def image(self) -> Member | None:
        return next((self.members[suffix] for suffix in self.image_suffixes if suffix in self.members), None)


def _samples(path: Path, image_suffixes: Sequence[str], beside: Sequence[str]) -> Iterator[_Sample | Member]:
    """Group adjacent tar members with the same stem into samples; yield other files one by one.

    A repeated suffix starts a new sample. `beside` are the suffixes of captions and metadata.
    """
    known = {*image_suffixes, *beside}
    group = _Group('', image_suffixes)
    try:
        for member in members(path):
            key, suffix = _split(member.name)
            if _split_suffix(suffix)[1] not in known:
                if member.is_file:
                    yield member
                continue
            if key != group.key or group.has(suffix):
                yield from group.samples()
                group = _Group(key, image_suffixes)
            group.add(suffix, member)
    except DamagedTar as damage:
        # If the damaged member belongs to another sample, the last sample is complete. Otherwise, or if the damaged
        # member's name is unknown, the last sample may lack members.
        if damage.name is not None and _split(damage.name)[0] != group.key:
            yield from group.samples()
        raise
    yield from group.samples()


class _Group:
    """Adjacent tar members whose names, including folders, are equal up to the first dot."""

    def __init__(self, key: str, image_suffixes: Sequence[str]) -> None:
        self.key = key
        self._image_suffixes = image_suffixes
        self._samples: dict[str, _Sample] = {}
        """Samples by the part of their stem after the first dot: `v2` for `photo.v2.jpg`, empty for `photo.jpg`."""

    def has(self, suffix: str) -> bool:
        """Return True if there is a member with this suffix; it may contain dots, such as `v2.jpg`."""
        middle, last = _split_suffix(suffix)
        return middle in self._samples and last in self._samples[middle].members

    def add(self, suffix: str, member: Member) -> None:
        middle, last = _split_suffix(suffix)
        key = f'{self.key}.{middle}' if middle else self.key
        sample = self._samples.setdefault(middle, _Sample(key, self._image_suffixes))
        sample.members[last] = member

    def samples(self) -> Iterator[_Sample | Member]:
        """Yield samples, and members that are not samples, such as a mask `photo.mask.png` beside `photo.jpg`."""
        plain = self._samples.get('')
        has_image = plain is not None and plain.image is not None
        for middle, sample in self._samples.items():
            if middle and has_image and (sample.image is None or len(sample.members) == 1):
                yield from sample.members.values()
            else:
                yield sample


def _split(name: str) -> tuple[str, str]:
    """Split a member's path into (key, suffix) at the first dot of the file name, as in webdataset."""
    folder, slash, last = name.removeprefix('./').rpartition('/')
    stem, _, suffix = last.partition('.')
    return folder + slash + stem, suffix if stem else ''


def _split_suffix(suffix: str) -> tuple[str, str]:
    """Split a suffix such as `v2.jpg` at its last dot; the part after it is returned in lower case."""
    middle, _, last = suffix.rpartition('.')
    return middle, last.lower()


def _key(sample: _Sample, stem: str) -> str:
    return f'{stem}/{as_utf8(sample.key)}'
