"""``longshore.trace`` and ``longshore.annotate``: record a block of training, and summarize it in a dozen numbers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from longshore import LongshoreError, Stream
from longshore.seam import (
    COPY_TO_HOST,
    DROPPED,
    FETCH,
    KEPT,
    NORM,
    PUBLISH,
    REDONE,
    STEP_AHEAD,
    STEP_IN_PLACE,
    TRANSFORM,
    WAIT,
    DeviceClock,
    Ranges,
    Recorder,
    TiledOptimizer,
    core_of,
    replace_file,
    stands_for,
    streams_of,
)
from longshore.tracing.events import STEP, Event, EventRecorder, exposed_spans, in_order
from longshore.tracing.export import chrome_events, html_page


class Summary(NamedTuple):
    """Numbers of one traced block; None if the block has no event of the kind.

    Seconds are means over the steps of the block. Bytes per second are those of this process, over the time in which it
    read, wrote or copied.
    """

    steps: int
    """Calls of ``step()`` that returned."""
    step_s: float | None
    """From the end of a step, or the beginning of the block, to the end of the next step."""
    exposed_s: float | None
    """The time of ``step()``, and of the norm before it. A device's begins when its backward has ended, however early
    the CPU asks, and ends when its next forward may begin."""
    norm_s: float | None
    """The part of ``exposed_s`` that computes the norm of gradients, or waits for it."""
    host_bytes_per_second: float | None
    """Optimizer state read and written, over the time of all passes on the host."""
    to_host_bytes_per_second: float | None
    """Gradients copied. With a simulated transfer a lower bound, since the time includes the waiting for a thread."""
    to_device_bytes_per_second: float | None
    """New parameters copied, likewise."""
    fetched_bytes_per_second: float | None
    """Parameters that rest on the host (:func:`longshore.stream`) copied to the device, over the time of these copies.
    """
    waited_s: float | None
    """How long the device waited for these in forward and backward, a step."""
    hit_rate: float | None
    """The share of tiles stepped ahead that ``step()`` kept."""
    spares_used: int
    """The most tiles stepped ahead in one accumulation window."""
    spares: int
    """Tiles that can be stepped ahead at once, at the end of the block."""
    transform_s: float | None = None
    """The time of this process's Newton-Schulz iterations, if the optimizer is Muon."""

    def __str__(self) -> str:
        def shown(value: float | None, scale: float, unit: str) -> str:
            return "-" if value is None else f"{scale * value:.2f} {unit}"

        orthogonal, resting = [], []
        if self.transform_s is not None:
            orthogonal = [("    Newton-Schulz", shown(self.transform_s, 1e3, "ms"))]
        if self.waited_s is not None:
            resting = [
                ("parameters to the device", shown(self.fetched_bytes_per_second, 1e-9, "GB/s")),
                ("  forward and backward wait", shown(self.waited_s, 1e3, "ms")),
            ]
        rows = [
            ("steps", str(self.steps)),
            ("time of a step", shown(self.step_s, 1e3, "ms")),
            ("  exposed: norm and step()", shown(self.exposed_s, 1e3, "ms")),
            ("    norm", shown(self.norm_s, 1e3, "ms")),
            *orthogonal,
            ("host passes", shown(self.host_bytes_per_second, 1e-9, "GB/s")),
            ("copies to the host", shown(self.to_host_bytes_per_second, 1e-9, "GB/s")),
            ("copies to the device", shown(self.to_device_bytes_per_second, 1e-9, "GB/s")),
            *resting,
            ("stepped ahead and kept", "-" if self.hit_rate is None else f"{100 * self.hit_rate:.0f}%"),
            ("spare buffers used", f"{self.spares_used} of {self.spares}"),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def summarize(events: Sequence[Event], begin_ns: int, spares: int) -> Summary:
    """Summarize a block that began at ``begin_ns``; ``events`` are sorted by their beginnings."""

    def speed(*names: str) -> float | None:
        counted = [event for event in events if event.name in names and event.num_bytes]
        seconds = _seconds(counted)
        return sum(event.num_bytes for event in counted) / seconds if seconds else None

    steps = [event for event in events if event.name == STEP]
    count = len(steps)
    stepped_by_ns = steps[-1].end_ns if steps else begin_ns
    norms = [event for event in events if event.name == NORM and event.begin_ns < stepped_by_ns]
    fetched = any(event.name == FETCH for event in events)
    transformed = [event for event in events if event.name == TRANSFORM]
    verdicts = [event.name for event in events if event.name in (KEPT, REDONE, DROPPED)]
    return Summary(
        steps=count,
        step_s=(stepped_by_ns - begin_ns) / count / 1e9 if count else None,
        exposed_s=sum(end - begin for begin, end in exposed_spans(events)) / 1e9 / count if count else None,
        norm_s=_seconds(norms) / count if count and norms else None,
        host_bytes_per_second=speed(STEP_AHEAD, STEP_IN_PLACE),
        to_host_bytes_per_second=speed(COPY_TO_HOST),
        to_device_bytes_per_second=speed(PUBLISH),
        fetched_bytes_per_second=speed(FETCH),
        waited_s=_seconds([event for event in events if event.name == WAIT]) / count if count and fetched else None,
        hit_rate=verdicts.count(KEPT) / len(verdicts) if verdicts else None,
        spares_used=_most_ahead(events),
        spares=spares,
        transform_s=_seconds(transformed) / count if count and transformed else None,
    )


def _seconds(events: Sequence[Event]) -> float:
    return sum(event.end_ns - event.begin_ns for event in events) / 1e9


def _most_ahead(events: Sequence[Event]) -> int:
    most, tiles = 0, set[int | None]()
    for event in events:
        if event.name == STEP_AHEAD:
            tiles.add(event.tile)
            most = max(most, len(tiles))
        elif event.name == STEP:  # the worker is idle inside step()
            tiles = set()
    return most


class Trace:
    """The events of a block of :func:`trace`, which can be read once the block is over.

    Attributes:
        rank: the rank of this process; 0 without ``torch.distributed``.
        events: the events, sorted by their beginnings; empty until the block is over.
    """

    def __init__(self, rank: int, begin_ns: int) -> None:
        self.rank = rank
        self.events: Sequence[Event] = ()
        self._begin_ns = begin_ns
        self._spares: int | None = None  # None until the block is over

    def summary(self) -> Summary:
        """Return times and bandwidths; ``print`` shows them as a table.

        Raises:
            LongshoreError: the block is not over.
        """
        return summarize(self.events, self._begin_ns, self._finished())

    def _finished(self) -> int:
        if self._spares is None:
            raise LongshoreError("this trace is still being recorded; read and save it after the block")
        return self._spares

    def save_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for ui.perfetto.dev or chrome://tracing: a process for the rank, a thread for each track. An
        existing file, or a link, of that name is replaced.

        Raises:
            LongshoreError: the block is not over.
        """
        self._finished()
        document = {"traceEvents": chrome_events(self.events, self.rank, self._begin_ns), "displayTimeUnit": "ms"}
        replace_file(Path(path), json.dumps(document).encode())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page that shows the tracks over time, with the exposed time marked. An existing
        file, or a link, of that name is replaced.

        Raises:
            LongshoreError: the block is not over.
        """
        page = html_page(self.events, self.rank, self._begin_ns, str(self.summary()))
        replace_file(Path(path), page.encode())


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
        TypeError: the argument is neither.
    """
    optimizer, ranges = _optimizer_of(engine_or_optimizer, "annotate"), Ranges()
    _record(optimizer, ranges, True)
    try:
        yield
    finally:
        _record(optimizer, ranges, False)


@contextmanager
def trace(engine_or_optimizer: Any) -> Iterator[Trace]:
    """Record the events of each tile during the block. Tracing does not change the weights by a single bit.

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
    if any(isinstance(each, EventRecorder) for each in core_of(optimizer).members.store.tiles.recorders):
        raise LongshoreError("this optimizer is being traced already; end the other block of longshore.trace first")
    clock, streams = core_of(optimizer).members.store.tiles.streams.clock(), _streams_of(optimizer)
    if clock is None and streams:
        clock = DeviceClock(streams[0].device)
    recorder = EventRecorder(clock)
    begin_ns = time.perf_counter_ns()
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: recorder.calling_step()),
        optimizer.register_step_post_hook(lambda *_: recorder.step()),
    ]
    result = Trace(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0, begin_ns)
    _record(optimizer, recorder, True)
    try:
        yield result
    finally:
        _record(optimizer, recorder, False)
        for hook in hooks:
            hook.remove()
        speculation = core_of(optimizer).members.store.tiles.tier.speculator.record
        result.events = tuple(in_order(recorder.close()))
        result._spares = 0 if speculation is None else speculation.spares


def _record(optimizer: TiledOptimizer, recorder: Recorder, begin: bool) -> None:
    """Connect ``recorder`` to the current store of an optimizer, or disconnect it; the store may change in between."""
    store = core_of(optimizer).members.store
    for each, recorders in (
        (store, store.tiles.recorders),
        *((each, each.recorders) for each in _streams_of(optimizer)),
    ):
        others = [other for other in recorders if other is not recorder]
        each.set_recorders([*others, recorder] if begin else others)


def _streams_of(optimizer: TiledOptimizer) -> list[Stream]:
    return streams_of(parameter for group in optimizer.param_groups for parameter in group["params"])


def _optimizer_of(engine_or_optimizer: Any, caller: str) -> TiledOptimizer:
    optimizer = stands_for(getattr(engine_or_optimizer, "optimizer", engine_or_optimizer))
    if not isinstance(optimizer, TiledOptimizer):
        found = type(engine_or_optimizer)
        raise TypeError(
            f"longshore.{caller} takes an engine of longshore.initialize or a longshore optimizer, not "
            f"{found.__module__}.{found.__qualname__}"
        )
    return optimizer
