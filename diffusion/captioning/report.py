"""HTML report on the captions of a dataset: images with old and new captions, lengths, rejections and repeats."""

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from diffusion.captioning.caption_run import CaptionRun
from diffusion.captioning.shard_task import ShardTask
from diffusion.config.load import Recipe
from diffusion.data.image_reading import UnreadableImage, read_image
from diffusion.data.image_sheet import Figure, html_figures, html_page
from diffusion.errors import UserError
from diffusion.evaluation.metrics import build_networks
from diffusion.prepare.counts_report import STYLE, bars, histogram
from diffusion.prepare.process_sample import thumbnail
from diffusion.prepare.report_content import TOKENS
from diffusion.prepare.report_content import histogram as histogram_of
from diffusion.storage.caption_tables import ORIGINAL, read_table
from diffusion.training.components import build_tokenizers

IMAGES = 50
SHARDS_SHOWN = 10
"""Maximum number of shards from which images are shown, since each must be downloaded."""
MAX_CAPTIONS = 100_000
"""No further shard is read for a column's rejections, lengths and repeats once this many images have been read."""
ITEMS_SHOWN = 10
"""Maximum length of the lists of a column's most frequent captions and of its lowest CLIP scores."""
TABLE_STYLE = 'tr.images td { padding: .6em; border-top: 1px solid #ddd; width: 30em } td p { margin: 0 0 .5em }'


class ClipScores:
    """CLIP scores of the captions in a report; `networks` gives the source of the CLIP model (`build_networks`)."""

    def __init__(self, networks: Mapping[str, str]) -> None:
        self.scorer: Any = build_networks(['clip_score'], networks)['clip_score']
        self.scorer.to('cuda' if torch.cuda.is_available() else 'cpu')
        self.found: dict[str, list[tuple[float, str, str]]] = {}
        """Score, key and caption, by column."""

    def of(self, key: str, image: Image.Image, captions: Mapping[str, str]) -> dict[str, str]:
        """Return the text with the CLIP score to append to each of an image's captions, by column."""
        pixels, shown = torch.from_numpy(np.array(image)).permute(2, 0, 1), {}
        for column, caption in captions.items():
            score = float(self.scorer.scores([pixels], [caption]))
            self.found.setdefault(column, []).append((score, key, caption))
            shown[column] = f' (CLIP score {score:.1f})'
        return shown

    def section(self) -> Iterator[str]:
        """Yield HTML with each column's mean score and the captions with its lowest scores."""
        for column, found in self.found.items():
            mean = np.mean([score for score, _, _ in found])
            yield f'<h2>CLIP score, {html.escape(column)}</h2><p>{mean:.2f}, the mean of {len(found)}. The lowest:</p>'
            lowest = (f'{score:.1f} {key}: {caption}' for score, key, caption in sorted(found)[:ITEMS_SHOWN])
            yield f'<ul>{"".join(f"<li>{html.escape(line)}</li>" for line in lowest)}</ul>'


def report_page(run: CaptionRun, recipe: Recipe, *, networks: Mapping[str, str] | None = None, seed: int = 0) -> str:
    """Return an HTML report on the captions so far; lengths are in tokens of the recipe's text encoder.

    CLIP scores are included unless `networks`, the source of the CLIP model (`build_networks`), is None.

    Raises:
        UserError: A column has no captions, the recipe's model takes no text, or the CLIP model cannot be loaded.
    """
    tokenizer: Any = max(build_tokenizers(recipe), key=lambda each: each.model_max_length, default=None)
    if tokenizer is None:
        raise UserError(f'--recipe: the model {recipe.model.name} takes no text; give the recipe of one that does')
    draws, tasks = np.random.default_rng(seed), run.tasks()
    tasks = [tasks[index] for index in draws.permutation(len(tasks))]
    parts = [part for column in run.plans for part in _column_section(run, column, tasks, tokenizer)]
    scores = None if networks is None else ClipScores(networks)
    rows = [_image_row(*each, scores) for each in _shown_images(run, tasks[:SHARDS_SHOWN], draws)]
    parts += [*(() if scores is None else scores.section()), '<h2>Images</h2>', '<table>', *rows, '</table>']
    title = f'{run.place}: captions'
    return html_page(title, '\n'.join([f'<h1>{html.escape(title)}</h1>', *parts]), style=STYLE + TABLE_STYLE)


def _column_section(run: CaptionRun, column: str, tasks: Sequence[ShardTask], tokenizer: Any) -> Iterator[str]:
    names = [task.tables[column] for task in tasks if column in task.tables]
    if not names:
        raise UserError(f'columns.{column}: {run.place} has no captions of this column yet; caption images first')
    captions, rules, samples, read = list[str](), Counter[str](), 0, 0
    while read < len(names) and samples < MAX_CAPTIONS:
        table, read = read_table(run.dataset, names[read]), read + 1
        captions += table['caption'].drop_null().to_pylist()
        rules, samples = rules + Counter(table['rejected'].drop_null().to_pylist()), samples + len(table)
    of = f'{samples:,} images' if read == len(names) else f'{samples:,} images of {read:,} of {len(names):,} shards'
    rejected = rules.total()
    yield f'<h2>{html.escape(column)}</h2><p>{of}, {rejected:,} rejected ({rejected / samples:.2%}).</p>'
    yield bars({rule: (count, '') for rule, count in rules.most_common()})
    if not captions:
        return
    tokens = np.array([len(ids) for ids in tokenizer(captions, truncation=False, verbose=False).input_ids])
    limit = tokenizer.model_max_length
    yield histogram('length in tokens', histogram_of(tokens, TOKENS))
    yield f'<p>{(tokens > limit).mean():.1%} have more than the {limit} tokens that the text encoder reads.</p>'
    words = [re.findall(r'[^\W\d_]+', caption.lower()) for caption in captions]
    repeats = Counter(map(' '.join, words))
    again = len(captions) - len(repeats)
    yield (
        f'<p>{len({word for each in words for word in each}):,} different words. {again:,} of {len(captions):,} '
        'captions equal an earlier one but for numbers, capitals and punctuation. Most frequent:</p>'
    )
    yield bars({text[:200]: (count, '') for text, count in repeats.most_common(ITEMS_SHOWN) if count > 1})


def _shown_images(
    run: CaptionRun, tasks: Sequence[ShardTask], draws: np.random.Generator
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield random samples, each with its row of each column's caption table, by column."""
    for task, samples in run.samples(tasks):
        tables = {column: read_table(run.dataset, name) for column, name in task.tables.items()}
        count = min(-(-IMAGES // len(tasks)), task.entry['samples'])
        chosen = set(draws.choice(task.entry['samples'], count, replace=False).tolist())
        for row, sample in enumerate(samples):
            if row in chosen:
                yield sample, {column: table.slice(row, 1).to_pylist()[0] for column, table in tables.items()}


def _image_row(sample: Mapping[str, Any], columns: Mapping[str, Any], scores: ClipScores | None) -> str:
    """Return an HTML table row: an image, the captions stored in its shard, and the new captions of each column."""
    old = [str(text) for text in sample.get('captions') or [sample.get('caption') or '']]
    captions = {ORIGINAL: old[0], **{column: line['caption'] for column, line in columns.items()}}
    shown = dict.fromkeys(captions, '')
    try:
        picture = read_image(sample['image'], first_frame=True).image
        image = html_figures([Figure([thumbnail(picture)], sample['key'])])
        if scores is not None:
            shown |= scores.of(sample['key'], picture, {column: text for column, text in captions.items() if text})
    except UnreadableImage as error:
        image = html.escape(f'{sample["key"]}: {error}')
    old[0] += shown[ORIGINAL]
    new = [
        f'{column}{f", rejected ({rule})" if (rule := line["rejected"]) else ""}: {line["caption"] or line["answer"]}'
        + shown[column]
        for column, line in columns.items()
    ]
    cells = [image, *(''.join(f'<p>{html.escape(text)}</p>' for text in each) for each in (old, new))]
    return f'<tr class="images">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
