"""Steps of torch's own optimizers on ranges of a tile: slower than a kernel, with the same bits as torch.

The rule of an elementwise optimizer ignores where in a parameter an element is, but the result of torch's loops may
depend on it: the last elements of a tensor, and of each thread's share of it, go through scalar code that rounds
differently. Each range is therefore copied to a buffer of one size without such elements, and stepped by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.kernels.base import OneElement, Scale, TileSegment, TorchRule
from longshore.kernels.reference import adopted

_LOOP_NUMEL = 64
"""Multiple of the number of elements that any of torch's vectorized loops takes at once."""

BUFFER_NUMEL = 1 << 14
"""Number of elements of the largest buffer: master, gradient and states stay in the cache."""


def torch_options(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the options of a rule in the form that torch's optimizer takes."""
    return {name: _torch_option(value) for name, value in options}


def _torch_option(value: Any) -> Any:
    if isinstance(value, OneElement):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu")
    return tuple(map(_torch_option, value)) if isinstance(value, tuple) else value


class _Stepper:
    """The torch optimizer of one rule, whose only parameter is the buffer."""

    def __init__(self, rule: TorchRule, numel: int) -> None:
        self._rule = rule
        self.master = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self.gradient = torch.zeros_like(self.master)
        self._states = {name: torch.zeros_like(self.master) for name, _ in rule.rows}
        self.optimizer = getattr(torch.optim, rule.kind)([self.master], **torch_options(rule.options), foreach=False)

    def step(self) -> dict[str, Any]:
        """Step the buffer, and return torch's state."""
        rule, optimizer = self._rule, self.optimizer
        optimizer.state.clear()
        if not rule.first:
            single = {"step": float(rule.step - 1), **dict(rule.scalars)}
            scalars = {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in single.items()}
            optimizer.state[self.master] = {**scalars, **self._states}
        self.master.grad = self.gradient
        optimizer.step()
        return optimizer.state[self.master]

    def step_rows(self, rows: Tensor, gradient: Tensor, scale: Scale) -> None:
        """Step float32 ``[buffer_arrays, numel]`` in place, by a gradient of ``numel`` elements."""
        numel = gradient.numel()
        self.master[:numel] = rows[0]
        for name, row in self._rule.rows:
            self._states[name][:numel] = rows[row]
        self.gradient[:numel] = gradient
        self.gradient.mul_(torch.tensor(scale.first, dtype=torch.float32))
        self.gradient.mul_(torch.tensor(scale.second, dtype=torch.float32))
        state = self.step()
        rows[0] = self.master[:numel]
        for name, row in self._rule.rows:
            rows[row] = state[name][:numel]


@torch.no_grad()
def step_by_torch(
    source_buffer: Tensor,
    target_buffer: Tensor,
    segments: Sequence[TileSegment],
    rules: Sequence[TorchRule],
    scale: Scale,
    adopt: bool,
) -> None:
    """Step the segments of one tile; arguments as in :meth:`HostKernels.step_tile`.

    Raises:
        ValueError: the segments or rules are not valid for the buffers; nothing was written.
    """
    buffer_arrays, buffer_numel = source_buffer.shape
    end = 0
    for index, segment in enumerate(segments):
        begin, end = end, segment.buffer_offset + segment.gradient.numel()
        if not begin <= segment.buffer_offset < end <= buffer_numel or not 0 <= segment.rule < len(rules):
            raise ValueError(f"segment {index} of the tile has no elements, none of its own, or no rule")
    for rule in rules:
        if any(not 0 < row < buffer_arrays for _, row in rule.rows) or len({*dict(rule.rows).values()}) < len(
            rule.rows
        ):
            raise ValueError(
                f"{rule.kind} has its states in rows {dict(rule.rows)} of a buffer of {buffer_arrays} arrays"
            )
    longest = max((segment.gradient.numel() for segment in segments), default=0)
    buffer_numel = min(BUFFER_NUMEL, -(-longest // _LOOP_NUMEL) * _LOOP_NUMEL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steppers = [_Stepper(rule, buffer_numel) for rule in rules]
        for segment in segments:
            begin, numel = segment.buffer_offset, segment.gradient.numel()
            if source_buffer is not target_buffer:
                target_buffer[:, begin : begin + numel] = source_buffer[:, begin : begin + numel]
            master = target_buffer[0, begin : begin + numel]
            if adopt and segment.output is not None:
                master.copy_(adopted(master, segment.output))
            for at in range(0, numel, buffer_numel):
                count = min(buffer_numel, numel - at)
                rows = target_buffer[:, begin + at : begin + at + count]
                steppers[segment.rule].step_rows(rows, segment.gradient[at : at + count], scale)
            if segment.output is not None:
                segment.output.copy_(master)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def next_scalars(rule: TorchRule, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return the values after the step of the named states that are one number."""
    state = _Stepper(rule, 1).step()
    return tuple((name, float(state[name])) for name in names)
