"""Stepping ahead of the verdict, beside a device whose backward takes its time and leaves the CPUs free.

The device is CPU memory with streams of its own; its backward sleeps, and hands
over one gradient after the other. What ``step()`` takes is what the host step
leaves exposed; publishing, which has to wait for the verdict in any case, is
timed apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from benchmarks.report import Row, at_most
from benchmarks.timing import Note

PART = "Stepping ahead"
_WARMUPS = 10
"""Rounds: the first make the state and the spares, and where clipping always acts the last stop betting."""
OFF, ALL, HALF = "nothing is stepped ahead", "a spare for every tile", "a spare for half of the tiles"
OFF_CLIPPED, ALL_CLIPPED = "nothing is stepped ahead, always clipped", "a spare for every tile, always clipped"
GROUPS: tuple[Mapping[str, tuple[int | str, float]], ...] = (
    {OFF: (0, 1e9), ALL: ("100%", 1e9), HALF: ("50%", 1e9)},
    {OFF_CLIPPED: (0, 1e-3), ALL_CLIPPED: ("100%", 1e-3)},
)
"""Share of spares, and the norm that gradients are clipped to. What is compared takes turns; the first bets nothing."""


@dataclass(frozen=True)
class Settings:
    """``layers`` parameters of ``numel`` elements in bfloat16; backward takes ``patience`` times the host step."""

    layers: int
    numel: int
    threads: int
    rounds: int
    patience: float = 1.5


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, pause: list[float]) -> Tensor:
        ctx.gradient, ctx.pause = gradient, pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.pause[0])  # without the GIL, as a GPU's kernels run
        return grads[0], ctx.gradient.clone(), None, None


def _adamw(weights: list[nn.Parameter], offload: longshore.Offload) -> Any:
    return longshore.AdamW(weights, lr=1e-4, release_gradients=True, offload=offload)


class Contestant:
    """One model on the device, its optimizer, and what its steps took.

    Args:
        memory: for spares.
        pause: one number, the seconds that backward takes for each parameter.
        optimizer: of these parameters, with these settings.
        shape: of the parameters; None: ``[numel]``.
    """

    def __init__(
        self,
        settings: Settings,
        memory: int | str,
        max_norm: float,
        pause: list[float],
        optimizer: Callable[[list[nn.Parameter], longshore.Offload], Any] = _adamw,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        shape = shape or (settings.numel,)
        self._weights = [nn.Parameter(torch.randn(shape).bfloat16().mul_(0.02)) for _ in range(settings.layers)]
        self._gradient = torch.randn(shape).bfloat16().mul_(1e-3)
        self._pause = pause
        self._max_norm = max_norm
        self._publishing = 0.0
        transfer = longshore.SimulatedTransfer(max_delay_s=0.0)
        self.time_apart(transfer, "publish", "end_publish")
        offload = longshore.Offload(
            threads=settings.threads,
            transfer=transfer,
            speculation_memory=memory,
            detect_writes=False,  # a device takes its checksums itself; here they would take this CPU's time
        )
        self.optimizer = optimizer(self._weights, offload)
        self.seconds: dict[str, list[float]] = {"backward": [], "exposed": [], "publishing": []}

    def time_apart(self, of: Any, *names: str) -> None:
        """Count the time of these methods as publishing, and not as exposed."""
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, call: Any) -> Any:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._publishing += time.perf_counter() - start

        return run

    def round(self) -> None:
        x = torch.zeros(1, requires_grad=True)
        for weight in self._weights:
            x = _Layer.apply(x, weight, self._gradient, self._pause)
        start = time.perf_counter()
        x.sum().backward()
        middle = time.perf_counter()
        self._publishing = 0.0
        self.optimizer.clip_grad_norm_(self._max_norm)
        self.optimizer.step()
        end = time.perf_counter()
        took = (middle - start, end - middle - self._publishing, self._publishing)
        for name, seconds in zip(self.seconds, took, strict=True):
            self.seconds[name].append(seconds)


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Seconds by case; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    torch.manual_seed(0)
    cases: dict[str, Any] = {}
    for group in GROUPS:
        cases |= _measure_group(settings, group, note)
    return {"settings": vars(settings), "cases": cases}


def _measure_group(settings: Settings, group: Mapping[str, tuple[int | str, float]], note: Note) -> dict[str, Any]:
    pause = [0.0]
    return take_turns(
        {name: Contestant(settings, memory, norm, pause) for name, (memory, norm) in group.items()},
        settings,
        pause,
        note,
    )


def take_turns(
    contestants: Mapping[str, Contestant], settings: Settings, pause: list[float], note: Note
) -> dict[str, Any]:
    """Train all in turn; seconds by contestant. Backward takes its time, of the first one's host step, after some."""
    usual = next(iter(contestants.values()))
    for number in range(-_WARMUPS, settings.rounds):
        note(f"round {number + 1} of {settings.rounds}" if number >= 0 else "warming up")
        for contestant in contestants.values():
            contestant.round()
        if number == -_WARMUPS // 2:  # the host step is known: backward takes its time from here on
            pause[0] = settings.patience * statistics.median(usual.seconds["exposed"]) / settings.layers
    results = {}
    for name, contestant in contestants.items():
        record = contestant.optimizer.speculation
        seconds = {what: took[_WARMUPS:] for what, took in contestant.seconds.items()}
        results[name] = {**seconds, "speculation": None if record is None else record._asdict()}
        contestant.optimizer.close()
    return results


def rows(results: Mapping[str, Any]) -> list[Row]:
    """What is exposed, of the whole host step, with the goals."""
    cases = results["cases"]

    def median(name: str, what: str) -> float:
        return statistics.median(cases[name][what])

    def ratio(name: str, whole: str) -> float:
        pairs = zip(cases[name]["exposed"], cases[whole]["exposed"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def note(name: str) -> str:
        record = cases[name]["speculation"]
        kept = f"{record['kept']} tiles kept, " if record else ""
        return (
            f"{kept}exposed {1e3 * median(name, 'exposed'):.1f} ms, publishing "
            f"{1e3 * median(name, 'publishing'):.1f} ms, backward {1e3 * median(name, 'backward'):.0f} ms"
        )

    return [
        Row(PART, OFF, 1e3 * median(OFF, "exposed"), "ms", note=note(OFF)),
        at_most(PART, f"{ALL}: exposed, of the host step", ratio(ALL, OFF), "", 0.1, note(ALL)),
        at_most(PART, f"{HALF}: exposed, of the host step", ratio(HALF, OFF), "", 0.6, note(HALF)),
        at_most(
            PART, f"{ALL_CLIPPED}: of the same without", ratio(ALL_CLIPPED, OFF_CLIPPED), "", 1.05, note(ALL_CLIPPED)
        ),
    ]
