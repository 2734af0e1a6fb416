"""Ranks of which one stops, as others see it also where the network to it is cut, while they wait for it."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine.failure_cases import backward, make_engine, raised_by

import longshore
from longshore.checkpoint import one_line
from longshore.checkpoint.rank_group import RankGroup
from longshore.cli.group import RunGroup
from longshore.engine.ranks import join
from longshore.ranks import presence
from longshore.ranks.data_plane import DataPlane
from ranks.gathering_cases import sharing


def last_stops(where: str, stage: int, silent_s: float, folder: str) -> None:
    """The last rank stops, and never goes on. The others write what they are told, and after how long."""
    former, presence._SILENT_S = presence._SILENT_S, silent_s or presence._SILENT_S
    try:
        with sharing("sockets"):
            _last_stops(where, stage, Path(folder))
    finally:
        presence._SILENT_S = former


def _last_stops(where: str, stage: int, folder: Path) -> None:
    rank = dist.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if where == "before a first save":
        model = torch.nn.Linear(2, 2)
        optimizer = longshore.AdamW(model.parameters(), lr=0.1)
        dist.barrier()
        _wait(lambda: longshore.save(folder / "saved", model, optimizer), where, folder)
        return
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

    _wait(do, where, folder)


def _wait(do: Callable[[], object], where: str, folder: Path) -> None:
    """Stop on the last rank; on the others write what ``do`` says."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
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


def end(rank: int, port: int, late_s: float, how: str, words: str) -> None:
    """A whole program; the ranks but the first come to its end later."""
    os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT), 2)
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**named, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"})
    if how == "ours":
        ranks = join("gloo", "cpu")
    else:
        dist.init_process_group("gloo")
        ranks = None
    longshore.AdamW(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    dist.barrier()
    if rank > 0:
        time.sleep(late_s)
    if ranks is not None:
        ranks.close()
    elif how == "destroyed":
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # which multiprocessing leaves out
    # As long as Python and torch need to end, in which threads go on.
    time.sleep(0.3)
