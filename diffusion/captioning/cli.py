"""Command line of `diffusion caption`; modules that handle images are imported only when the command runs."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffusion.config.byte_sizes import bytes_text
from diffusion.config.options import Option, Overrides
from diffusion.errors import UserError, printable

if TYPE_CHECKING:
    from diffusion.captioning.caption_run import CaptionRun
    from diffusion.language_models.engine import Engine

MEASURED_IMAGES = 32


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """Options of `diffusion caption`."""

    dataset: Annotated[str, Option('DIR_OR_URL', positional=True, files=True)]
    """Dataset that diffusion prepare has written; or the YAML file of a preparation, to caption its source before it is
    prepared: the tables are then in OUT-captions, and `prepare FILE.yaml source.captions=OUT-captions` joins them."""
    settings: Annotated[str, Option('FILE.yaml', flag='--with', files=True)]
    """YAML file with the model, the columns of captions and their prompts, and the engine."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of settings, such as concurrency=64."""
    share: Annotated[str | None, Option('I/N')] = None
    """Caption only share I of N, counted from 0, such as 3/16, on N machines; the last one to finish makes the columns
    available to training (default: all)."""
    work: Annotated[str | None, Option('DIR', files=True)] = None
    """Local folder for captions of unfinished shards (default: beside a local dataset, or in ~/.cache/diffusion)."""
    plan: bool = False
    """Caption up to 32 images without keeping the captions, and print images per second, and the hours, cost and bytes
    that all images will take."""
    dollars_per_hour: Annotated[float | None, Option('USD')] = None
    """Price per hour of the machine that runs the model, for the cost in --plan (default: print no cost)."""
    report: Annotated[str | None, Option('FILE.html', files=True)] = None
    """Write a report on the captions so far, with 50 random images, and caption nothing."""
    clip_score: bool = False
    """Show the CLIP score of each caption that --report shows, the mean of each column, and the lowest ones."""
    networks: Annotated[dict[str, str], Option('NAME=SOURCE', flag='--network')] = field(default_factory=dict)
    """CLIP model for --clip-score: clip_score=PATH or clip_score=ORG/NAME@COMMIT (default: as diffusion evaluate)."""
    recipe: Annotated[str | None, Option('FILE.yaml', files=True)] = None
    """Recipe whose text encoder counts the tokens in --report."""


def run_caption(options: CaptionOptions) -> int:
    """Run `diffusion caption`: caption the images that have no captions yet, and print the counts."""
    from diffusion.captioning.caption_run import CaptionRun
    from diffusion.captioning.settings import load_settings
    from diffusion.captioning.source_run import SourceRun
    from diffusion.prepare.work_dir import Share

    if options.networks and not options.clip_score:
        raise UserError('--network needs --clip-score; add it')
    if options.clip_score and options.report is None:
        raise UserError('--clip-score needs --report FILE.html; add it')
    settings = load_settings(options.settings, options.overrides)
    share = None if options.share is None else Share.parse(options.share)
    kind = SourceRun if options.dataset.endswith(('.yaml', '.yml')) else CaptionRun
    if kind is SourceRun and options.report is not None:
        raise UserError('--report: needs a prepared dataset; prepare it with these captions first')
    run = kind(options.dataset, settings, share=share, work=options.work)
    run.indexes()  # a mistake in the path is reported before a model is loaded
    if options.report is not None:
        from diffusion.captioning.report import report_page
        from diffusion.config.load import load
        from diffusion.storage.atomic import write_atomically

        if options.recipe is None:
            raise UserError('--report: counts the tokens of a text encoder; name the recipe of its model with --recipe')
        page = report_page(run, load(options.recipe), networks=options.networks if options.clip_score else None)
        write_atomically(Path(options.report), page)
        print(f'wrote {options.report}')
        return 0
    if settings.engine == 'endpoint':
        from diffusion.language_models.endpoint import Endpoint

        engine = Endpoint(settings)
    else:
        from diffusion.models.vision_language_model import LocalModel

        engine = LocalModel(settings)
    if options.plan:
        _print_plan(run, engine, options.dollars_per_hour)
        return 0
    try:
        run.execute(engine)
    except KeyboardInterrupt:
        print(f'interrupted; run the same command to resume, answers are in {run.work}', file=sys.stderr)
        return 130
    print(printable('\n'.join(_report(run))))
    return 0


def _report(run: 'CaptionRun') -> Iterator[str]:
    for column, rules in run.written.items():
        if not rules:
            yield f'{column}: every image has been captioned already'
            continue
        captions, tokens = rules.pop('captions'), rules.pop('tokens')
        named = ', '.join(f'{count:,} {rule}' for rule, count in rules.most_common())
        yield (
            f'{column}: {captions:,} captions of {tokens / max(1, captions):.0f} tokens on average, '
            f'{rules.total():,} rejected{f" ({named})" if named else ""}'
        )
        if column not in run.listed:
            yield f'{column}: other shards have no captions yet; use the column after the last share'
    if len(run.listed) == len(run.written):
        yield run.usage()


def _print_plan(run: 'CaptionRun', engine: 'Engine', dollars_per_hour: float | None) -> None:
    if not (tasks := run.remaining()):
        print('every image has its captions; nothing to do')
        return
    # This is 0 for a source: its parts have not been read, so the number of their images is unknown.
    remaining = sum(task.entry['samples'] for task in tasks)
    questions, begin = list(run.sample_questions(MEASURED_IMAGES)), time.monotonic()
    answers = list(engine.answers(questions))
    if not answers:
        raise UserError('--plan: no image of the first shard is left to measure; caption the dataset without --plan')
    measured, count = len({question.row for question in questions}), remaining or 1_000_000
    rate = measured / max(time.monotonic() - begin, 1e-6)
    hours, size = count / rate / 3600, sum(len(answer.text.encode()) for answer in answers) / measured * count
    cost = '' if dollars_per_hour is None else f', ${hours * dollars_per_hour:,.2f}'
    rejected = sum(answer.rejected is not None for answer in answers)
    print(f'{rate:.2f} images/s, measured on {measured} images; {rejected} of {len(answers)} answers were rejected')
    what = f'{remaining:,} images to caption' if remaining else 'each million images of this source'
    print(f'{what}: {hours:,.1f} hours{cost}, at most {bytes_text(size)} of tables')
