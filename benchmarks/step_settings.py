"""Rows of the step benchmark: settings of `speed` in the order in which they are turned on. Imports no PyTorch."""

PARTS = (
    'tf32',
    'fused_optimizer',
    'flash_attention',
    'conv_benchmark',
    'channels_last',
    'low_precision_norms',
    'compile',
)
"""Settings of `speed` in the order in which they are turned on."""
PLAIN, GRAPHS, MICROBATCH = 'plain', 'cuda_graphs', 'microbatch'
"""Names of the row without any setting, and of those with all settings and CUDA graphs or a larger microbatch."""
ROWS = (PLAIN, *PARTS, GRAPHS, MICROBATCH)
"""Names of the rows, each of which adds something to the row before."""
PUBLISHED_MICROBATCH = 16
