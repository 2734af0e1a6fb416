"""What ``longshore.trace`` costs: the same steps of the same model, with it and without.

One Llama in bfloat16 on the CPU, the one-line optimizer with released
gradients, a few tokens, so that the optimizer dominates. One model steps in
both cases, in turn; a block of the trace begins and ends off the clock. On a
machine with busy neighbours one step differs from the next by more than tracing
could make of it, so what an event costs by itself is measured as well.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

import longshore
from benchmarks.llama import LlamaSize, make_llama, make_tokens
from benchmarks.report import Row, at_most
from benchmarks.timing import Case, Note, interleave, least_ratio, paired_ratio, summary
from longshore.tiles.events import STEP_IN_PLACE
from longshore.tracing import Trace
from longshore.tracing.events import EventRecorder

PART = "Tracing"
MAX_NORM = 1.0
LEARNING_RATE = 1e-5
OFF, ON = "nothing is traced", "traced"


@dataclass(frozen=True)
class Settings:
    """The Llama's size, and the rounds."""

    hidden_size: int
    layers: int
    intermediate_size: int
    threads: int
    tokens: int
    rounds: int


class _Training:
    """Whole steps; counts the events of those that are traced."""

    def __init__(self, settings: Settings) -> None:
        size = LlamaSize(settings.hidden_size, settings.layers, settings.intermediate_size, settings.tokens)
        self._model = make_llama(size)
        self._tokens = make_tokens(settings.tokens)
        self._block = ExitStack()
        self._trace: Trace | None = None
        self.events: list[int] = []
        self.optimizer = longshore.AdamW(
            self._model.parameters(),
            lr=LEARNING_RATE,
            release_gradients=True,
            offload=longshore.Offload(threads=settings.threads),
        )

    def begin(self) -> None:
        """Trace what follows."""
        self.end()
        self._trace = self._block.enter_context(longshore.trace(self.optimizer))

    def end(self) -> None:
        """Trace nothing."""
        self._block.close()
        if self._trace is not None:
            self.events.append(len(self._trace.events))
            self._trace = None

    def step(self) -> None:
        self._model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _seconds_an_event(count: int = 20_000) -> float:
    """What the thread that has to do with a tile spends on telling of it."""
    recorder = EventRecorder()
    try:
        start = time.perf_counter()
        for _ in range(count):
            recorder.span(STEP_IN_PLACE, 0, recorder.begin(STEP_IN_PLACE, 0))
        return (time.perf_counter() - start) / count
    finally:
        recorder.close()


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Seconds of whole steps by case, and events a step; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    if importlib.util.find_spec("transformers") is None:
        return {"settings": asdict(settings), "missing": "not installed: pip install transformers"}
    torch.set_num_threads(settings.threads)
    training = _Training(settings)
    cases = {OFF: Case(training.step, training.end), ON: Case(training.step, training.begin)}
    times = interleave(cases, settings.rounds, note, warmups=2)
    training.end()
    training.optimizer.close()
    return {
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in training.optimizer.param_groups[0]["params"]),
        "events": statistics.median(training.events),
        "event_s": min(_seconds_an_event() for _ in range(5)),
        "steps": {name: summary(seconds) for name, seconds in times.items()},
    }


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The whole step, what tracing makes of it, and how many events that is."""
    if "missing" in results:
        return [Row(PART, "a Llama in bf16", None, "", note=results["missing"])]
    times = {name: entry["rounds_s"] for name, entry in results["steps"].items()}
    title = f"a step of {results['parameters'] / 1e6:.0f} M parameters, {results['settings']['tokens']} tokens, {OFF}"
    least = f"of the shortest steps {least_ratio(times[ON], times[OFF]):.4f}"
    ratio = paired_ratio(times[ON], times[OFF])
    off_s = statistics.median(times[OFF])
    share = results["events"] * results["event_s"] / off_s
    each = f"each takes {1e6 * results['event_s']:.2f} us by itself, all of them {share:.5f} of the step"
    return [
        Row(PART, title, 1e3 * off_s, "ms"),
        at_most(PART, f"{ON}, of that", ratio, "", 1.01, f"{ratio:.4f}; {least}"),
        Row(PART, "events a step", results["events"], "", note=each),
    ]
