"""The typed face of the native kernels: tensors are checked here and held while a call runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.kernels import _native
from longshore.kernels._native import InstructionSet
from longshore.kernels.rules import (
    UNSCALED,
    AdagradRule,
    AdamRule,
    HostRule,
    LionRule,
    Scale,
    SGDRule,
    TileSegment,
    TorchRule,
)
from longshore.kernels.torch_rules import step_by_torch
from longshore.machine import binding_of, usable_cpus

_DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

_STEPS: dict[type, Any] = {
    AdamRule: _native.step_adam,
    LionRule: _native.step_lion,
    AdagradRule: _native.step_adagrad,
    SGDRule: _native.step_sgd,
}

SUPPORTED_DTYPES = tuple(_DTYPE_CODES)
"""Dtypes of parameters and gradients that the kernels read and write."""


class HostKernels:
    """The native kernels together with the threads that run them.

    Every call releases the GIL, and gives the same bits for any number of
    threads, any cut into segments and any instruction set.

    Args:
        threads: how many; default: what ``longshore launch`` granted, or one for each CPU that the process may use.
        cpu_set: logical CPUs that the threads may run on; default: any.
        instruction_set: for tests; default: the best that this CPU runs.

    Raises:
        ValueError: a thread count below 1, or a CPU that is not to be had.
    """

    device = torch.device("cpu")
    asynchronous = False

    def __init__(
        self,
        threads: int | None = None,
        cpu_set: Sequence[int] | None = None,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        cpus = sorted(set(cpu_set)) if cpu_set is not None else []
        if cpu_set is not None and not cpus:
            raise ValueError("cpu_set is empty: name at least one CPU, or leave it out to use any")
        if threads is None:
            granted = binding_of(os.environ) if not cpus else None
            # Whatever OMP_NUM_THREADS says.
            threads = len(cpus or usable_cpus()) if granted is None else granted.host_threads
        supported = _native.supported_instruction_sets()
        if instruction_set is not None and instruction_set not in supported:
            raise ValueError(f"this CPU does not run {instruction_set.name} code; it runs {supported}")
        self.instruction_set = supported[-1] if instruction_set is None else instruction_set
        self._pool = _native.ThreadPool(threads, cpus)

    @property
    def threads(self) -> int:
        return self._pool.threads

    def step_tile(
        self,
        source_page: Tensor,
        target_page: Tensor,
        segments: Sequence[TileSegment],
        rules: Sequence[HostRule],
        scale: Scale = UNSCALED,
    ) -> None:
        """Step the segments of one tile in one pass.

        Args:
            source_page: float32 ``[page_arrays, page_numel]``: the master, then
                the states of the rules' kind (Adam: first and second moment;
                Lion: one moment; Adagrad: the sum; SGD: the momentum buffer, or
                nothing where no rule has momentum; a :class:`TorchRule` names
                its rows).
            target_page: the same tensor (in place), or another that does not
                overlap it; elements outside the segments are not written.
            segments: in order of ``page_offset``, not overlapping.
            rules: what the segments' ``rule`` counts into; all of one kind.
            scale: what gradients are multiplied by.

        Raises:
            ValueError: a table that a tile cannot have; nothing was written.
        """
        check_pages(source_page, target_page)
        kind = _kind_of(rules)
        if kind is TorchRule:
            step_by_torch(source_page, target_page, segments, rules, scale)  # pyright: ignore[reportArgumentType]
            return
        rows = []
        for segment in segments:
            check_segment(segment)
            output = segment.output
            rows.append(
                (
                    segment.page_offset,
                    segment.gradient.numel(),
                    _address(segment.gradient),
                    0 if output is None else _address(output),
                    segment.rule,
                    dtype_code(segment.gradient),
                    0 if output is None else dtype_code(output),
                )
            )
        page = (_address(source_page), _address(target_page), *source_page.shape)
        _STEPS[kind](self._pool, page, rows, rules, scale, self.instruction_set)

    def accumulate(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """``target = float(source)``, or with ``add``, ``target += float(source)``; ``target`` is float32."""
        check_pair(target, source)
        _native.accumulate(
            self._pool,
            _address(target),
            _address(source),
            dtype_code(source),
            source.numel(),
            add,
            self.instruction_set,
        )

    def reconcile(self, master: Tensor, parameter: Tensor, *, adopt: bool) -> int:
        """Count the elements of ``parameter`` that are not the rounded ``master``.

        Bits are compared. With ``adopt``, each such element becomes the master.
        """
        check_pair(master, parameter)
        return _native.reconcile(
            self._pool,
            _address(master),
            _address(parameter),
            dtype_code(parameter),
            parameter.numel(),
            adopt,
            self.instruction_set,
        )

    def block_sums(self, parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> list[list[float]]:
        """The sums of squares of all (scaled, float32) elements, in double: for each parameter one number for each
        ``NORM_BLOCK_NUMEL`` of its elements; :func:`total_of_blocks` adds them up.

        ``parameters`` holds, for each parameter, its flat gradient in
        consecutive pieces. The bits depend on neither the cut nor the threads.
        """
        return _native.block_sums(self._pool, _rows(parameters), scale, self.instruction_set)


def _rows(parameters: Sequence[Sequence[Tensor]]) -> list[list[tuple[int, int, int]]]:
    return [[(_address(piece), dtype_code(piece), piece.numel()) for piece in pieces] for pieces in parameters]


def _kind_of(rules: Sequence[HostRule]) -> type:
    kinds = {type(rule) for rule in rules}
    if len(kinds) > 1:
        raise ValueError(f"the rules of one call are of one kind, not {sorted(kind.__name__ for kind in kinds)}")
    kind = kinds.pop() if kinds else AdamRule  # no rules: no segments, or an error of the table
    if kind not in _STEPS and kind is not TorchRule:
        raise ValueError(f"the native kernels do not step by a {kind.__name__}")
    return kind


def check_pages(source_page: Tensor, target_page: Tensor) -> None:
    for page in (source_page, target_page):
        if page.dtype != torch.float32 or page.dim() != 2:
            raise ValueError(f"a page is float32 [page_arrays, page_numel], not {page.dtype} {list(page.shape)}")
    if source_page.shape != target_page.shape:
        raise ValueError("source and target pages differ in size")


def check_segment(segment: TileSegment) -> None:
    numel, output = segment.gradient.numel(), segment.output
    if output is not None and output.numel() != numel:
        raise ValueError(f"a gradient of {numel} elements with an output of {output.numel()}")


def check_pair(target: Tensor, source: Tensor) -> None:
    if target.dtype != torch.float32:
        raise ValueError(f"masters and accumulators are float32, not {target.dtype}")
    if target.numel() != source.numel():
        raise ValueError(f"{source.numel()} elements for a buffer of {target.numel()}")


def dtype_code(tensor: Tensor) -> int:
    try:
        return _DTYPE_CODES[tensor.dtype]
    except KeyError:
        raise ValueError(f"the kernels take float32, bfloat16 and float16, not {tensor.dtype}") from None


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"the host kernels take contiguous CPU tensors, not one of strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
