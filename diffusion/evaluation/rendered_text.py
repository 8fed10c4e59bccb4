"""Text in images: an OCR reads it, and the rules of LongText-Bench and CVTG-2K compare it with the prompts.

LongText-Bench: Geng et al., https://arxiv.org/abs/2507.22058, `textbench/summary_scores.py` of X-Omni. CVTG-2K: Du et
al., https://arxiv.org/abs/2503.23461, `unified_metrics_eval.py` of TextCrafter. Their authors read the images with
other networks, so the metrics' names here end in `_rapidocr`; docs/geneval.md lists the differences.
"""

import difflib
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import BenchmarkScore, clustered_proportion
from diffusion.evaluation.feature_networks import import_optional
from diffusion.evaluation.generated_images import kept_answer
from diffusion.evaluation.prompts import CVTG, Prompt, categories
from diffusion.storage.atomic import write_atomically

ANSWER_SUFFIX = '.rapidocr.json'
"""Suffix of the JSON file beside each image that has the text read in the image."""
LETTERS = 'a-zA-Z0-9àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ'
"""Letters and digits that LongText-Bench compares, besides Chinese characters; it ignores all others."""
SPELLED = '0-9A-Za-z\u00c0-\u04ff'
"""Digits, and letters of scripts that have spaces between words: Latin, Greek and Cyrillic."""
CHINESE = '\u4e00-\u9fa5'
PUBLISHED_QUOTES = r"'(.*?)'"
"""Text in single quotes, as the authors of CVTG-2K find it: an apostrophe counts as a quote."""
QUOTES = rf'(?<![{SPELLED}]){PUBLISHED_QUOTES}(?![{SPELLED}])'
"""Text in single quotes, without apostrophes in words. Chinese and Korean characters may be next to a quote."""
METRICS = {'word_accuracy_rapidocr': (0, 1), 'ned_rapidocr': (2, 3)}
"""For each metric, two columns of `TextReader.counts`: the score is the first one's sum over the second one's."""


def text_counts(prompt: Prompt, lines: Sequence[str]) -> tuple[float, float, float, float]:
    """Count right and wanted words in an image's lines of text; return both, the sum and number of similarities.

    Args:
        prompt: A line of LongText-Bench, whose `text` lists the texts, or a prompt with words in single quotes.
    """
    texts = prompt.metadata.get('text')
    if isinstance(texts, list):
        return _longtext_counts(
            ' '.join(map(str, texts)), ' '.join(lines), bool(re.search(f'[{CHINESE}]', prompt.text))
        )
    return _cvtg_counts(_quoted_words(prompt), [word for line in lines for word in line.lower().split()])


def check_text(prompts: Sequence[Prompt]) -> None:
    """Raise UserError if no prompt asks for text."""
    if not any(text_counts(each, [])[1] for each in prompts):
        raise UserError(
            f'{" and ".join(METRICS)}: no prompt asks for text; use text_prompts.jsonl of LongText-Bench, the folder '
            "of CVTG-2K, or prompts with text in single quotes, such as: a sign that says 'Open'"
        )


def _longtext_counts(wanted: str, found: str, chinese: bool) -> tuple[float, float, float, float]:
    """Count words, or characters of Chinese prompts, in any order; the only similarity is that of the whole text."""
    if chinese:
        wanted, found = (re.sub(f'[^{CHINESE}{LETTERS}]', '', text) for text in (wanted, found))
    else:
        wanted, found = (re.sub(rf'[^{CHINESE}{LETTERS}\s]', '', text).lower() for text in (wanted, found))
        wanted, found = (' '.join(text.split()) for text in (wanted, found))
    words, others = (list(text) if chinese else text.split() for text in (wanted, found))
    return sum((Counter(words) & Counter(others)).values()), len(words), _similarity(wanted, found), bool(words)


def _quoted_words(prompt: Prompt) -> list[str]:
    published = prompt.metadata.get('benchmark') == CVTG
    quoted = re.findall(PUBLISHED_QUOTES if published else QUOTES, str(prompt.metadata.get('prompt', prompt.text)))
    return [word for text in quoted for word in text.lower().split()]


def _cvtg_counts(words: Sequence[str], found: Sequence[str]) -> tuple[float, float, float, float]:
    """Count words that were read anywhere; similarities are those to each word's closest match, found by difflib."""
    nearest = [difflib.get_close_matches(word, found or [''], n=1, cutoff=0)[0] for word in words]
    similarities = (_similarity(word, other) for word, other in zip(words, nearest, strict=True))
    return sum(word in found for word in words), len(words), sum(similarities), len(words)


def _similarity(text: str, other: str) -> float:
    """Return 1 minus the edit distance of two texts divided by the length of the longer one."""
    distances = list(range(len(other) + 1))
    for row, letter in enumerate(text, start=1):
        diagonal, distances[0] = distances[0], row
        for column, each in enumerate(other, start=1):
            changed = diagonal + (letter != each)
            diagonal = distances[column]
            distances[column] = min(changed, diagonal + 1, distances[column - 1] + 1)
    return 1 - distances[-1] / (max(len(text), len(other)) + 1e-5)


class TextReader(nn.Module):
    """Reads text by RapidOCR, which is PP-OCR of PaddleOCR in ONNX Runtime, on the CPU; saves it beside each image.

    The weights are in the wheel of RapidOCR. Lines with a confidence below 0.5 are left out, as in PaddleOCR.

    Raises:
        UserError: The extra `ocr` is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        import_optional('onnxruntime', 'ocr')
        settings = {
            'Global.log_level': 'error',
            'EngineConfig.onnxruntime.intra_op_num_threads': torch.get_num_threads(),
        }
        self._ocr: Any = import_optional('rapidocr', 'ocr').RapidOCR(params=settings)
        network = self._ocr.cfg.Rec
        self.engine = f'rapidocr {version("rapidocr")}, {network.ocr_version.value} {network.model_type.value}'
        """Name and versions of the OCR, which are saved with the results."""

    def counts(self, images: Sequence[Tensor], prompts: Sequence[Prompt], files: Sequence[Path]) -> Tensor:
        """Return `text_counts` of images, float64 [N, 4]; text that a file has from the same OCR is not read again.

        Args:
            images: Images, uint8 [3, H, W] each; sizes may differ.
            prompts: One prompt per image.
            files: Files of the images; the text in `000000.png` is kept as `000000.rapidocr.json`.
        """
        rows = [
            text_counts(prompt, self._lines(image, file))
            for image, prompt, file in zip(images, prompts, files, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def _lines(self, image: Tensor, file: Path) -> list[str]:
        path, about = file.with_suffix(ANSWER_SUFFIX), {'engine': self.engine}
        if (kept := kept_answer(path, about)) is not None:
            return kept['lines']
        found = self._ocr(np.ascontiguousarray(image.flip(0).permute(1, 2, 0).numpy()))  # RapidOCR expects BGR
        lines: list[str] = [*(found.txts or ())]
        confidences = [round(float(each), 5) for each in found.scores or ()]
        write_atomically(path, json.dumps({**about, 'lines': lines, 'confidences': confidences}) + '\n')
        return lines


def image_scores(counts: Tensor) -> dict[str, Tensor]:
    """Return the scores of single images [N] by metric, from their counts [N, 4]; NaN if the prompt wants no text."""
    return {name: counts[:, part] / counts[:, whole] for name, (part, whole) in METRICS.items()}


def text_scores(counts: Tensor, prompts: Sequence[Prompt]) -> dict[str, BenchmarkScore]:
    """Return the scores of images by metric, from their counts [N, 4]; all words of all images count equally.

    Images whose prompts want no text are left out, and so are categories with only such images.
    """
    wanted = counts[:, 1] > 0
    rows, prompts = counts[wanted].double().numpy(), [*itertools.compress(prompts, wanted.tolist())]
    texts = np.array([each.text for each in prompts])

    def score(columns: tuple[int, int], chosen: Sequence[int]) -> tuple[float, tuple[float, float]]:
        parts, wholes = rows[chosen][:, columns].T
        return clustered_proportion(parts, wholes, texts[chosen].tolist())

    return {
        name: BenchmarkScore(
            *score(columns, range(len(rows))),
            {kind: score(columns, chosen) for kind, chosen in categories(prompts).items()},
        )
        for name, columns in METRICS.items()
    }
