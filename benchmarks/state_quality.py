"""``python -m benchmarks.state_quality --out FOLDER``: what the states' formats do to training.

``longshore train`` with each format, and with float32 states that are rounded to bfloat16's nearest numbers after each
step, as DeepSpeed keeps them; some seeds of each. Two runs of one seed that differ in their last bits at one step go
separate ways and end at different losses. How different, runs show whose weights were changed by a millionth before the
first step. Prints the mean of the last validation losses and its difference from that of float32 states, and draws the
curves. Runs that are in the folder already are not repeated. What a run prints is in a file beside its folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import longshore
from benchmarks.second_moment import NEAREST
from longshore.cli import main as run_longshore
from longshore.cli.output import METRICS
from longshore.cli.pictures import Series, loss_curves
from longshore.machine import usable_cpus

CHANCE = "fp32, weights changed by a millionth"
FOLDERS = {"fp32": "fp32", "bf16": "bf16", "8bit": "8bit", NEAREST: "nearest", CHANCE: "chance"}


class NearestAdamW(longshore.AdamW):
    """AdamW whose states are rounded to the nearest bfloat16 numbers after each step."""

    def step(self, *given: Any, **named: Any) -> Any:
        result = super().step(*given, **named)
        for group in self.param_groups:
            for parameter in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    state = self.state[parameter][name]
                    state.copy_(state.bfloat16())
        return result


class ChangedAdamW(longshore.AdamW):
    """AdamW that multiplies each weight by 1.000001 before the first step."""

    def step(self, *given: Any, **named: Any) -> Any:
        if not self.state:
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_mul_(group["params"], 1 + 1e-6)
        return super().step(*given, **named)


def train(format: str, arguments: list[str], log: Path) -> None:
    """Run ``longshore train``; in a process of its own, where the optimizer may be replaced."""
    if format in (NEAREST, CHANCE):
        longshore.AdamW = NearestAdamW if format == NEAREST else ChangedAdamW  # pyright: ignore
        format = "fp32"
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(run_longshore(["train", *arguments, "--states", format]))


def validation(folder: Path) -> dict[int, float]:
    """Return the validation losses of a run, by step; without those before training, which are the same in all runs."""
    if not (folder / METRICS).exists():
        return {}
    records = map(json.loads, (folder / METRICS).read_text().splitlines())
    return {each["step"]: each["loss"] for each in records if each["kind"] == "validation" and each["step"]}


def run(format: str, folder: Path, arguments: list[str], steps: int) -> dict[int, float]:
    """Return the validation losses of one run by step, from ``folder`` if it was there already."""
    if steps not in validation(folder):
        log = folder.with_suffix(".log")
        child = multiprocessing.get_context("spawn").Process(target=train, args=(format, arguments, log))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise SystemExit(f"the run of {folder} ended with {child.exitcode}; {log} says why")
    losses = validation(folder)
    print(f"{folder.name}: {losses[steps]:.4f}", flush=True)
    return losses


def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs, and of the picture.")],
    seeds: Annotated[int, typer.Option(help="Runs of each format.")] = 3,
    size: Annotated[str, typer.Option(help="As for longshore train.")] = "small",
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 500,
    formats: Annotated[str, typer.Option(help="Some of them, with commas; fp32 runs always.")] = ",".join(
        FOLDERS.values()
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; each has a share of the cores.")] = 1,
) -> None:
    """Train in each format, print how the final losses compare, and draw the curves."""
    chosen = {"fp32", *formats.split(",")}
    if unknown := chosen - {*FOLDERS.values()}:
        raise typer.BadParameter(
            f"no such format: {', '.join(sorted(unknown))}; there are {', '.join(FOLDERS.values())}"
        )
    folders = {format: name for format, name in FOLDERS.items() if name in chosen}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cpus()) // jobs)))  # of the children
    out.mkdir(parents=True, exist_ok=True)
    print(f"{seeds * len(folders)} runs; what each prints is in {out}/*.log", flush=True)
    shape = ["--size", size, "--steps", str(steps), "--eval-every", str(steps // 10), "--eval-batches", "32"]
    with ThreadPoolExecutor(jobs) as pool:
        started = {}
        for seed, (format, name) in product(range(seeds), folders.items()):
            folder = out / f"{name}-{seed}"
            arguments = [*shape, "--seed", str(seed), "--out", str(folder), "--overwrite"]
            started[format, seed] = pool.submit(run, format, folder, arguments, steps)
        try:
            for future in as_completed(started.values()):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    runs = {format: [started[format, seed].result() for seed in range(seeds)] for format in folders}
    final = {format: [losses[steps] for losses in curves] for format, curves in runs.items()}
    base = final["fp32"]
    for format, losses in final.items():
        relative = [ours / theirs - 1 for ours, theirs in zip(losses, base, strict=True)]
        said = f"{format}: mean {statistics.mean(losses):.4f}"
        if format != "fp32":
            said += f", {statistics.mean(losses) / statistics.mean(base) - 1:+.2%} of fp32's"
            if seeds > 1:
                said += f" (standard error {statistics.stdev(relative) / seeds**0.5:.2%})"
            said += f"; by seed {', '.join(f'{each:+.2%}' for each in relative)}"
        print(said)
    lines = [
        Series(format, [*curves[0]], [statistics.mean(losses[step] for losses in curves) for step in curves[0]])
        for format, curves in runs.items()
    ]
    (out / "curves.png").write_bytes(loss_curves(lines, f"validation loss, mean of {seeds} seeds"))


if __name__ == "__main__":
    typer.run(main)
