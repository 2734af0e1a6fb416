"""Summarize a trace in ten numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longshore.host.events import COPY_TO_HOST, DROPPED, KEPT, NORM, PUBLISH, REDONE, STEP_AHEAD, STEP_IN_PLACE
from longshore.tracing.events import STEP, Event, exposed_spans

_PASSES = (STEP_AHEAD, STEP_IN_PLACE)


class Summary(NamedTuple):
    """Numbers of one traced block; None where the block has no event of the kind.

    Seconds are means over the steps of the block. Bytes a second are those of this process, over the time in which it
    read, wrote or copied.
    """

    steps: int
    """Calls of ``step()`` that returned."""
    step_s: float | None
    """From the end of a step, or the beginning of the block, to the end of the next step."""
    exposed_s: float | None
    """The time of ``step()``, and of the norm before it. Where a device runs behind the CPU, this includes the rest of
    its backward, for which the CPU waits here."""
    norm_s: float | None
    """The part of ``exposed_s`` that computes the norm of gradients, or waits for it."""
    host_bytes_per_second: float | None
    """Optimizer state read and written, over the time of all passes on the host."""
    to_host_bytes_per_second: float | None
    """Gradients copied: a lower bound, since the time includes waiting for gradients that are not computed yet."""
    to_device_bytes_per_second: float | None
    """New parameters copied: a lower bound."""
    hit_rate: float | None
    """The share of tiles stepped ahead that ``step()`` kept."""
    spares_used: int
    """The most tiles stepped ahead in one accumulation window."""
    spares: int
    """Tiles that can be stepped ahead at once, at the end of the block."""

    def __str__(self) -> str:
        rows = [
            ("steps", str(self.steps)),
            ("time of a step", _milliseconds(self.step_s)),
            ("  exposed: norm and step()", _milliseconds(self.exposed_s)),
            ("    norm", _milliseconds(self.norm_s)),
            ("host passes", _gigabytes(self.host_bytes_per_second)),
            ("copies to the host", _gigabytes(self.to_host_bytes_per_second)),
            ("copies to the device", _gigabytes(self.to_device_bytes_per_second)),
            ("stepped ahead and kept", "-" if self.hit_rate is None else f"{100 * self.hit_rate:.0f}%"),
            ("spare pages used", f"{self.spares_used} of {self.spares}"),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def summarize(events: Sequence[Event], begin_ns: int, spares: int) -> Summary:
    """Summarize a block that began at ``begin_ns``; ``events`` are sorted by their beginnings."""
    steps = [event for event in events if event.name == STEP]
    count = len(steps)
    stepped_by_ns = steps[-1].end_ns if steps else begin_ns
    norms = [event for event in events if event.name == NORM and event.begin_ns < stepped_by_ns]
    verdicts = [event.name for event in events if event.name in (KEPT, REDONE, DROPPED)]
    return Summary(
        steps=count,
        step_s=(stepped_by_ns - begin_ns) / count / 1e9 if count else None,
        exposed_s=sum(end - begin for begin, end in exposed_spans(events)) / 1e9 / count if count else None,
        norm_s=_seconds(norms) / count if count and norms else None,
        host_bytes_per_second=_speed([event for event in events if event.name in _PASSES]),
        to_host_bytes_per_second=_speed([event for event in events if event.name == COPY_TO_HOST]),
        to_device_bytes_per_second=_speed([event for event in events if event.name == PUBLISH]),
        hit_rate=verdicts.count(KEPT) / len(verdicts) if verdicts else None,
        spares_used=_most_ahead(events),
        spares=spares,
    )


def _most_ahead(events: Sequence[Event]) -> int:
    most, tiles = 0, set[int | None]()
    for event in events:
        if event.name == STEP_AHEAD:
            tiles.add(event.tile)
            most = max(most, len(tiles))
        elif event.name == STEP:  # the worker is idle inside it
            tiles = set()
    return most


def _speed(events: Sequence[Event]) -> float | None:
    counted = [event for event in events if event.num_bytes]
    seconds = _seconds(counted)
    return sum(event.num_bytes for event in counted) / seconds if seconds else None


def _seconds(events: Sequence[Event]) -> float:
    return sum(event.end_ns - event.begin_ns for event in events) / 1e9


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _gigabytes(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:.2f} GB/s"
