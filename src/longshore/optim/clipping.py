"""The global norm, and the coefficient that the kernel multiplies in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from longshore.errors import GradientError, LongshoreError
from longshore.host import HostStore
from longshore.kernels import Scale


class Clipping:
    """The clipping of one window: the coefficient, and what it was measured on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._coefficient = 1.0
        self._measured: object = None
        self._active = False

    @property
    def scale(self) -> Scale:
        return Scale(self._coefficient)

    def clip(self, norm: Tensor, max_norm: float, fingerprint: object) -> None:
        """Set the coefficient ``max_norm / (norm + 1e-6)``, at most 1, as torch computes it.

        Raises:
            LongshoreError: the window is clipped already.
        """
        if self._active and self._coefficient != 1.0:
            raise LongshoreError("clip_grad_norm_ was already called in this window; call it once, before step()")
        self._coefficient = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._measured = fingerprint
        self._active = True

    def check(self, fingerprint: object) -> None:
        """The gradients are still those that were measured.

        Raises:
            GradientError: they changed between ``clip_grad_norm_`` and ``step()``.
        """
        if self._active and fingerprint != self._measured:
            raise GradientError(
                "gradients changed between optimizer.clip_grad_norm_() and step(), so its coefficient is not theirs; "
                "clip last, or call zero_grad() to discard them"
            )


def gradient_norm(store: HostStore, gradients: Mapping[int, Tensor | None], scale: Scale) -> Tensor:
    """The 2-norm over all gradients: squares added in float64, rounded to float32 once.

    What is on the host is added there. Gradients still on a device are measured
    there, each in float64, rather than copied twice.
    """
    on_host: dict[int, Tensor | None] = {}
    total = 0.0
    for parameter, gradient in gradients.items():
        if gradient is None or not store.transfer.staged:
            on_host[parameter] = gradient
        else:
            total += float(torch.linalg.vector_norm(gradient.float() * scale.first, dtype=torch.float64)) ** 2
    total += store.sum_of_squares(on_host, scale)
    return torch.tensor(math.sqrt(total) if total >= 0 else total, dtype=torch.float32)
