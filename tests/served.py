"""Callback that records which samples a run served: one line per rank and batch, with sample IDs and image shape."""

import json
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.config.registry import register
from diffusion.models import batch_keys


class Served(Callback):
    """Write the sample IDs and the image shape of every batch to `served-<rank>.jsonl` in a folder."""

    def __init__(self, folder: str = 'runs') -> None:
        self.path = Path(folder) / f'served-{dist.get_global_rank()}.jsonl'
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.batch
        line = {'ids': batch[batch_keys.SAMPLE_ID].tolist(), 'shape': list(batch[batch_keys.IMAGE].shape[2:])}
        with self.path.open('a') as lines:
            lines.write(json.dumps(line) + '\n')


register('callback', 'served', Served)


def read_served(folder: Path) -> list[tuple[list[int], set[tuple[int, ...]]]]:
    """Return the sorted sample IDs and the image shapes (height, width) of every global batch."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob('served-*.jsonl'))
    ]
    return [
        (sorted(index for line in lines for index in line['ids']), {tuple(line['shape']) for line in lines})
        for lines in zip(*ranks, strict=True)
    ]
