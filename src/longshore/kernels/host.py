"""Typed wrappers of the native kernels: they check tensors, and keep them alive while a call runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.kernels import _native
from longshore.kernels._native import InstructionSet
from longshore.kernels.base import (
    UNSCALED,
    HostRule,
    Rule,
    Scale,
    TileSegment,
    TorchRule,
    check_pages,
    check_pair,
    checked_rules,
    dtype_code,
)
from longshore.kernels.torch_rules import step_by_torch
from longshore.machine import usable_cpus
from longshore.machine.binding import binding_of

_ENTRIES = {name: index for index, name in enumerate(_native.rules())}
"""The rules of native/rules.inl, by the name that a :class:`~longshore.kernels.Rule` has."""


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
                the rule's states (SGD: nothing where no rule has momentum; a
                :class:`~longshore.kernels.TorchRule` names its rows).
            target_page: the same tensor (in place), or another that does not
                overlap it; elements outside the segments are not written.
            segments: in order of ``page_offset``, not overlapping.
            rules: what the segments' ``rule`` counts into; all of one kind.
            scale: what gradients are multiplied by.

        Raises:
            ValueError: a table that a tile cannot have; nothing was written.
        """
        check_pages(source_page, target_page)
        torchs = [rule for rule in rules if isinstance(rule, TorchRule)]
        if torchs and len(torchs) == len(rules):
            step_by_torch(source_page, target_page, segments, torchs, scale)
            return
        tile = native_tile(
            source_page, target_page, segments, checked_rules(rules, source_page.shape[0]), scale, _address
        )
        _native.step(self._pool, *tile, self.instruction_set)

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


class NativeTile(NamedTuple):
    """A tile as the native kernels take it: addresses and numbers."""

    entry: int
    """Of ``native/rules.inl``."""
    page: tuple[int, int, int, int]
    """Address of the source and of the target, arrays, elements of each."""
    rows: list[tuple[int, int, int, int, int, int, int]]
    """For each segment: page offset, elements, gradient, output, rule, and the dtypes of gradient and output."""
    scalars: list[tuple[float, ...]]
    """For each rule: the two factors of the gradient, and the rule's own scalars."""


def native_tile(
    source_page: Tensor,
    target_page: Tensor,
    segments: Sequence[TileSegment],
    rules: Sequence[Rule],
    scale: Scale,
    address: Callable[[Tensor], int],
) -> NativeTile:
    """Build the table of a tile. ``address`` raises ``ValueError`` for a tensor that is not on the right device."""
    page_arrays, page_numel = source_page.shape
    page = address(source_page), address(target_page), page_arrays, page_numel
    rows = []
    for page_offset, gradient, output, rule in segments:
        numel = gradient.numel()
        target, target_code = 0, 0
        if output is not None:
            if output.numel() != numel:
                raise ValueError(f"a gradient of {numel} elements with an output of {output.numel()}")
            target, target_code = address(output), dtype_code(output)
        rows.append((page_offset, numel, address(gradient), target, rule, dtype_code(gradient), target_code))
    scalars = [(*rule.factors(scale), *rule.scalars) for rule in rules]
    name = rules[0].name if rules else next(iter(_ENTRIES))  # no rules: no segments, or an error of the table
    if name not in _ENTRIES:
        raise ValueError(f"native/rules.inl has no entry for {name}; it has {', '.join(_ENTRIES)}")
    return NativeTile(_ENTRIES[name], page, rows, scalars)


def _address(tensor: Tensor) -> int:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError(
            f"the host kernels take contiguous CPU tensors, not one of strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
