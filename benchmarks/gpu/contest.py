"""All contestants in turn, each in a process of its own, on the same weights, text and numbers of steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contestants import AHEAD, BY_HAND, CONTESTANTS, DEEPSPEED, RESIDENT
from benchmarks.gpu.one_run import Run
from benchmarks.llama import LlamaSize
from benchmarks.timing import Note
from longshore.cli.data import Sequences, byte_corpus, read_text

_ROOT = Path(__file__).parents[2]
_PREPARE_RATE, _RATE = 3e-4, 1e-4
_SHOWN_CHARACTERS = 2000
CURVES = (RESIDENT, AHEAD, BY_HAND)
"""Whose loss curves are laid over each other; those of the first two are to be the same bits."""


@dataclass(frozen=True)
class Point:
    """``backwards`` sequences to a step; steps ahead of the clock and on it."""

    backwards: int
    warmups: int
    steps: int


@dataclass(frozen=True)
class Scale:
    """How big and how long: the Llama, the points, steps to prepare its weights (0: they are random) and of the curves,
    and a limit for one process in seconds."""

    llama: LlamaSize
    points: tuple[Point, ...]
    prepare_steps: int
    curve_steps: int
    limit_s: float


_POINTS = (Point(1, 2, 5), Point(4, 2, 3), Point(16, 2, 3))
SCALES = {
    "tiny": Scale(LlamaSize(64, 2, 128, 64), (Point(1, 2, 3), Point(4, 2, 2)), 5, 10, 300),
    "1.2b": Scale(LlamaSize(2048, 22, 5632, 4096), _POINTS, 200, 40, 200),
    "1.2b-short": Scale(LlamaSize(2048, 22, 5632, 4096), (Point(4, 2, 3),), 0, 4, 100),
    "3b": Scale(LlamaSize(3072, 26, 8192, 4096), _POINTS, 200, 40, 300),
}


@dataclass(frozen=True)
class Settings:
    """``scale``: one of :data:`SCALES`. ``contestants``: in this order."""

    scale: str
    device: str
    threads: int
    deepspeed_python: str = sys.executable
    contestants: Sequence[str] = CONTESTANTS


class Contest:
    """Runs contestants and keeps what became of them; ``save`` gets all results whenever there is a new one."""

    def __init__(self, settings: Settings, note: Note, save: Callable[[dict[str, Any]], None]) -> None:
        self._settings = settings
        self._scale = SCALES[settings.scale]
        self._note = note
        self._save = save
        shown = {name: value for name, value in asdict(settings).items() if name != "deepspeed_python"}  # a path
        self.results: dict[str, Any] = {
            "settings": {**shown, **asdict(self._scale)},
            "runs": [],
            "curves": {},
        }

    def measure(self) -> dict[str, Any]:
        """Everything; what is known about the first point and the curves comes first."""
        first, *others = self._scale.points
        with tempfile.TemporaryDirectory() as folder:
            text_path, weights_path = str(Path(folder) / "text.pt"), str(Path(folder) / "weights.pt")
            torch.save(self._text(), text_path)
            run = self._run(text_path, weights_path)
            if self._scale.prepare_steps:
                self._note("preparing weights")
                self.results["preparation"] = self._in_process("prepare", run)
            if "failed" not in self.results.get("preparation", {}):
                run = replace(run, first_row=self._scale.prepare_steps, learning_rate=_RATE)
                self._measure_point(first, run)
                self._measure_curves(run)
                for point in others:
                    self._measure_point(point, run)
        self._save(self.results)
        return self.results

    def _run(self, text_path: str, weights_path: str) -> Run:
        """The preparation; what follows is made from it."""
        settings, scale = self._settings, self._scale
        return Run(
            BY_HAND, scale.llama, settings.device, settings.threads, _PREPARE_RATE, 1, 0, scale.prepare_steps, 0,
            text_path, weights_path if scale.prepare_steps else None,
        )  # fmt: skip

    def _text(self) -> torch.Tensor:
        """Sequences of bytes of Python's standard library, in random order: first those of the preparation."""
        scale = self._scale
        longest = max((point.warmups + point.steps) * point.backwards for point in scale.points)
        rows = scale.prepare_steps + max(longest, scale.curve_steps)
        corpus = byte_corpus(read_text((), None).documents, 256)
        return Sequences(corpus, scale.llama.max_tokens, seed=0).training_batch(0, rows).inputs

    def _measure_point(self, point: Point, run: Run) -> None:
        tokens = point.backwards * self._scale.llama.max_tokens
        failed = {result["contestant"] for result in self.results["runs"] if "failed" in result}
        for name in self._settings.contestants:
            if name in failed:  # what cannot be built or is too large will not be at more tokens
                continue
            self._note(f"{tokens} tokens a step: {name}")
            result = self._in_process(
                "train",
                replace(run, contestant=name, backwards=point.backwards, warmups=point.warmups, steps=point.steps),
            )
            self.results["runs"].append({"contestant": name, "tokens_per_step": tokens, **result})
            self._save(self.results)

    def _measure_curves(self, run: Run) -> None:
        for name in CURVES:
            self._note(f"loss curve: {name}")
            curve = replace(run, contestant=name, steps=self._scale.curve_steps, deterministic=True)
            self.results["curves"][name] = self._in_process("train", curve)
            curves = self.results["curves"]
            self.results["largest_loss_difference"] = {
                name: largest_difference(curves[RESIDENT], curves[name]) for name in (AHEAD, BY_HAND) if name in curves
            }
            self._save(self.results)

    def _in_process(self, job: str, run: Run) -> dict[str, Any]:
        """What the process wrote, or ``{"failed": why}``; ends it, and what it started, at the limit."""
        python = self._settings.deepspeed_python if run.contestant in DEEPSPEED else sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": str(run.threads)}
        if run.deterministic:
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch's deterministic algorithms ask for it
        with tempfile.TemporaryDirectory() as folder:
            result, printed = Path(folder) / "result.json", Path(folder) / "printed.txt"
            command = [python, "-m", "benchmarks.gpu.one_run", job, json.dumps(asdict(run)), str(result)]
            with printed.open("w") as output:
                process = subprocess.Popen(
                    command, cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    status = process.wait(self._scale.limit_s)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    _kill_group(process)
            if result.exists():
                outcome = json.loads(result.read_text())
            else:
                outcome = {"failed": _how_it_ended(status, self._scale.limit_s)}
            if "failed" in outcome:  # what it printed is not kept: it may hold paths
                end = printed.read_text(errors="replace")[-_SHOWN_CHARACTERS:]
                print(f"{run.contestant}: {outcome['failed']}\n{end}", file=sys.stderr)
            return outcome


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Between the losses of the same step; None where one of them has none."""
    if "losses" not in one or "losses" not in other:
        return None
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The process and its workers, which are in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"did not end within {limit_s:.0f} s"
    if status == -signal.SIGKILL:
        return "killed by the system, which does so when host memory is used up"
    return f"ended with status {status}; the end of what it printed is on standard error"
