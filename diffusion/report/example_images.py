"""Images of the prompts with the lowest and highest scores in a run's last evaluation, as small WebP files."""

import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image

from diffusion.report.sample_sheets import DAMAGE, SIDES, webp
from diffusion.storage.places import Place

SHARE = 0.25
"""Fraction of the size limit for a run's images that these images may use."""
MAX_EXAMPLES = 72
ANSWER = '.geneval.json'
"""Suffix of the file beside an image with GenEval's reason why the image does not match its prompt."""


class ExampleReader:
    """Reads the example images listed in evaluations, at most `max_bytes` in total; caches them for the next call."""

    def __init__(self, files: Place, max_bytes: int) -> None:
        self.files, self.max_bytes = files, max_bytes
        self._known: dict[str, tuple[Image.Image, str]] = {}

    def read(self, evaluations: Sequence[dict[str, Any]], notes: list[str]) -> dict[str, bytes]:
        """Return WebP images by key; add `image` (key and size) and `why` (reason why it is wrong) to each example.

        Only the last evaluation with examples keeps them: of its benchmarks or, if it has none, of its first metric.
        Add a note about examples without an image.
        """
        last = next((each for each in reversed(evaluations) if each['examples']), None)
        for each in evaluations:
            named = each['examples'] if each is last else {}
            benchmarks = [name for name in named if name in each['intervals']] or [*named][:1]
            each['examples'] = {name: named[name] for name in benchmarks}
        kinds = [kind for each in evaluations for by_kind in each['examples'].values() for kind in by_kind.values()]
        examples = [image for kind in kinds for side in kind.values() for image in side]
        pictures = [(each, *found) for each in examples[:MAX_EXAMPLES] if (found := self._picture(each['file']))]
        encoded: dict[str, bytes] = {}
        for side in SIDES[1:]:
            encoded = {}
            for example, picture, why in pictures:
                size = sum(map(len, encoded.values()))
                # If the images do not fit even at the smallest size, leave out the last ones.
                fits = side > SIDES[-1] or size < self.max_bytes
                example |= {'image': webp(picture, side, encoded) if fits else None, 'why': why}
            if sum(map(len, encoded.values())) <= self.max_bytes:
                break
        if lacking := [each['file'] for each in examples if not each.get('image')]:
            more = f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''
            notes.append(
                f'{lacking[0]}{more}: images of the worst and best prompts are not shown, because they are elsewhere, '
                'damaged, or too many.'
            )
        return encoded

    def _picture(self, file: str) -> tuple[Image.Image, str] | None:
        """Return an image and why it is wrong; None if the file does not exist or is damaged."""
        if file not in self._known and (content := self.files.read(file)) is not None:
            try:
                with Image.open(io.BytesIO(content)) as opened:
                    picture = opened.convert('RGB')
            except DAMAGE:
                return None
            picture.thumbnail((SIDES[1], SIDES[1]), Image.Resampling.LANCZOS)
            self._known[file] = picture, self._failure(file.removesuffix('.png') + ANSWER)
        return self._known.get(file)

    def _failure(self, file: str) -> str:
        try:
            return str(json.loads(self.files.read(file) or b'{}').get('failure') or '')
        except (ValueError, AttributeError, RecursionError):
            return ''
