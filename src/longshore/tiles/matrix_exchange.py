"""Where whole matrices are transformed: each rank's pieces come together, and the results go back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.accelerator import wait_for
from longshore.kernels import MatrixRule
from longshore.layout.tiles import MatrixLayout
from longshore.tiles.events import NO_RECORDER, TRANSFORM, Recorder
from longshore.transfer import CopyStreams

MATRICES_UNDER_WAY = 2
"""Batches under way at once: one in its passes on the host, and one that is transformed."""


class Matrix(NamedTuple):
    """A parameter whose matrices are to be transformed."""

    parameter: int
    layout: MatrixLayout
    rule: MatrixRule

    @property
    def numel(self) -> int:
        return self.layout.rows * self.layout.columns

    @property
    def workspace_bytes(self) -> int:
        """Bytes that its transformation takes beside the parameter's own."""
        return max(self.rule.workspace_bytes(*self.layout.shape_of(block)) for block in self.layout.blocks)

    def transformed(self, whole: Tensor, recorder: Recorder) -> Tensor:
        """Return the transformed parameter: flat bfloat16, contiguous, as ``whole``, whose memory is written."""
        begin_ns = recorder.begin(TRANSFORM, None)
        try:
            return self._transformed(whole)
        finally:
            recorder.span(TRANSFORM, None, begin_ns)

    def _transformed(self, whole: Tensor) -> Tensor:
        shaped = whole.view(self.layout.rows, self.layout.columns)
        if len(self.layout.blocks) == 1:
            return self.rule.transform(shaped).view(-1)
        for block in self.layout.blocks:  # one at a time: a batch would have other bits
            part = shaped.narrow(*block)
            part.copy_(self.rule.transform(part.contiguous()))
        return whole


class MatrixMemory:
    """Memory for the pieces of the matrices under way, flat bfloat16: of as many batches as are under way at once."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._batches: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._batches)

    def reserve(self, numel: int) -> None:
        """Make sure that there is memory for ``numel`` elements of each batch."""
        if not self._batches or self._batches[0].numel() < numel:
            self._batches = []
            memory = [self._streams.allocate(2 * numel) for _ in range(MATRICES_UNDER_WAY)]
            self._batches = [each[: 2 * numel].view(torch.bfloat16) for each in memory]

    def of_batch(self, place: int) -> Tensor:
        return self._batches[place % MATRICES_UNDER_WAY]


class MatrixExchange(ABC):
    """Brings the matrices of a commit together, transforms them, and brings the results back."""

    @abstractmethod
    def batches(self, matrices: Mapping[int, Matrix]) -> Sequence[Sequence[Matrix]]:
        """Return the matrices to transform, by batches, in the order of all ranks; ``matrices`` are those of which this
        process has a piece, by parameter."""

    @abstractmethod
    def reserve(self, batches: Sequence[Sequence[Matrix]]) -> None:
        """Raise torch.OutOfMemoryError if the device has no memory for them, before anything was stepped."""

    @abstractmethod
    def begin(self, batch: Sequence[Matrix], pieces: Mapping[int, Tensor]) -> Any:
        """Begin to transform a batch, of which ``pieces`` are this process's, by parameter: flat bfloat16, on the host.
        Their memory is used until the batch is finished."""

    @abstractmethod
    def finish(self, under_way: Any) -> Mapping[int, Tensor]:
        """Return the pieces of the results, on the host, valid until the next batch that uses the same memory."""


class LocalExchange(MatrixExchange):
    """Exchange of a process that has all of each matrix.

    Matrices are transformed where the parameters compute, on the current stream. Unless their pieces are there, copies
    to and from it are enqueued, and the passes over other matrices go on.
    """

    def __init__(self, streams: CopyStreams, recorder: Recorder = NO_RECORDER) -> None:
        self.recorder = recorder
        self._streams = streams
        self._device = streams.device

    def batches(self, matrices: Mapping[int, Matrix]) -> Sequence[Sequence[Matrix]]:
        return [[matrix] for matrix in matrices.values()]

    def reserve(self, batches: Sequence[Sequence[Matrix]]) -> None:
        reserve(self._device, [matrix for batch in batches for matrix in batch])

    def begin(self, batch: Sequence[Matrix], pieces: Mapping[int, Tensor]) -> Any:
        results: dict[int, Tensor] = {}
        kept: list[Tensor] = []
        for matrix in batch:
            piece = pieces[matrix.parameter]
            if piece.device.type == self._device.type:
                results[matrix.parameter] = matrix.transformed(piece, self.recorder)
                continue
            result = matrix.transformed(piece.to(self._device, non_blocking=True), self.recorder)
            results[matrix.parameter] = piece.copy_(result, non_blocking=True)
            kept.append(result)
        return results, self._streams.mark() if kept else (), kept

    def finish(self, under_way: Any) -> Mapping[int, Tensor]:
        results, copied, _ = under_way
        for mark in copied:
            wait_for(mark)
        return results


def reserve(device: torch.device, matrices: Sequence[Matrix]) -> None:
    """Raise torch.OutOfMemoryError if ``device`` has no memory to transform the largest of these matrices while as many
    others as may be under way are there."""
    if device.type == "cpu" or not matrices:
        return
    torch.empty(reserved_bytes(matrices), dtype=torch.uint8, device=device)


def reserved_bytes(matrices: Sequence[Matrix]) -> int:
    """Return the bytes of a device to transform the largest of these matrices while as many others as may be under way
    are there."""
    each = sorted((2 * matrix.numel for matrix in matrices), reverse=True)[:MATRICES_UNDER_WAY]
    return 2 * sum(each) + max((matrix.workspace_bytes for matrix in matrices), default=0)
