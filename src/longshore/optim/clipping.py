"""Global gradient norm, and the clipping coefficient by which the kernel multiplies gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import GradientError, LongshoreError
from longshore.kernels import Scale, block_sums_on, total_of_blocks
from longshore.optim.shards import over_ranks
from longshore.store import Store


class Seen(NamedTuple):
    """A gradient at one moment: the parameter's name, the object in ``.grad``, a count that grows whenever the gradient
    changes, and the object that a script had put into ``.grad``, to which backwards were added that are on the host."""

    name: str
    gradient: weakref.ref[Tensor]
    changes: int
    added_to: weakref.ref[Tensor] | None = None


Fingerprint = Mapping[int, Seen]
"""The gradients of a window, by the parameter's index."""


class Clipping:
    """The clipping of one window: the coefficient, and the gradients that it was measured on.

    Attributes:
        loss_scale: the factor by which the losses of the window were multiplied.
        is_dynamic: whether that factor changes with overflows.
        overflowed: whether the gradients of the last window overflowed, so that its step was skipped.
    """

    def __init__(self) -> None:
        self.loss_scale = 1.0
        self.is_dynamic = self.overflowed = False
        self.reset()

    def reset(self) -> None:
        self._coefficient = 1.0
        self._measured: Fingerprint | None = None

    def scale_for(self, now: Callable[[], Fingerprint]) -> Scale:
        """Return the factors for the gradients; ``now`` returns their present fingerprint.

        A coefficient is dropped when all gradients that it was measured on are gone (for example, discarded after a bad
        batch), as with torch's in-place clipping.

        Raises:
            GradientError: some gradients are as they were measured, and some are not.
        """
        kept, changed = False, []
        for index, (name, gradient, changes, added_to) in (now() if self._measured is not None else {}).items():
            tensor, measured = gradient(), (self._measured or {}).get(index)
            if measured is None or measured.gradient() is not tensor:
                changed.append(name)
                # With create_graph autograd adds into a new tensor, which includes what was measured.
                kept = kept or (measured is not None and tensor is not None and tensor.requires_grad)
                # A weak reference stays the same object, even if the tensor is gone.
                kept = kept or (measured is not None and measured.gradient is added_to)
            else:
                kept = True
                if measured.changes != changes:
                    changed.append(name)
        if changed and kept:
            raise GradientError(
                f"the gradient of parameter {changed[0]} changed after optimizer.clip_grad_norm_() had measured it; "
                "clip after the last backward, or call zero_grad() to discard this window"
            )
        if changed:
            self.reset()
        return self.scale(self._coefficient)

    def scale(self, coefficient: float = 1.0) -> Scale:
        """Return the factors for unscaling and clipping, combined into one if that rounds like two."""
        unscale = 1.0 / self.loss_scale
        if math.frexp(unscale)[0] == 0.5:  # a power of two
            return Scale(unscale * coefficient)
        return Scale(unscale, coefficient)

    def clip(self, norm: Tensor, max_norm: float, now: Fingerprint) -> None:
        """Set the coefficient ``max_norm / (norm + 1e-6)``, at most 1, as torch computes it.

        Raises:
            LongshoreError: the window is clipped already.
        """
        if self._coefficient != 1.0:
            raise LongshoreError("clip_grad_norm_ was already called in this window; call it once, before step()")
        self._coefficient = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._measured = now


def _block_sums_on_device(gradients: Mapping[int, Tensor], scale: Scale) -> dict[int, list[float]]:
    """Return sums of squares of the blocks of gradients, all on one device, by parameter. The host waits once."""
    if not gradients:
        return {}
    device = next(iter(gradients.values())).device
    sums = block_sums_on(device)([[gradient.contiguous()] for gradient in gradients.values()], scale)
    return dict(zip(gradients, sums, strict=True))


def gradient_norm(
    store: Store, gradients: Mapping[int, Tensor | None], scale: Scale, shards: Mapping[int, Tensor]
) -> Tensor:
    """Return the 2-norm over all gradients; squares are added in float64, and the root is rounded to float32 once.

    Gradients are measured where they are: on the host, or on a device, so that they are not copied twice. ``shards``
    has the parameters whose other shards are on other ranks; if there are any, all ranks have to call this function.
    """
    on_device = {
        parameter: gradient
        for parameter, gradient in gradients.items()
        if gradient is not None and gradient.device.type != "cpu" and store.tiles.streams.staged
    }
    blocks = _block_sums_on_device(on_device, scale)
    others = {parameter: gradient for parameter, gradient in gradients.items() if parameter not in on_device}
    total = total_of_blocks(sums for parameter, sums in blocks.items() if parameter not in shards)
    total += store.sum_of_squares({each: gradient for each, gradient in others.items() if each not in shards}, scale)
    elsewhere = {each: total_of_blocks([sums]) for each, sums in blocks.items() if each in shards}
    elsewhere.update((each, store.sum_of_squares({each: others[each]}, scale)) for each in others if each in shards)
    total += over_ranks(shards, elsewhere) if elsewhere else 0.0
    return torch.tensor(math.sqrt(total) if total >= 0 else total, dtype=torch.float32, device="cpu")


def check_clipping(max_norm: Any, norm_type: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` for arguments of ``clip_grad_norm_`` that it does not take."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float, Tensor)):
        raise TypeError(
            "clip_grad_norm_ takes max_norm, a number, and knows its own parameters; it got a "
            f"{type(max_norm).__name__} (torch's function is clip_grad_norm_(parameters, max_norm))"
        )
    if norm_type != 2.0:
        raise ValueError(f"clip_grad_norm_ clips the 2-norm, not norm_type={norm_type}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, and is {max_norm}")
