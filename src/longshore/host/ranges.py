"""What a profiler sees of the lanes: a range for each pass, copy, norm and job, on the thread that does it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longshore.host.events import Recorder
from longshore.kernels import TileSegment
from longshore.transfer import CopyHandle


def annotating() -> bool:
    """Whether ``LONGSHORE_ANNOTATE`` asks for ranges from the beginning."""
    return os.environ.get("LONGSHORE_ANNOTATE", "0") not in ("", "0")


class Ranges(Recorder):
    """Opens ``torch.profiler.record_function`` ranges, and NVTX ranges where there is CUDA."""

    def __init__(self) -> None:
        self._nvtx = torch.cuda.is_available()
        self._open = threading.local()
        """Of each thread, the names and ranges that it has not ended."""

    def begin(self, name: str, tile: int | None) -> int:
        self._enter(name, tile)
        return 0

    def mark(self, name: str, tile: int | None) -> None:
        if self._nvtx:
            torch.cuda.nvtx.mark(_label(name, tile))

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        self._leave(name)

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        self._leave(name)

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        self._leave(name)

    @contextmanager
    def working(self, lane: str) -> Iterator[None]:
        self._enter(lane, None)
        try:
            yield
        finally:
            self._leave(lane)

    def _stack(self) -> list[tuple[str, Any]]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack

    def _enter(self, name: str, tile: int | None) -> None:
        label = _label(name, tile)
        if self._nvtx:
            torch.cuda.nvtx.range_push(label)
        opened = torch.profiler.record_function(label)
        opened.__enter__()
        self._stack().append((name, opened))

    def _leave(self, name: str) -> None:
        stack = self._stack()
        # What an error left open goes with what is around it.
        while stack and any(open_name == name for open_name, _ in stack):
            open_name, opened = stack.pop()
            opened.__exit__(None, None, None)
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
            if open_name == name:
                return


def _label(name: str, tile: int | None) -> str:
    return f"longshore: {name}" if tile is None else f"longshore: {name}, tile {tile}"
