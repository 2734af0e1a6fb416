"""Native kernels for tensors in host memory, and the argument checks that kernels on all devices share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.kernels import _native
from longshore.kernels._native import InstructionSet, Outputs, SegmentTable
from longshore.kernels.base import DTYPE_CODES, UNSCALED, HostRule, Rule, Scale, TileSegment, TorchRule
from longshore.kernels.buffers import Buffer, block_of, format_of
from longshore.kernels.torch_rules import step_by_torch
from longshore.machine import usable_cpus
from longshore.machine.binding import binding_of

_ENTRIES = {name: index for index, name in enumerate(_native.rules())}
"""Index of each rule of native/rules.inl by :attr:`Rule.name`."""

MOST_HOST_THREADS = 4096
"""The largest number of threads of a pool (``native/thread_pool.cpp``)."""


class HostKernels:
    """Native kernels, together with the threads that run them, which objects with equal arguments share.

    Every call releases the GIL. The number of threads, the number of segments and the instruction set change no bits.

    Args:
        threads: their number; default: as ``longshore launch`` granted, or one for each CPU that the process may use.
        cpu_set: logical CPUs that the threads may run on; default: any.
        instruction_set: for tests; default: the best that this CPU supports.

    Raises:
        ValueError: a thread count below 1 or above 4096, or a CPU that is not available.
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
            # OMP_NUM_THREADS is ignored here.
            threads = len(cpus or usable_cpus()) if granted is None else granted.host_threads
        usable = set(usable_cpus())
        if absent := [cpu for cpu in cpus if cpu not in usable]:
            raise ValueError(f"CPU {absent[0]} is not among those that this process may use; leave cpu_set out")
        supported = _native.supported_instruction_sets()
        if instruction_set is not None and instruction_set not in supported:
            raise ValueError(f"this CPU does not run {instruction_set.name} code; it runs {supported}")
        self.instruction_set = supported[-1] if instruction_set is None else instruction_set
        self._pool = _pool_of(threads, cpus)
        self.threads = self._pool.threads

    def step_tile(
        self,
        source_buffer: Buffer,
        target_buffer: Buffer,
        segments: Sequence[TileSegment],
        rules: Sequence[HostRule],
        scale: Scale = UNSCALED,
        outputs: Outputs = Outputs.WRITTEN,
    ) -> None:
        """Step the segments of one tile in one pass.

        Args:
            source_buffer: float32 ``[buffer_arrays, buffer_numel]``: the master, then the rule's states (SGD has none
                if no rule has momentum; a :class:`~longshore.kernels.TorchRule` names its rows). Without the master if
                the outputs are the masters. Or an :class:`EncodedBuffer` of these arrays, whose states are decoded, and
                encoded behind the step.
            target_buffer: the same tensor (in place), or another that does not overlap it; elements outside the
                segments are not written.
            segments: in order of ``buffer_offset``, not overlapping.
            rules: rules to which the segments' ``rule`` is an index; all of one kind.
            scale: factors by which gradients are multiplied.
            outputs: the contents of the segments' outputs. ``WRITTEN``: nothing that is read. ``COMPARED``: the
                parameters as they are now; elements whose bits differ from the rounded master were written by others,
                and replace their masters before the rule is applied. ``MASTERS``: the masters, which are float32
                parameters.

        Raises:
            ValueError: the segments or rules are not valid for the buffers; nothing was written.
        """
        torchs = [rule for rule in rules if isinstance(rule, TorchRule)]
        if torchs and len(torchs) == len(rules):
            check_buffers(source_buffer, target_buffer, outputs)
            if not isinstance(source_buffer, Tensor) or not isinstance(target_buffer, Tensor):
                raise ValueError(f"torch steps float32 states, not {format_of(source_buffer).value}")
            step_by_torch(source_buffer, target_buffer, segments, torchs, scale, outputs)
            return
        tile = native_tile(source_buffer, target_buffer, segments, rules, scale, outputs, _address)
        _native.step(self._pool, *tile, outputs, self.instruction_set)

    def step_table(
        self,
        buffer: Buffer,
        table: SegmentTable,
        places: tuple[Sequence[int], Sequence[int], Sequence[int]],
        rules: Sequence[HostRule],
        scale: Scale,
        outputs: Outputs,
    ) -> None:
        """Step the segments of one tile in place, as :meth:`step_tile` does. For each row of ``table``, ``places`` has
        the address of the gradient (0: the segment is not stepped), the address of the output, and the rule."""
        check_buffers(buffer, buffer, outputs)
        address, (buffer_arrays, buffer_numel) = _address(block_of(buffer)), buffer.shape
        entry, rows = _rows_of(rules, buffer_arrays, scale, outputs)
        row = address, address, buffer_arrays, buffer_numel, format_of(buffer).code
        _native.step_table(self._pool, entry, row, table, places, rows, outputs, self.instruction_set)

    def accumulate(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """Set ``target = float(source)``, or with ``add``, ``target += float(source)``; ``target`` is float32."""
        _native.accumulate(self._pool, *checked_pair(target, source, _address), add, self.instruction_set)

    def sum_of_two(self, target: Tensor, first: Tensor, second: Tensor) -> None:
        """Set ``target = float(first) + float(second)``; ``target`` is float32. One pass, if both are of one dtype."""
        address, one, dtype, numel = checked_pair(target, first, _address)
        _, other, other_dtype, _ = checked_pair(target, second, _address)
        if dtype == other_dtype:
            _native.sum_of_two(self._pool, address, one, other, dtype, numel, self.instruction_set)
            return
        self.accumulate(target, first, add=False)
        self.accumulate(target, second, add=True)

    def reconcile(self, master: Tensor, parameter: Tensor, *, adopt: bool) -> int:
        """Count the elements of ``parameter`` whose bits differ from the rounded ``master``; with ``adopt``, copy those
        elements to the master."""
        return _native.reconcile(self._pool, *checked_pair(master, parameter, _address), adopt, self.instruction_set)

    def block_sums(self, parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> list[list[float]]:
        """Return the sums of squares of all (scaled, float32) elements, in float64: for each parameter one number for
        each ``NORM_BLOCK_NUMEL`` of its elements; :func:`total_of_blocks` adds them up.

        ``parameters`` has the flat gradient of each parameter, divided into consecutive ranges; where it is divided
        does not change the bits.
        """
        rows = [[(_address(part), dtype_code(part), part.numel()) for part in ranges] for ranges in parameters]
        return _native.block_sums(self._pool, rows, scale, self.instruction_set)


_POOLS: weakref.WeakValueDictionary[tuple[object, ...], _native.ThreadPool] = weakref.WeakValueDictionary()
"""The thread pools of this process that are in use."""


def _pool_of(threads: int, cpu_set: Sequence[int]) -> _native.ThreadPool:
    """Return the process's thread pool of this size on these CPUs, so that an optimizer for each parameter does not
    start threads for each. Its callers take turns."""
    # The threads run on the CPUs that were usable when they started, and do not exist in a forked process.
    key = os.getpid(), threads, bool(cpu_set), tuple(cpu_set or usable_cpus())
    pool = _POOLS.get(key)
    if pool is None:
        pool = _POOLS[key] = _native.ThreadPool(threads, cpu_set)
    return pool


class NativeTile(NamedTuple):
    """Arguments of the native kernels for one tile, as addresses and numbers."""

    entry: int
    """Index of the rule in ``native/rules.inl``."""
    buffer: tuple[int, int, int, int, int]
    """Addresses of the source and of the target, number of arrays, elements of each array, format of the states."""
    rows: list[tuple[int, int, int, int, int, int, int, int, int]]
    """For each segment: buffer offset, elements, gradient, output, rule, the dtypes of gradient and output, and stream
    and place of its coding."""
    rules: tuple[list[tuple[float, ...]], list[int]]
    """For each rule: the two factors of the gradient, and the rule's own scalars; and its step count."""


def native_tile(
    source_buffer: Buffer,
    target_buffer: Buffer,
    segments: Sequence[TileSegment],
    rules: Sequence[HostRule],
    scale: Scale,
    outputs: Outputs,
    address: Callable[[Tensor], int],
) -> NativeTile:
    """Check the arguments of :meth:`HostKernels.step_tile`, and build the table whose numbers the native code checks.

    ``address`` returns a tensor's address, and raises ``ValueError`` unless the tensor is contiguous on the right
    device.
    """
    check_buffers(source_buffer, target_buffer, outputs)
    buffer_arrays, buffer_numel = source_buffer.shape
    entry, rule_rows = _rows_of(rules, buffer_arrays, scale, outputs)
    rows = []
    for buffer_offset, gradient, output, rule, coding in segments:
        numel = gradient.numel()
        target, target_code = 0, 0
        if output is not None:
            if output.numel() != numel:
                raise ValueError(f"a gradient of {numel} elements with an output of {output.numel()}")
            target, target_code = address(output), dtype_code(output)
        codes = dtype_code(gradient), target_code
        rows.append((buffer_offset, numel, address(gradient), target, rule, *codes, coding.stream, coding.place))
    source, target = address(block_of(source_buffer)), address(block_of(target_buffer))
    buffer = source, target, buffer_arrays, buffer_numel, format_of(source_buffer).code
    return NativeTile(entry, buffer, rows, rule_rows)


def _rows_of(
    rules: Sequence[HostRule], buffer_arrays: int, scale: Scale, outputs: Outputs
) -> tuple[int, tuple[list[tuple[float, ...]], list[int]]]:
    """Return :attr:`NativeTile.entry` and :attr:`NativeTile.rules`."""
    scalars, steps = [], []
    kinds = {type(rule) for rule in rules}
    if len(kinds) > 1:
        raise ValueError(f"the rules of one call are of one kind, not {sorted(kind.__name__ for kind in kinds)}")
    name = next(iter(_ENTRIES))  # without rules there must be no segments, or the native code raises
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"the kernels do not step by a {type(rule).__name__}")
        name, most = rule.name, len(rule.states) + (outputs is not Outputs.MASTERS)
        least = most - rule.optional_states
        if not least <= buffer_arrays <= most:
            known = f"{least}" if least == most else f"{least} or {most}"
            raise ValueError(f"a buffer of {buffer_arrays} arrays, and {name} has {known}")
        if rule.step < 1:
            raise ValueError("a step count below 1")
        steps.append(rule.step)
        scalars.append((-scale.first if rule.maximize else scale.first, scale.second, *rule.scalars))
    if name not in _ENTRIES:
        raise ValueError(f"native/rules.inl has no entry for {name}; it has {', '.join(_ENTRIES)}")
    return _ENTRIES[name], (scalars, steps)


def check_buffers(source_buffer: Buffer, target_buffer: Buffer, outputs: Outputs) -> None:
    for buffer in (source_buffer, target_buffer):
        if not isinstance(buffer, Tensor):
            if buffer.own_master != (outputs is Outputs.MASTERS):
                raise ValueError("a buffer has a master unless the outputs are the masters, and only then")
        elif buffer.dtype != torch.float32 or buffer.dim() != 2:
            raise ValueError(
                f"a buffer is float32 [buffer_arrays, buffer_numel], not {buffer.dtype} {list(buffer.shape)}"
            )
    if source_buffer.shape != target_buffer.shape or source_buffer.nbytes != target_buffer.nbytes:
        raise ValueError("source and target buffers differ in size")
    if format_of(source_buffer) is not format_of(target_buffer):
        raise ValueError("source and target buffers differ in the format of their states")


def checked_pair(target: Tensor, source: Tensor, address: Callable[[Tensor], int]) -> tuple[int, int, int, int]:
    """Check that both have equally many elements; return their addresses, and dtype code and numel of the source."""
    if target.dtype != torch.float32:
        raise ValueError(f"masters and accumulators are float32, not {target.dtype}")
    if target.numel() != source.numel():
        raise ValueError(f"{source.numel()} elements for a buffer of {target.numel()}")
    return address(target), address(source), dtype_code(source), source.numel()


def dtype_code(tensor: Tensor) -> int:
    try:
        return DTYPE_CODES[tensor.dtype]
    except KeyError:
        raise ValueError(f"the kernels take float32, bfloat16 and float16, not {tensor.dtype}") from None


def _address(tensor: Tensor) -> int:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError(
            f"the host kernels take contiguous CPU tensors, not one of strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
