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
PLAIN, MICROBATCH = 'plain', 'microbatch'
"""Names of the row without any setting, and of the row with all settings and a larger microbatch."""
ROWS = (PLAIN, *PARTS, MICROBATCH)
"""Names of the rows, each of which adds something to the row before."""
PUBLISHED_MICROBATCH = 16
