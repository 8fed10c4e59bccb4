"""Exchange of matrices between three ranks: the results are those of one rank, also with uneven and empty shards."""

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from diffusion.errors import UserError
from diffusion.training.matrix_exchange import layout_of, on_whole_matrices
from diffusion.training.muon import Muon
from diffusion.training.muon import orthogonalize

dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (3,))
calls = []

def function(matrices):
    calls.append(len(matrices))
    return orthogonalize(matrices, steps=5)

torch.manual_seed(0)
for count, rows, columns, first in ((7, 5, 4, 0), (2, 2, 6, 1), (1, 9, 3, 5), (4, 4, 4, 2)):
    for dtype in (torch.float32, torch.bfloat16):
        matrices = torch.randn(count, rows, columns).to(dtype)
        expected = torch.cat([orthogonalize(each[None], steps=5) for each in matrices])
        sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in matrices]
        calls.clear()
        parts = torch.stack([each.to_local() for each in sharded])
        result = on_whole_matrices(function, parts, layout_of(sharded[0]), rows=rows, first=first)
        for each, found in zip(expected, result):
            torch.testing.assert_close(found, distribute_tensor(each, mesh, [Shard(0)]).to_local())
        assert sum(calls) <= -(-count // 3), 'each matrix is computed once, on one rank'
        calls.clear()
        copies = on_whole_matrices(function, matrices, layout_of(matrices[0]), rows=rows, first=first)
        torch.testing.assert_close(copies, expected)
        assert sum(calls) <= -(-count // 3), 'also if every rank has all of them'
        same = on_whole_matrices(
            function, matrices, layout_of(distribute_tensor(matrices[0], mesh, [Replicate()])), rows=rows
        )
        torch.testing.assert_close(same, expected)
try:
    layout_of(distribute_tensor(torch.zeros(6, 6), mesh, [Shard(1)]))
except UserError as error:
    print(error)

def train(model):
    matrices = [each for each in model.parameters() if each.ndim == 2]
    groups = [{'params': matrices, 'algorithm': 'muon', 'parts': [3 if len(each) == 6 else 1 for each in matrices]}]
    groups.append({'params': [each for each in model.parameters() if each.ndim == 1], 'algorithm': 'adamw'})
    optimizer = Muon(groups, lr=0.1)
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 5), step + 1.0)).square().sum().backward()
        optimizer.step()
    weights = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in weights]

def build():
    torch.manual_seed(1)
    sizes = (5, 2, 7, 2, 6, 4, 2, 5, 2)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in zip(sizes, sizes[1:])), nn.Tanh())

model = build()
fully_shard(model)
for one, other in zip(train(model), train(build()), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print('same')
"""


def test_matrices_are_computed_once_and_results_equal_those_of_one_rank(ranks):
    for output in ranks.start_program(3, '-c', PROGRAM).end():
        assert 'shard with fully_shard alone, or use AdamW' in output
        assert output.endswith('same\n')
