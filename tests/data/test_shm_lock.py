"""Names of datasets in shared memory, which all ranks of a machine must choose alike."""

PROGRAM = """
import sys
from composer.utils import dist
from streaming.base.shared import prefix
from streaming.base.world import World
from diffusion.data.shm_lock import one_job_at_a_time

dist.initialize_dist('cpu')
find = prefix._check_and_find
# As if the names of a killed job had vanished after rank 0 has looked.
prefix._check_and_find = lambda *arguments: find(*arguments) + 3 * (1 - dist.get_global_rank())
with one_job_at_a_time():
    number, memory = prefix.get_shm_prefix([sys.argv[1]], [None], World.detect())
assert len(set(dist.all_gather_object(number))) == 1
prefix._check_and_find = find
assert prefix._check_and_find_retrying.__module__ == prefix.__name__, 'restored'
dist.barrier()
"""


def test_ranks_that_find_different_free_names_agree(ranks, tmp_path):
    (tmp_path / 'program.py').write_text(PROGRAM)
    job = ranks.start_program(2, tmp_path / 'program.py', tmp_path)
    assert job.wait() == [0, 0], job.output()
