"""Program of two ranks that exchange files of a folder through `peers`, and write down what happened."""

import json
import logging
import shutil
import sys
from pathlib import Path

from composer.utils import dist
from faults import Fault, active

from diffusion.checkpointing.checkpoint_store import FileRecord, hash_file
from diffusion.checkpointing.tiers import peers
from diffusion.checkpointing.tiers.node_tier import NodeTier
from diffusion.checkpointing.tiers.peers import Peers, exchange_files, new_group, receive_file, send_file
from diffusion.checkpointing.tiers.tier_restore import newest_in_tiers


class GivenUp(Exception):
    """Error of a save that has been abandoned."""


def main(root: Path) -> None:
    logging.basicConfig(level='INFO', format='%(message)s')
    peers.CHUNK_BYTES = 1000
    dist.initialize_dist('cpu')
    rank = dist.get_global_rank()
    group, other = new_group(), Peers(to=1 - rank, source=1 - rank)
    found: dict[str, str] = {}

    def exchange(case: str, contents: dict[str, bytes], *, calls: int = 10**6) -> None:
        folder = root / f'{case}-{rank}'
        folder.mkdir()
        records = {}
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            records[name] = hash_file(folder / name)
        if case == 'short' and rank == 0:
            (folder / 'a0').write_bytes(b'x' * 1500)
        if case == 'changed' and rank == 0:
            (folder / 'a0').write_bytes(b'y' * len(contents['a0']))
        if case == 'full' and rank == 1:
            (folder / 'a0').mkdir()  # cannot be opened for writing
        left = iter(range(calls))

        def check() -> None:
            if rank == 0 and next(left, None) is None:
                raise GivenUp

        found[case] = attempt(lambda: exchange_files(folder, records, other, group, check))

    def attempt(work) -> str:  # type: ignore[no-untyped-def]
        try:
            work()
        except Exception as error:
            return f'{type(error).__name__}: {error}'
        return 'done'

    own = {f'a{rank}': bytes([rank]) * 3500, f'b{rank}': b'', f'c{rank}': b'c' * 1000}
    exchange('equal', own)
    exchange('different', own if rank else {})
    exchange('short', own)
    exchange('changed', own)
    exchange('full', own)
    exchange('abandoned', own, calls=2)
    exchange('again', own)
    path = root / 'equal-0' / 'a0'
    record = hash_file(path)
    for case, expected in (('sent', record), ('wrong', FileRecord(3500, '0' * 32))):
        if rank == 0:
            found[case] = attempt(lambda: send_file(path, record, 1, group))
        else:
            target = root / case
            found[case] = attempt(lambda target=target, expected=expected: receive_file(target, expected, 0, group))
    # Each of the two nodes has one rank. The second loses a file, has a damaged one, and then loses the whole folder.
    tier = NodeTier('memory', root / f'node{rank}' / 'user' / 'run', 'run', replicate=True)
    tier.folder.parent.parent.mkdir()
    tier.open(begun=False)
    found['kept'] = str(tier.kept_bytes([100, 7]))
    work = tier.work_folder(5)
    tier.begin(5, every_rank=True)
    (work / f'__{rank}_0.distcp').write_bytes(bytes([rank]) * 1500)
    if rank == 0:
        (work / 'state.pt').write_bytes(b'state')
    records = {path.name: hash_file(path) for path in work.iterdir()}
    tier.upload(work, records, 5, lambda: None)
    every = {name: each for rank_records in dist.all_gather_object(records) for name, each in rank_records.items()}
    if rank == 0:
        (work / '.metadata').write_bytes(b'index')
        index = {'.metadata': hash_file(work / '.metadata')}
        tier.upload(work, index, 5, lambda: None)
        tier.publish(work, 5, every | index, {'run': 'run', 'batch': 5, 'kind': 'sharded', 'world_size': 2})
    tier.finish(work, 5)
    checkpoint = tier.folder / 'ba5'
    found['files'] = ' '.join(sorted(path.name for path in checkpoint.iterdir()))
    for tier.recipe_text in ('', 'changed'):
        if rank == 1:
            (checkpoint / 'state.pt').write_bytes(b'STATE')
            (checkpoint / '__1_0.distcp').unlink()
            if tier.recipe_text:
                shutil.rmtree(checkpoint)
        dist.barrier()
        assert newest_in_tiers([tier], [], at_least=5) == checkpoint
        assert {path.name for path in checkpoint.iterdir()} == {*every, '.metadata', 'receipt.json'}
        assert all(hash_file(checkpoint / name) == record for name, record in every.items())
    # A fault of one node concerns both.
    with active(root, Fault('create', r'node1/.*receipt\.json', 'ENOSPC')):
        assert newest_in_tiers([tier], [], at_least=5) is None
    tier.close()
    (root / f'result-{rank}.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
