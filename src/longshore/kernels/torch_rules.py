"""Steps that torch computes: its own optimizers on ranges of a tile, slower than a kernel, and Newton-Schulz.

The rule of an elementwise optimizer ignores where in a parameter an element is, but the result of torch's loops may
depend on it: the last elements of a tensor, and of each thread's share of it, go through scalar code that rounds
differently. Each range is therefore copied to a buffer of one size without such elements, and stepped by one thread.

The iteration makes a matrix nearly orthogonal. Its operations are those of ``torch.optim.Muon``, in its order, on one
matrix: a batch of several, another order of the products or float32 would give other bits. The bits of a product of
matrices belong to a kind of device and a build of its library; on one of them, the number of threads changes none.
Memory that is stored transposed does, on some CPUs, so matrices are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.kernels._native import Outputs
from longshore.kernels.base import OneElement, Scale, TileSegment, TorchRule
from longshore.kernels.reference import adopted, canonical

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

    def step_rows(self, master: Tensor, states: Tensor, gradient: Tensor, scale: Scale) -> None:
        """Step a float32 master and its states, ``[arrays, numel]``, in place, by a gradient of ``numel`` elements."""
        numel = gradient.numel()
        self.master[:numel] = master
        for name, row in self._rule.rows:
            self._states[name][:numel] = states[row - 1]
        self.gradient[:numel] = gradient
        self.gradient.mul_(torch.tensor(scale.first, dtype=torch.float32))
        self.gradient.mul_(torch.tensor(scale.second, dtype=torch.float32))
        state = self.step()
        master.copy_(canonical(self.master[:numel]))
        for name, row in self._rule.rows:
            states[row - 1] = canonical(state[name][:numel])


@torch.no_grad()
def step_by_torch(
    source_buffer: Tensor,
    target_buffer: Tensor,
    segments: Sequence[TileSegment],
    rules: Sequence[TorchRule],
    scale: Scale,
    outputs: Outputs,
) -> None:
    """Step the segments of one tile; arguments as in :meth:`HostKernels.step_tile`.

    Raises:
        ValueError: the segments or rules are not valid for the buffers; nothing was written.
    """
    own_masters = outputs is Outputs.MASTERS
    states = target_buffer if own_masters else target_buffer[1:]
    end = 0
    for index, segment in enumerate(segments):
        begin, end = end, segment.buffer_offset + segment.gradient.numel()
        if not begin <= segment.buffer_offset < end <= source_buffer.shape[1] or not 0 <= segment.rule < len(rules):
            raise ValueError(f"segment {index} of the tile has no elements, none of its own, or no rule")
        if own_masters and (segment.output is None or segment.output.dtype != torch.float32):
            raise ValueError(f"segment {index} of the tile has its master in an output that is not float32")
    for rule in rules:
        rows = dict(rule.rows)
        if any(not 0 < row <= len(states) for row in rows.values()) or len({*rows.values()}) < len(rule.rows):
            raise ValueError(f"{rule.kind} has its states in rows {rows} behind the master, of {len(states)}")
    longest = max((segment.gradient.numel() for segment in segments), default=0)
    step_numel = min(BUFFER_NUMEL, -(-longest // _LOOP_NUMEL) * _LOOP_NUMEL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steppers = [_Stepper(rule, step_numel) for rule in rules]
        for begin, gradient, output, rule, _ in segments:
            elements = slice(begin, begin + gradient.numel())
            if source_buffer is not target_buffer:
                target_buffer[:, elements] = source_buffer[:, elements]
            master = output if own_masters and output is not None else target_buffer[0, elements]
            if outputs is Outputs.COMPARED and output is not None:
                master.copy_(adopted(master, output))
            for at in range(0, gradient.numel(), step_numel):
                part = slice(at, at + step_numel)
                steppers[rule].step_rows(master[part], states[:, elements][:, part], gradient[part], scale)
            if output is not None and not own_masters:
                output.copy_(canonical(master.to(output.dtype)))
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def next_scalars(rule: TorchRule, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return the values after the step of the named states that are one number."""
    state = _Stepper(rule, 1).step()
    return tuple((name, float(state[name])) for name in names)


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
