"""Exchange of files between two ranks over gloo, with faults on either side, after which neither waits."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.checkpointing.tiers.peers import choose_peers

PROGRAM = Path(__file__).with_name('exchange_program.py')


@pytest.fixture(scope='module')
def exchanged(ranks, tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """Folder of the program, and what happened on each rank by case, with its log."""
    root = tmp_path_factory.mktemp('exchange')
    logs = ranks.start_program(2, PROGRAM, root).end()
    return root, [json.loads((root / f'result-{rank}.json').read_text()) | {'log': logs[rank]} for rank in range(2)]


@pytest.mark.parametrize('case', ['equal', 'again'])
def test_each_rank_has_the_files_of_both(exchanged, case):
    root, found = exchanged
    assert [each[case] for each in found] == ['done', 'done']
    sizes = {'a0': 3500, 'a1': 3500, 'b0': 0, 'b1': 0, 'c0': 1000, 'c1': 1000}
    for rank in range(2):
        folder = root / f'{case}-{rank}'
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes
        assert (folder / f'a{1 - rank}').read_bytes() == bytes([1 - rank]) * 3500


def test_one_rank_has_nothing_to_send(exchanged):
    root, found = exchanged
    assert [each['different'] for each in found] == ['done', 'done']
    assert sorted(path.name for path in (root / 'different-0').iterdir()) == ['a1', 'b1', 'c1']
    assert (root / 'different-1' / 'a1').exists() and not (root / 'different-1' / 'a0').exists()


@pytest.mark.parametrize(
    ('case', 'sender', 'receiver'),
    [
        ('short', 'is shorter than when it was written', 'the node that has this file cannot read it'),
        ('changed', 'done', 'changed on its way from another node'),
        ('full', 'done', 'IsADirectoryError'),
        ('abandoned', 'GivenUp', 'the node that has this file cannot read it'),
        ('sent', 'done', 'done'),
        ('wrong', 'done', 'changed on its way'),
    ],
)
def test_faults_are_errors_on_the_ranks_that_they_concern(exchanged, case, sender, receiver):
    root, found = exchanged
    assert sender in found[0][case]
    assert receiver in found[1][case]
    assert not (root / 'wrong').exists() and (root / 'sent').read_bytes() == bytes([0]) * 3500
    if case not in ('abandoned', 'sent', 'wrong'):
        assert (root / f'{case}-0' / 'a1').read_bytes() == bytes([1]) * 3500, 'the other direction is not affected'


def test_nodes_have_the_files_of_each_other_and_restore_what_one_has_lost(exchanged):
    root, (first, second) = exchanged
    assert first['kept'] == second['kept'] == '107'
    assert first['files'] == second['files'] == '.metadata __0_0.distcp __1_0.distcp receipt.json state.pt'
    damage = f'memory tier, ba5: another node has this file: {root}/node1/user/run/ba5/state.pt: does not match its'
    assert damage in first['log'] and damage not in second['log']
    restored = r'memory tier, ba5: complete on 2 nodes and verified; (\d) files \((\S+) GB\) came from other nodes; '
    assert re.findall(restored, first['log']) == [('2', '1.5e-06'), ('4', '3.01e-06')]
    assert re.search(
        r'ba5: not used, its files could not be copied to all nodes \(\S+/node1/\S+: .*No space', first['log']
    )
    assert 'verified' not in second['log'] and 'not used' not in second['log']
    assert 'not copied to another node' not in first['log']


@given(domains=st.lists(st.sampled_from('abc'), min_size=2, max_size=9), per_node=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_peers_are_a_permutation_outside_of_the_failure_domain(domains, per_node):
    nodes = [[*range(node * per_node, (node + 1) * per_node)] for node in range(len(domains))]
    chosen = {rank: choose_peers(nodes, domains, rank) for node in nodes for rank in node}
    peers = {rank: each for rank, each in chosen.items() if each is not None}
    assert peers.keys() == chosen.keys()
    assert all(peers[each.to].source == rank for rank, each in peers.items())
    assert sorted(each.to for each in peers.values()) == [*peers]
    largest = max(domains.count(each) for each in domains)
    for rank, each in peers.items():
        assert each.to // per_node != rank // per_node
        if largest <= len(domains) // 2:
            assert domains[each.to // per_node] != domains[rank // per_node]


def test_nodes_without_peers():
    assert choose_peers([[0, 1]], [''], 0) is None
    assert choose_peers([[0, 1], [2]], ['', ''], 0) is None
