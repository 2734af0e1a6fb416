"""Saving and loading: what training waits for, beside what a save takes that it waits for.

One rank, ZeRO-2 with cpu offload, a Llama in bfloat16. In each round one save
that training waits for, and one that is written while training goes on; the
step after it is taken at once, so that it has to step beside every buffer that is
not written yet. ``torch.save`` of the same state dictionaries, with a flush to
the disk, which gives neither checksums nor a name that appears at once, is what
people have otherwise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import ENGINE, Setup, start
from benchmarks.report import Row, at_most
from benchmarks.timing import Note, paired_ratio, summary
from longshore.tiles.memory import PendingReads

PART = "Checkpoints"
TOKENS = 32
SAVE, CALL, WAITS, PAUSE, WRITTEN, TORCH, LOAD = (
    "save",
    "async save: the call",
    "async save: steps wait for buffers",
    "async save: the pause in all",
    "async save: until it is on the disk",
    "torch.save and fsync",
    "load",
)


@dataclass(frozen=True)
class Settings:
    """The Llama's size; ``rounds`` are timed, after one that is not."""

    hidden_size: int
    layers: int
    intermediate_size: int
    threads: int
    rounds: int


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Seconds by what was timed, and bytes; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    setup = Setup(
        settings.hidden_size, settings.layers, settings.intermediate_size, TOKENS, settings.threads, 50_000_000
    )
    torch.set_num_threads(settings.threads)
    model = setup.llama()
    training = start(ENGINE, setup, model)
    seconds: dict[str, list[float]] = {}
    num_bytes = 0
    with tempfile.TemporaryDirectory(prefix="longshore-bench-") as folder:
        training.run()
        for number in range(-1, settings.rounds):
            note(f"round {number + 1} of {settings.rounds}" if number >= 0 else "warming up")
            found, num_bytes = _round(training.engine, training.run, Path(folder))
            for name, value in found.items() if number >= 0 else ():
                seconds.setdefault(name, []).append(value)
    training.engine.destroy()
    return {
        "settings": asdict(settings),
        "bytes": num_bytes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "times": {name: summary(times) for name, times in seconds.items()},
    }


def _round(engine: Any, step: Callable[[], None], folder: Path) -> tuple[dict[str, float], int]:
    found: dict[str, float] = {}
    step()
    found[SAVE] = _timed(lambda: engine.save_checkpoint(folder, "waited"))
    num_bytes = sum(path.stat().st_size for path in (folder / "waited").iterdir())
    step()
    with _waits() as waits:
        begin = time.perf_counter()
        found[CALL] = _timed(lambda: engine.save_checkpoint(folder, "beside", async_save=True))
        step()
        step()
        engine.wait_for_checkpoint()
        found[WRITTEN] = time.perf_counter() - begin
    found[WAITS] = sum(waits)
    found[PAUSE] = found[CALL] + found[WAITS]
    found[TORCH] = _timed(lambda: _torch_save(engine, folder / "state.pt"))
    found[LOAD] = _timed(lambda: engine.load_checkpoint(folder, "beside"))
    return found, num_bytes


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@contextmanager
def _waits() -> Iterator[list[float]]:
    """Seconds that each step waited for a buffer."""
    wait, seconds = PendingReads.wait_for, []

    def waiting(pending_reads: PendingReads, released: int) -> None:
        seconds.append(_timed(lambda: wait(pending_reads, released)))

    PendingReads.wait_for = waiting
    try:
        yield seconds
    finally:
        PendingReads.wait_for = wait


def _torch_save(engine: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save([engine.module.state_dict(), engine.optimizer.state_dict()], file)
        file.flush()
        os.fsync(file.fileno())


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The figures of the table, with the goal of the pause."""
    times: dict[str, list[float]] = {name: each["rounds_s"] for name, each in results["times"].items()}
    gib = results["bytes"] / 2**30
    save = statistics.median(times[SAVE])
    table = [Row(PART, SAVE, save, "s", note=f"{gib:.2f} GiB, {gib / save:.2f} GiB/s, with SHA-256 and fsync")]
    table += [Row(PART, name, 1e3 * statistics.median(times[name]), "ms") for name in (CALL, WAITS)]
    percent = 100 * paired_ratio(times[PAUSE], times[SAVE])
    table.append(at_most(PART, f"{PAUSE}, of a save", percent, "%", 5.0))
    table.append(Row(PART, f"{WRITTEN}, over a save", paired_ratio(times[WRITTEN], times[SAVE]), "x", note="two steps"))
    table.append(Row(PART, f"{TORCH}, over a save", paired_ratio(times[TORCH], times[SAVE]), "x"))
    table.append(Row(PART, f"{LOAD}, verified, over a save", paired_ratio(times[LOAD], times[SAVE]), "x"))
    return table
