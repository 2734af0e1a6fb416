"""Paired timings: every case runs in every round, so that whatever else the machine does hits all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Seconds = list[float]
Note = Callable[[str], None]
"""Takes one line about what is being measured now."""

_PAUSE_S = 0.02


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Case:
    """One thing to time: ``run`` on the clock, ``prepare`` before it and off the clock."""

    run: Callable[[], None]
    prepare: Callable[[], None] = _nothing


def interleave(cases: Mapping[str, Case], rounds: int, note: Note, warmups: int = 1) -> dict[str, Seconds]:
    """Time every case once a round: A B C, then C B A, and so on; wall clock, in seconds.

    The order turns round so that no case always runs behind the same neighbour.
    Between two cases comes a short pause: OpenMP threads keep spinning for a
    while after their last work, and would take the next case's CPUs.
    """
    seconds: dict[str, Seconds] = {name: [] for name in cases}
    names = list(cases)
    for number in range(-warmups, rounds):
        note(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        for name in names if number % 2 == 0 else reversed(names):
            cases[name].prepare()
            gc.collect()
            gc.disable()
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            cases[name].run()
            elapsed = time.perf_counter() - start
            gc.enable()
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over rounds of one case's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def least_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """One case's best round over another's best: less of a busy machine's noise, and less of a fair share of it."""
    return min(numerator) / min(denominator)


def difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> Seconds:
    """Round by round, what one case takes more than another."""
    return [a - b for a, b in zip(minuend, subtrahend, strict=True)]


def summary(seconds: Sequence[float]) -> dict[str, object]:
    """Median, least and quartiles in seconds, and every round, for the JSON."""
    first, _, third = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "quartiles_s": [first, third],
        "rounds_s": list(seconds),
    }
