"""Module for `imports` of a recipe: a GPU has uncorrected memory errors from its second query on, in its first attempt.

It is the GPU of the rank in the variable SICK_RANK, by default 2.
"""

import os

if os.environ.get('RANK') is not None:
    from diffusion.callbacks import node_health
    from tests.nvml_driver import Driver

    class Sick(Driver):
        queries = 0

        def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
            self.queries += 1
            sick = (
                os.environ['RANK'] == os.environ.get('SICK_RANK', '2')
                and os.environ.get('DIFFUSION_ATTEMPT', '0') == '0'
            )
            return 2 if sick and self.queries > 1 else 0

    node_health.current_gpu = lambda: (Sick(), 'GPU-1')
