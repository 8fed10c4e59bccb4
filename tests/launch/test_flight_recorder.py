"""NCCL's flight recorder: the environment that switches it on, and the file that a rank writes on request."""

import os
import time
from typing import Any

import pytest
from ranks import ROOT, free_port
from waiting import wait_until

from diffusion.launch.rank_discovery import NodePosition, nccl_environment
from diffusion.launch.workers import Workers

PROGRAM = """
import os, sys, time
import torch
device, folder = sys.argv[1:]
torch.distributed.init_process_group('nccl' if device == 'cuda' else 'gloo')
ones = torch.ones(4, device=device)
torch.distributed.all_reduce(ones)
assert ones.tolist() == [1.0] * 4
open(f'{folder}/ready', 'w').close()
until = time.monotonic() + 120
while not os.path.exists(f'{folder}/done') and time.monotonic() < until:
    time.sleep(0.05)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_rank_with_nccl_writes_its_collectives_on_request(tmp_path, device):
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    environ = os.environ | nccl_environment({}, tmp_path, str(tmp_path / 'nccl-rank-')) | {'PYTHONPATH': str(ROOT)}
    position = NodePosition('test', 0, 1, 1, '127.0.0.1', free_port())
    workers = Workers(position, [str(program), device, str(tmp_path)], environ, tmp_path)
    try:
        alive: Any = {'running': lambda: not workers.ended(), 'shown': workers.codes}
        wait_until((tmp_path / 'ready').exists, 120, **alive)
        asked = workers.request_nccl_dumps()
        assert asked == ([0] if device == 'cuda' else [])
        if device == 'cuda':
            file = tmp_path / 'nccl-rank-0'
            wait_until(file.exists, 30, **alive)
            time.sleep(2)  # it exists before it is whole
            assert b'all_reduce' in file.read_bytes()
        (tmp_path / 'done').touch()
        assert workers.processes[0].wait(60) == 0
    finally:
        workers.kill()
