"""Sums on the device: gradients of a window that stay where they were computed until the last one has arrived.

The first is kept, and later ones are added to it in float32, in the order of arrival, which gives the bits of the
host's sums. Only the sum is copied to the host. Which gradient is the last is a forecast, and a wrong one costs time
and changes no bit: a sum that left is continued on the host, and one that is still here leaves before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longshore.accelerator import Mark, memory_of
from longshore.transfer import CopyStreams

Accumulate = Literal["auto", "device", "host"]

_SUM_BYTES = torch.float32.itemsize


@dataclass
class Kept:
    """The gradient of a parameter that stays on the device, or the sum of several.

    Attributes:
        values: flat, in the gradient's dtype; a sum is float32.
        ready: position from which on they are valid.
        stream: the stream on which they were computed; None where the host computes them.
        summed: whether this is a sum.
    """

    values: Tensor
    ready: Sequence[Mark]
    stream: object
    summed: bool = False


class DeviceSums:
    """The gradients of one tier that stay on the device, by parameter. One thread may call a method at a time.

    Args:
        streams: those of the tier.
        accumulate: ``"device"``: every gradient stays that is not known to be the only one of its window; ``"auto"``:
            those of parameters that had several in the last window, while the device has room; ``"host"``: none.
    """

    RESERVED = 16
    """With ``"auto"``, one part in so many of the device's memory stays free."""

    def __init__(self, streams: CopyStreams, accumulate: Accumulate) -> None:
        self._streams = streams
        without_device = (
            streams.device.type == "cpu" and accumulate == "auto"
        )  # which a simulated transfer does not fill
        self._accumulate = "host" if without_device or not streams.staged else accumulate
        self._kept: dict[int, Kept] = {}
        self._room_bytes: float = float("inf") if accumulate == "device" else 0
        self._reserved_bytes = self._most_bytes = 0
        """Bytes of the sums that there will be in this window, and the most there were."""
        self._peak_bytes = self._others_bytes = 0
        """The most that all tensors of the device took so far, and of that what others than these sums took."""

    @property
    def wanted(self) -> bool:
        """Whether any gradient may stay, in the next window at the latest."""
        return self._accumulate != "host" and self._room_bytes > 0

    @property
    def from_the_first_window(self) -> bool:
        """Whether gradients stay before it is known how many a window has."""
        return self._accumulate == "device"

    @property
    def num_bytes(self) -> int:
        return sum(kept.values.nbytes for kept in self._kept.values())

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._kept))

    def __bool__(self) -> bool:
        return bool(self._kept)

    def has_room(self, numel: int, expected: int) -> bool:
        """Return whether the first gradient of a parameter is to stay; ``expected``: how many are expected, 0 if that
        is not known."""
        if expected == 1 or (expected == 0 and not self.from_the_first_window):
            return False
        return self._reserved_bytes + _SUM_BYTES * numel <= self._room_bytes

    def keep(self, parameter: int, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Keep the first gradient of a parameter, flat, which autograd does not know."""
        self._kept[parameter] = Kept(gradient, ready, self._streams.stream())
        self._reserved_bytes += _SUM_BYTES * gradient.numel()
        self._most_bytes = max(self._most_bytes, self._reserved_bytes)

    def add(self, parameter: int, gradient: Tensor) -> bool:
        """Add a later gradient on the current stream; return False, and change nothing, if there is no memory for the
        sum."""
        kept, stream = self._kept[parameter], self._streams.stream()
        if stream != kept.stream:
            self._streams.follow(kept.ready, kept.values)
        try:
            if kept.summed:
                kept.values.add_(gradient)
            elif kept.values.dtype == torch.float32:
                kept.values = kept.values + gradient
            else:
                kept.values = kept.values.float().add_(gradient)
        except torch.OutOfMemoryError:
            self._room_bytes = 0
            return False
        kept.ready, kept.stream, kept.summed = self._streams.mark(), stream, True
        return True

    def get(self, parameter: int) -> Kept | None:
        return self._kept.get(parameter)

    def pop(self, parameter: int) -> None:
        """Let go of a parameter's gradient, if it is here."""
        kept = self._kept.pop(parameter, None)
        if kept is not None:
            self._reserved_bytes -= _SUM_BYTES * kept.values.numel()

    def clear(self) -> None:
        """Drop all gradients."""
        self._kept.clear()
        self._reserved_bytes = 0

    def end_window(self) -> None:
        """With ``"auto"``, find out how much room the device has."""
        if self._accumulate != "auto":
            return
        most_bytes, peak_bytes = memory_of(self._streams.device)
        if peak_bytes > self._peak_bytes:
            self._others_bytes = max(self._others_bytes, peak_bytes - self._most_bytes)
        self._peak_bytes, self._most_bytes = peak_bytes, 0
        self._room_bytes = most_bytes - most_bytes // self.RESERVED - self._others_bytes
