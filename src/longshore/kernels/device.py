"""Triton kernels for optimizer state that stays on a CUDA device; they compute the same bits as the host kernels."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from longshore.kernels import _native
from longshore.kernels._native import Outputs
from longshore.kernels.base import UNSCALED, HostRule, Rule, Scale, TileSegment
from longshore.kernels.buffers import Buffer, block_of, format_of, rounding_key
from longshore.kernels.host import HostKernels, NativeTile, checked_pair, dtype_code, native_tile
from longshore.kernels.reference import checksums, float32_bytes, sums_of_squares
from longshore.layout.formats import StateFormat
from longshore.layout.tiles import NORM_BLOCK_NUMEL

_PASS = {"num_warps": 4, "enable_fp_fusion": False}
"""Launch options of the elementwise kernels; without fusion, each operation rounds separately."""

_TRITON_DEVICES = {"cuda"}
"""Types of devices that Triton compiles these kernels for."""


class DeviceKernels:
    """Triton kernels over the tensors of one CUDA device.

    The methods are those of :class:`~longshore.kernels.HostKernels`, with the same arguments, errors and bits. Work is
    enqueued on the current stream; ``reconcile`` and ``block_sums`` wait for their results.

    One launch steps a whole tile, from a table of its segments that is copied to the device first: with hundreds of
    biases and norms in a tile, a launch for each would cost the host more time than the step costs the device.

    Args:
        device: a CUDA device; or the CPU if Triton was imported with ``TRITON_INTERPRET=1`` (slow; for tests).

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: Triton's kernels cannot run on this device in this process.
    """

    asynchronous = True
    threads = 1
    """Host threads that a call takes."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._triton = _triton_rules(device)
        # Compile a kernel now, so that a compiler that is missing or fails raises here, and not in a hook.
        one = torch.zeros(1, dtype=torch.float32, device=device)
        self.accumulate(one, one, add=False)

    def step_tile(
        self,
        source_buffer: Buffer,
        target_buffer: Buffer,
        segments: Sequence[TileSegment],
        rules: Sequence[HostRule],
        scale: Scale = UNSCALED,
        outputs: Outputs = Outputs.WRITTEN,
    ) -> None:
        tile = native_tile(source_buffer, target_buffer, segments, rules, scale, outputs, self._address)
        _native.check(*tile, outputs)
        if outputs is Outputs.MASTERS:
            raise ValueError("the masters of state that is on a device are in its buffers, and outputs are copies")
        if not tile.rows:
            return
        rule = rules[0]
        assert isinstance(rule, Rule)
        states = rule.states[: source_buffer.shape[0] - 1]
        blocks = [-(-row[1] // self._triton.BLOCK.value) for row in tile.rows]
        firsts = [0, *itertools.accumulate(blocks)]
        owners = torch.repeat_interleave(torch.tensor(blocks))
        with self._current():
            self._triton.step_tile[(firsts[-1],)](
                block_of(source_buffer),
                block_of(target_buffer),
                self._upload(torch.tensor(list(_table(tile, firsts)), dtype=torch.int64)),
                self._upload(owners),
                self._upload(_float32_rows(tile.rules[0])),
                self._triton.device_function(type(rule).update),
                *self._triton.state_codes(states, format_of(source_buffer)),
                outputs is Outputs.COMPARED,
                rule.outputs_last,
                **_PASS,
            )

    def accumulate(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        self._elementwise(self._triton.accumulate, target, source, int(add))

    def sum_of_two(self, target: Tensor, first: Tensor, second: Tensor) -> None:
        self.accumulate(target, first, add=False)
        self.accumulate(target, second, add=True)

    def reconcile(self, master: Tensor, parameter: Tensor, *, adopt: bool) -> int:
        differing = torch.zeros(parameter.numel(), dtype=torch.uint8, device=self.device)
        self._elementwise(self._triton.reconcile, master, parameter, int(adopt), differing)
        return int(differing.sum(dtype=torch.int64))

    def checksums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the :func:`~longshore.kernels.reference.checksum` of each flat tensor in one pass: int64
        ``[len(tensors)]``, on the device; this does not wait."""
        share = self._triton.BLOCK.value * self._triton.CHECKSUM_BLOCKS.value
        programs = [-(-tensor.numel() // share) for tensor in tensors]
        firsts = [0, *itertools.accumulate(programs)]
        table = [
            (self._address(tensor), dtype_code(tensor), tensor.numel(), first)
            for tensor, first in zip(tensors, firsts, strict=False)
        ]
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=self.device)
        owners = torch.repeat_interleave(torch.tensor(programs))
        if len(owners) > 0:
            with self._current():
                rows = self._upload(torch.tensor(table, dtype=torch.int64))
                self._triton.checksums[(firsts[-1],)](rows, self._upload(owners), sums, num_warps=4)
        return sums

    def block_sums(self, parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> list[list[float]]:
        starts, spans, counts = [0], [], []
        for ranges in parameters:
            blocks = self._norm_blocks(ranges)
            counts.append(len(blocks))
            for block in blocks:
                spans += block
                starts.append(len(spans))
        if not spans:
            return [[] for _ in counts]
        sums = torch.empty(len(starts) - 1, self._triton.NORM_LANES.value, dtype=torch.float64, device=self.device)
        with self._current():
            self._triton.sum_of_squares[(len(sums),)](
                self._upload(torch.tensor(starts, dtype=torch.int64)),
                self._upload(torch.tensor(spans, dtype=torch.int64)),
                self._upload(_float32_rows([[scale.first, scale.second]])),
                sums,
                num_warps=1,
                enable_fp_fusion=False,
            )
        # The lanes have to be added in order: numpy's accumulate does so, and its sum does not.
        of_blocks = iter(numpy.add.accumulate(sums.cpu().numpy(), axis=1)[:, -1].tolist())
        return [list(itertools.islice(of_blocks, count)) for count in counts]

    def _norm_blocks(self, ranges: Sequence[Tensor]) -> list[list[tuple[int, ...]]]:
        """Return the spans of each block of one parameter: the address of element 0, the dtype code, begin and end."""
        begins = [0, *itertools.accumulate(part.numel() for part in ranges)]
        blocks: list[list[tuple[int, ...]]] = [[] for _ in range(0, begins[-1], NORM_BLOCK_NUMEL)]
        for part, begin in zip(ranges, begins, strict=False):
            code, first = dtype_code(part), self._address(part) - begin * part.element_size()
            end = begin + part.numel()
            for index in range(begin // NORM_BLOCK_NUMEL, -(-end // NORM_BLOCK_NUMEL)):
                start, stop = max(begin, index * NORM_BLOCK_NUMEL), min(end, (index + 1) * NORM_BLOCK_NUMEL)
                if start < stop:
                    blocks[index].append((first, code, start, stop))
        return blocks

    def _elementwise(self, kernel: Any, target: Tensor, source: Tensor, option: int, *more: Tensor) -> None:
        arguments = checked_pair(target, source, self._address)
        if source.numel() == 0:
            return
        programs = -(-source.numel() // self._triton.BLOCK.value)
        with self._current():
            kernel[(programs,)](*arguments, option, *more, **_PASS)

    def _address(self, tensor: Tensor) -> int:
        if tensor.device != self.device or not tensor.is_contiguous():
            raise ValueError(
                f"these kernels take contiguous tensors on {self.device}, "
                f"not one of strides {tensor.stride()} on {tensor.device}"
            )
        return tensor.data_ptr()

    def _upload(self, tensor: Tensor) -> Tensor:
        # From pinned memory, which is not handed out again while the copy reads it: where the device reads pageable
        # memory itself (as a GH200 does), a tensor that is freed at once would be gone before.
        pinned = tensor if self.device.type == "cpu" else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which :attr:`device` is the current device, on which Triton launches kernels."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def checksums_on(device: torch.device) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return :meth:`DeviceKernels.checksums`, or the same in plain torch, which takes more passes over the memory, on
    the CPU and where Triton does not work."""
    if device.type in _TRITON_DEVICES:
        with contextlib.suppress(Exception):  # no Triton, or no compiler for its launchers
            return DeviceKernels(device).checksums
    return checksums


BlockSums = Callable[[Sequence[Sequence[Tensor]], Scale], list[list[float]]]


@functools.cache
def block_sums_on(device: torch.device) -> BlockSums:
    """Return :meth:`DeviceKernels.block_sums`, or where Triton does not work sums in plain torch, whose order, and so
    the last bits of float64, is torch's own."""
    if device.type in _TRITON_DEVICES:
        with contextlib.suppress(Exception):  # no Triton, or no compiler for its launchers
            return DeviceKernels(device).block_sums
    return sums_of_squares


Kernels = HostKernels | DeviceKernels
"""Kernels of any device: the same arguments, with tensors on ``device``, give the same bits. If ``asynchronous`` is
true, calls return before their work is done, and the work is done in stream order."""


def _triton_rules(device: torch.device) -> ModuleType:
    """Return the module with the Triton code, imported on first use because importing Triton takes a second."""
    try:
        from longshore.kernels import triton_rules
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"keeping optimizer state on {device} needs Triton, and there is no {missing.name}: pip install "
            "'longshore[cuda]', or keep the state on the host"
        ) from missing
    runs_on = "cpu" if triton_rules.INTERPRETED else "cuda"
    if device.type != runs_on:
        mode = "in Triton's interpreter (TRITON_INTERPRET is set)" if triton_rules.INTERPRETED else "compiled"
        raise ValueError(f"the kernels run {mode}, so their tensors are on {runs_on}, not on {device}")
    return triton_rules


def _table(tile: NativeTile, firsts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return the columns, which triton_rules.py names, of each segment; ``firsts`` are their first programs."""
    scalar_rows, steps = tile.rules
    *_, buffer_numel, format = tile.buffer
    for row, first in zip(tile.rows, firsts, strict=False):
        offset, numel, gradient, output, rule, gradient_dtype, output_dtype, stream, place = row
        memory = offset, numel, gradient, gradient_dtype, output, output_dtype
        key = rounding_key(stream, steps[rule]) if format != StateFormat.FP32.code else 0
        yield *memory, rule * len(scalar_rows[rule]), first, buffer_numel, key & 0xFFFFFFFF, key >> 32, place


def _float32_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return numbers rounded from float64 to float32, on the CPU: ``[len(rows), columns]``."""
    data = bytearray(b"".join(float32_bytes(value) for row in rows for value in row))
    return torch.frombuffer(data, dtype=torch.float32).view(len(rows), -1)
