"""Count the source files that three short trips execute, and how deeply they call each other.

``python -m scripts.trips`` prints, for each trip, the files of longshore that ran, and the deepest stack: a layer is a
change from one file to another on the way down, so that a call within a file adds none.

- ``repeated step``: one ``step()`` of ``longshore.AdamW`` in its default mode, for CPU parameters, with nothing new.
- ``copied step``: the same where gradients and parameters are copied, as they are with CUDA: simulated transfers stand
  in for a device.
- ``gradient``: at stage 2 with cpu offload, on two ranks over gloo, from ``backward()``, where autograd calls the
  hooks, to the return of ``engine.step()``, when the parameters are published. They are copied, too. Rank 0 is counted.

Each is the third of their kind, when nothing is set up any more. All threads that Python started are counted.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import multiprocessing

import longshore

SOURCE = f"{Path(longshore.__file__).parent}{os.sep}"
_BESIDE = f"{SOURCE}{os.path.join('ranks', 'presence.py')}"
"""The file of a thread that looks now and then whether the other ranks are there: it runs beside a trip, or not."""
_STEPS = 3


class Trip(NamedTuple):
    """What ran: calls by file, and the deepest stack as (file, function), outermost first."""

    calls: dict[str, int]
    deepest: list[tuple[str, str]]


class Counting:
    """Counts calls into longshore on this thread, and on all threads that are started after it is made."""

    def __init__(self) -> None:
        self._on = False
        self._calls: Counter[str] = Counter()
        self._deepest: list[tuple[str, str]] = []
        threading.setprofile(self._called)

    def run(self, trip: Callable[[], Any]) -> Trip:
        self._calls.clear()
        self._deepest = []
        self._on = True
        sys.setprofile(self._called)
        try:
            trip()
        finally:
            sys.setprofile(None)
            self._on = False
        return Trip(dict(self._calls), self._deepest)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        stack: list[tuple[str, str]] = []
        caller: FrameType | None = frame
        while caller is not None:
            file = caller.f_code.co_filename
            if file.startswith(SOURCE) and (not stack or stack[-1][0] != file):
                stack.append((file, caller.f_code.co_name))
            caller = caller.f_back
        if stack[-1][0] == _BESIDE:
            return
        self._calls[frame.f_code.co_filename] += 1
        if len(stack) > len(self._deepest):
            self._deepest = stack[::-1]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()


def _batch() -> torch.Tensor:
    return torch.ones(2, 8, dtype=torch.bfloat16)


def _copied(seed: int = 0) -> longshore.Offload:
    return longshore.Offload(transfer=longshore.SimulatedTransfer(seed=seed, max_delay_s=0.0))


def optimizer_step(offload: longshore.Offload | None = None) -> Trip:
    """The trip of one ``step()`` of ``longshore.AdamW`` in its default mode."""
    counting, model = Counting(), _model()
    optimizer = longshore.AdamW(model.parameters(), offload=offload)
    trip = None
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(_batch()).sum().backward()
        trip = counting.run(optimizer.step)
    assert trip is not None
    optimizer.close()
    return trip


def stage_2_gradient() -> Trip:
    """The trip of a gradient at stage 2 with cpu offload, on rank 0 of two."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    port = _free_port()
    ranks = [context.Process(target=_rank, args=(rank, theirs, port), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    theirs.close()  # so that the end of the ranks is the end of the pipe
    try:
        trip = mine.recv() if mine.poll(timeout=300) else None
    except EOFError:
        trip = None
    for each in ranks:
        each.join(timeout=60)
    if trip is None:
        raise RuntimeError("the ranks did not report")
    return trip


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def _rank(rank: int, pipe: Connection, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    counting = Counting()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = longshore.initialize(model=_model(), config=config, offload=_copied(rank), device="cpu")

    trip = None
    for _ in range(_STEPS):
        loss = engine(_batch()).sum()

        def backward_and_step(loss: torch.Tensor = loss) -> None:
            engine.backward(loss)
            engine.step()

        trip = counting.run(backward_and_step)
    if rank == 0:
        pipe.send(trip)
    engine.destroy()


TRIPS: dict[str, Callable[[], Trip]] = {
    "repeated step": optimizer_step,
    "copied step": lambda: optimizer_step(_copied()),
    "gradient": stage_2_gradient,
}


def _print(name: str, trip: Trip, with_files: bool) -> None:
    print(f"{name}: {len(trip.calls)} files, {len(trip.deepest)} layers")
    if with_files:
        for file, calls in sorted(trip.calls.items()):
            print(f"  {calls:6} {file.removeprefix(SOURCE)}")
    for file, function in trip.deepest:
        print(f"    {file.removeprefix(SOURCE)}: {function}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files, with the number of calls into each")
    arguments = parser.parse_args()
    for name, trip in TRIPS.items():
        _print(name, trip(), arguments.files)


if __name__ == "__main__":
    main()
