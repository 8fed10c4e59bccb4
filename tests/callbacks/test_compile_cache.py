"""CompileCache: a process that starts again compiles nothing, and files that cannot be used cost only time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, active

from diffusion.callbacks import compile_cache
from diffusion.callbacks.compile_cache import CompileCache, file_name, load

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from composer import Trainer
from composer.models import ComposerModel
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from diffusion.callbacks.compile_cache import CompileCache


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.compiled = torch.compile(lambda x: torch.nn.functional.silu(self.layer(x)).square())

    def forward(self, batch):
        return self.compiled(batch)

    def loss(self, outputs, batch):
        return outputs.mean()


model = Model()
loader = DataLoader([torch.full((4,), float(i)) for i in range(12)], batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cache = CompileCache(Path(sys.argv[1]))
trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, max_duration='3ba', callbacks=[cache],
                  device='cpu', progress_bar=False)
trainer.fit()
found = counters['inductor']
weights = float(model.layer.weight.double().sum())
print(json.dumps([cache.path.name, found['fxgraph_cache_miss'], found['fxgraph_cache_hit'], weights]))
"""


def train(folder: Path, local: Path) -> tuple[str, int, int, float, str]:
    """Train in a process; return the cache's file name, misses, hits, the sum of the weights, and the log."""
    more = {'TORCHINDUCTOR_CACHE_DIR': str(local), 'CUDA_VISIBLE_DEVICES': ''}
    command = [sys.executable, '-c', PROGRAM, str(folder)]
    result = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=500, check=True)
    return *json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.slow
def test_restart_on_another_machine_compiles_nothing_and_a_damaged_file_is_replaced(tmp_path):
    folder = tmp_path / 'compiled'
    folder.mkdir()
    damaged = folder / file_name()
    damaged.write_bytes(b'damaged')
    name, misses, _, weights, log = train(folder, tmp_path / 'first')
    assert 'is damaged, so the blocks are compiled again' in log
    assert misses > 0 and name == damaged.name
    assert [path.name for path in folder.iterdir()] == [name]
    assert damaged.stat().st_size > 1000, 'replaced'

    written = damaged.stat().st_mtime_ns
    again = train(folder, tmp_path / 'second')
    assert again[1] == 0 and again[2] > 0
    assert again[3] == weights
    assert damaged.stat().st_mtime_ns == written, 'nothing new to save'


def test_code_is_saved_after_a_batch_that_compiled_nothing_and_at_the_end(tmp_path, monkeypatch, caplog):
    found = {'stats': {'unique_graphs': 0}, 'inductor': {'fxgraph_cache_miss': 0}}
    monkeypatch.setattr(compile_cache, 'counters', found)
    monkeypatch.setattr(torch.compiler, 'save_cache_artifacts', lambda: (b'compiled', None))
    cache: Any = CompileCache(tmp_path / 'run')

    def saves(hook: Callable[..., None], graphs: int, misses: int = 1) -> bool:
        found['stats']['unique_graphs'], found['inductor']['fxgraph_cache_miss'] = graphs, misses
        cache.path.unlink(missing_ok=True)
        hook(None, None)
        return cache.path.exists() and cache.path.read_bytes() == b'compiled'

    assert not saves(cache.init, 1)
    batches = [saves(cache.batch_end, graphs) for graphs in (1, 2, 2, 2)]
    ends = [saves(cache.fit_end, *counts) for counts in ((2, 1), (3, 1), (4, 0))]
    assert (batches, ends) == ([False, False, True, False], [False, True, False]), 'a graph from the cache is not saved'
    assert not caplog.text, 'there is no file yet'
    caplog.set_level('INFO')
    assert saves(cache.fit_end, 5)
    assert f'{cache.path}: compiled code saved, 0.0 MB' in caplog.text
    cache.path.write_bytes(b'damaged')
    load(cache.path)
    assert f'{cache.path}: is damaged, so the blocks are compiled again' in caplog.text
    with active(tmp_path / 'met', Fault('open', r'gpu0\.bin', 'EIO'), Fault('create', r'gpu0\.bin', 'EIO')):
        load(cache.path)
        cache._save()
    assert f'{cache.path}: cannot be read, so the blocks are compiled again: ' in caplog.text
    assert 'compiled code was not saved, so a restart compiles it again: ' in caplog.text
    monkeypatch.setattr(compile_cache.dist, 'get_node_rank', lambda: 1)
    caplog.clear()
    cache._save()
    assert not caplog.text, 'only the first node saves'


@pytest.mark.skipif(os.getuid() != 0, reason='only root can give a file to another user')
def test_file_of_another_user_is_not_read(tmp_path, caplog):
    path = tmp_path / 'file.bin'
    path.write_bytes(b'hostile')
    os.chown(path, 12345, 12345)
    load(path)
    assert 'belongs to another user, so it is not read' in caplog.text
