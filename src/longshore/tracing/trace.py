"""``longshore.trace`` and ``longshore.annotate``: record a block of training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed

from longshore.errors import LongshoreError
from longshore.host import Ranges, Recorder
from longshore.optim.host_optimizer import HostOptimizer
from longshore.tracing.events import Event, EventRecorder, in_order
from longshore.tracing.export import chrome_events, html_page
from longshore.tracing.summary import Summary, summarize


class Trace:
    """What :func:`trace` recorded. It can be read once the block is over.

    Attributes:
        rank: the rank of this process; 0 without ``torch.distributed``.
        events: sorted by their beginnings; empty until the block is over.
    """

    def __init__(self, rank: int, begin_ns: int) -> None:
        self.rank = rank
        self.events: Sequence[Event] = ()
        self._begin_ns = begin_ns
        self._spares: int | None = None

    def finish(self, events: Sequence[Event], spares: int) -> None:
        """Store the recorded events, and how many spares the store has."""
        self.events = tuple(in_order(events))
        self._spares = spares

    def summary(self) -> Summary:
        """Times and bandwidths; ``print`` shows them as a table.

        Raises:
            LongshoreError: the block is not over.
        """
        return summarize(self.events, self._begin_ns, self._finished())

    def _finished(self) -> int:
        if self._spares is None:
            raise LongshoreError("this trace is still being recorded; read and save it after the block")
        return self._spares

    def save_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for ui.perfetto.dev or chrome://tracing: a process for the rank, a thread for each lane.

        Raises:
            LongshoreError: the block is not over.
        """
        self._finished()
        document = {"traceEvents": chrome_events(self.events, self.rank, self._begin_ns), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page: lanes over time, with the exposed time marked.

        Raises:
            LongshoreError: the block is not over.
        """
        Path(path).write_text(html_page(self.events, self.rank, self._begin_ns, self.summary()), encoding="utf-8")


@contextmanager
def annotate(engine_or_optimizer: Any) -> Iterator[None]:
    """Add ranges for ``torch.profiler`` and, with CUDA, for NVTX during the block.

    There is a range for every pass over a tile, every copy that is issued, every norm, and every job of the host's and
    the collectives' threads, on the thread that runs it. ``LONGSHORE_ANNOTATE=1`` in the environment adds them for the
    whole run, for example under ``nsys profile``. ``torch.profiler`` sees all threads with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.

    Args:
        engine_or_optimizer: an engine of ``longshore.initialize``, or any longshore optimizer.

    Raises:
        TypeError: it is neither.
    """
    optimizer, ranges = _optimizer_of(engine_or_optimizer, "annotate"), Ranges()
    _record(optimizer, ranges, True)
    try:
        yield
    finally:
        _record(optimizer, ranges, False)


@contextmanager
def trace(engine_or_optimizer: Any) -> Iterator[Trace]:
    """Record the events of each tile during the block. Tracing does not change the weights, to the bit.

    Each rank records its own events. Begin and end the block after ``step()``: gradients that arrived before the block
    are not recorded. A closure passed to ``step()`` counts as part of the step.

    Args:
        engine_or_optimizer: an engine of ``longshore.initialize``, or any longshore optimizer.

    Yields:
        The trace, which can be read and saved once the block is over.

    Raises:
        TypeError: the argument is neither.
        LongshoreError: the optimizer is being traced already.
    """
    optimizer = _optimizer_of(engine_or_optimizer, "trace")
    if any(isinstance(each, EventRecorder) for each in optimizer._core.store.recorders):
        raise LongshoreError("this optimizer is being traced already; end the other block of longshore.trace first")
    recorder = EventRecorder()
    begin_ns = called_ns = time.perf_counter_ns()

    def called(*_: Any) -> None:
        nonlocal called_ns
        called_ns = time.perf_counter_ns()

    hooks = [
        optimizer.register_step_pre_hook(called),
        optimizer.register_step_post_hook(lambda *_: recorder.step(called_ns)),
    ]
    result = Trace(_rank(), begin_ns)
    _record(optimizer, recorder, True)
    try:
        yield result
    finally:
        _record(optimizer, recorder, False)
        for hook in hooks:
            hook.remove()
        speculation = optimizer._core.store.local.speculation
        result.finish(recorder.close(), 0 if speculation is None else speculation.spares)


def _record(optimizer: HostOptimizer, recorder: Recorder, begin: bool) -> None:
    """Begin or end to tell ``recorder`` of the events of an optimizer, whose store may change meanwhile."""
    store = optimizer._core.store
    others = [each for each in store.recorders if each is not recorder]
    store.set_recorders([*others, recorder] if begin else others)


def _optimizer_of(engine_or_optimizer: Any, caller: str) -> HostOptimizer:
    optimizer = getattr(engine_or_optimizer, "optimizer", engine_or_optimizer)
    if not isinstance(optimizer, HostOptimizer):
        found = type(engine_or_optimizer)
        raise TypeError(
            f"longshore.{caller} takes an engine of longshore.initialize or a longshore optimizer, not "
            f"{found.__module__}.{found.__qualname__}"
        )
    return optimizer


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
