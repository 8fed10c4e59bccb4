"""Caption the images of a source before `diffusion prepare`, which later joins the tables of captions by image key."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from diffusion.captioning.caption_run import CaptionRun
from diffusion.captioning.shard_task import ShardTask
from diffusion.prepare.caption_table import CAPTION_PROBLEMS
from diffusion.prepare.part_shards import InputRow
from diffusion.prepare.process_sample import Buckets, decode_entry, make_samples
from diffusion.prepare.settings import load_settings
from diffusion.prepare.source import Part, PassedOver, Unfit


class SourceRun(CaptionRun):
    """Captioning of a source, given by a YAML file of `diffusion prepare`; for other arguments see `CaptionRun`.

    Each part of the source is treated as a shard. The tables are in OUT-captions, where OUT is the file's `out`. The
    model sees each image as `prepare` would store it at the largest resolution. Images that `prepare` would reject are
    not sent to the model; the table has the reason. Filters on columns missing in the source reject no image.
    """

    def __init__(self, recipe: str, *arguments: Any, **keywords: Any) -> None:
        self.recipe, given = recipe, load_settings(recipe)
        super().__init__(f'{given.out.rstrip("/")}-captions', *arguments, **keywords)
        filters = replace(given.filters, missing='keep', min_caption=1)
        self.prepared = replace(given, filters=filters, buckets='largest', fast_jpeg=True)
        self.source = given.source.open_images(sizes=given.sizes, formats=given.formats)
        self.parts = self.source.parts()
        # These settings decide what images the model sees and which are rejected, so a change must make new tables.
        stored = given.content_settings()
        shown = ('sizes', 'aspects', 'step', 'max_pixels', 'background', 'formats', 'filters')
        self.plans = {
            column: plan | {'prepare': {name: stored[name] for name in shown}} for column, plan in self.plans.items()
        }
        # Imitate index.json entries of shards: a part's stamp replaces the hash, and 0 its unknown number of images.
        named = ((f'shard.{part.name}.mds', part) for part in self.parts)
        raw = ({'basename': name, 'bytes': part.size, 'hashes': {'stamp': part.stamp}} for name, part in named)
        self.entries = [{'raw_data': each, 'samples': 0, 'number': number} for number, each in enumerate(raw)]

    def indexes(self) -> dict[str, list[dict[str, Any]]]:
        return {'': self.entries}

    def samples(self, tasks: Sequence[ShardTask]) -> Iterator[tuple[ShardTask, Iterator[dict[str, Any]]]]:
        for task in tasks:
            yield task, self._samples(self.parts[task.entry['number']])

    def usage(self) -> str:
        """Return a message on how to prepare the source with the listed columns."""
        columns = ', '.join(['original', *self.listed])
        return (
            f'to prepare the source with these captions: diffusion prepare {self.recipe} '
            f"source.captions={self.place} 'source.caption_column=[{columns}]'"
        )

    def _samples(self, part: Part) -> Iterator[dict[str, Any]]:
        settings = self.prepared
        buckets = Buckets(settings.sizes, settings.aspects, every=False, step=settings.step)
        for entry in self.source.read(part):
            if isinstance(entry, PassedOver):
                continue
            captions = [text for text in entry.captions if isinstance(text, str)]
            entry.captions, entry.caption_columns = ['-'], []  # images without a caption of their own get one here
            entry.problem = None if entry.problem in CAPTION_PROBLEMS else entry.problem
            try:
                candidate = decode_entry(entry, InputRow(entry.key), settings, buckets)
                ((_, sample),) = make_samples(candidate, {}, settings=settings, buckets=buckets, recoded=[])
                yield sample | {'captions': captions}
            except Unfit as unfit:
                yield {'key': entry.key, 'image': b'', 'problem': (str(unfit), unfit.detail or str(unfit))}
