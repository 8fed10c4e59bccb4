"""Program of two ranks that exchange files of a folder through `peers`, and write down what happened."""

import json
import sys
from pathlib import Path

from composer.utils import dist

from diffusion.checkpointing.checkpoint_store import FileRecord, hash_file
from diffusion.checkpointing.tiers import peers
from diffusion.checkpointing.tiers.peers import Peers, exchange_files, new_group, receive_file, send_file


class GivenUp(Exception):
    """Error of a save that has been abandoned."""


def main(root: Path) -> None:
    peers.CHUNK_BYTES = 1000
    dist.initialize_dist('cpu')
    rank = dist.get_global_rank()
    group, other = new_group(), Peers(to=1 - rank, source=1 - rank)
    found: dict[str, str] = {}

    def exchange(case: str, contents: dict[str, bytes], *, folder_exists: bool = True, calls: int = 10**6) -> None:
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
    (root / f'result-{rank}.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
