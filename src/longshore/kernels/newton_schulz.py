"""Newton-Schulz iteration, which makes a matrix nearly orthogonal.

The operations are those of ``torch.optim.Muon``, in its order, on one matrix: a batch of several, another order of the
products or float32 would give other bits. The bits of a product of matrices belong to a kind of device and a build of
its library; on one of them, the number of threads changes none. Memory that is stored transposed does, on some CPUs, so
matrices are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1.

    Each step computes ``a X + (b A + c A A) X`` with ``A = X X^T`` (Jordan et al., 2024), after a division by the
    Frobenius norm.

    Args:
        matrix: bfloat16 ``[rows, columns]``, contiguous, on any device; its memory is written.
        coefficients: ``a``, ``b`` and ``c``.
        steps: number of steps.
        eps: least norm to divide by.

    Returns:
        bfloat16 ``[rows, columns]``, contiguous.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if tall else x).contiguous()


def newton_schulz_bytes(rows: int, columns: int) -> int:
    """Return the most bytes that :func:`newton_schulz` takes at a time, its argument and result included."""
    short, numel = min(rows, columns), rows * columns
    # At the end of a step there are the argument, x before and after, the Gram matrix and its polynomial; a tall result
    # is copied when the last two are gone.
    return 2 * (3 * numel + 2 * short * short)
