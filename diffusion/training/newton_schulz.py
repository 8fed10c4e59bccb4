"""Newton-Schulz iteration: orthogonalize a batch of matrices with matrix products alone.

Shapes: N matrices, R rows, C columns.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the polynomial a s + b s^3 + c s^5 that each step applies to the singular values s (Jordan et
al. 2024). It has a large slope at 0: five steps bring every s in [0.0015, 1] to [0.67, 1.21]."""
MIN_NORM = 1e-15
"""Lower bound of the norm that matrices are divided by: zero stays zero, and squares do not underflow in float32."""


def orthogonalize(matrices_NRC: Tensor, *, steps: int) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T of each matrix, approximately, as [N, R, C].

    The singular values of the result are near 1 instead of exactly 1; those of a matrix of zeros are 0. One chain of
    batched products computes all matrices, in their own dtype. Scaling a matrix does not change its result.

    Args:
        matrices_NRC: The matrices, in the dtype of the computation; bfloat16 is accurate enough.
        steps: Number of steps; 5 in Jordan et al.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", algorithm 2.
    """
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    # Transposing makes the Gram matrices X X^T those of the smaller side.
    x = matrices_NRC.mT if tall else matrices_NRC
    precise = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise).clamp(min=MIN_NORM)
    x = (x / norms).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
