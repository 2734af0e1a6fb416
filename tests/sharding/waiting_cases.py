"""Ranks of which one stops, as others see it also where the network to it is cut, while they wait for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from engine.failure_cases import backward, make_engine, raised_by

from longshore.checkpoint import one_line
from longshore.checkpoint.rank_group import RankGroup
from longshore.cli.group import RunGroup
from longshore.sharding import presence
from longshore.sharding.data_plane import DataPlane
from sharding.gathering_cases import sharing


def last_stops(where: str, stage: int, silent_s: float, folder: str) -> None:
    """The last rank stops, and never goes on. The others write what they are told, and after how long."""
    former, presence._SILENT_S = presence._SILENT_S, silent_s or presence._SILENT_S
    try:
        with sharing("sockets"):
            _last_stops(where, stage, Path(folder))
    finally:
        presence._SILENT_S = former


def _last_stops(where: str, stage: int, folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    engine = make_engine(stage)

    def train(step: int) -> None:
        backward(engine, step, rank)
        engine.step()

    train(0)
    run = RunGroup(joins=True) if where == "a run's sums" else None

    def do() -> None:
        if where == "saving":
            engine.save_checkpoint(str(folder / "saved"))
        elif where == "one line":
            one_line.save(folder / "saved", engine.module)
        elif run is not None:
            run.sums([1.0])
            run.together(lambda: None)
        elif where == "a new engine":
            make_engine(stage)
        else:
            train(1)

    if rank == world_size - 1:
        _stop_in(where)
    start = time.monotonic()
    said = raised_by(do)
    (folder / f"told{rank}").write_text(f"{said}\n{time.monotonic() - start}")
    while not all((folder / f"told{other}").exists() for other in range(world_size - 1)):
        time.sleep(0.05)
    if rank == 0:
        os.kill(int((folder / f"pid{world_size - 1}").read_text()), signal.SIGKILL)


def _stop_in(where: str) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)

    if where == "exchange":
        DataPlane.exchange = stop  # pyright: ignore[reportAttributeAccessIssue]
    elif where == "gather":
        DataPlane.complete = stop  # pyright: ignore[reportAttributeAccessIssue]
    elif where == "saving":
        gather: Callable[..., Any] = RankGroup.gather
        calls = iter(range(3))
        RankGroup.gather = lambda *each: stop() if next(calls) == 2 else gather(*each)  # pyright: ignore
    else:
        stop()
