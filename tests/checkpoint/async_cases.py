"""Training while a checkpoint is written, on every rank."""

from __future__ import annotations

import errno
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import longshore
from checkpoint.resume_cases import Setting, engine_of, make_engine, state_of, train
from longshore.checkpoint import saving
from longshore.checkpoint.files import TensorFile
from longshore.errors import CheckpointError
from longshore.tiles import MASTER
from longshore.tiles.memory import PendingReads
from longshore.tiles.states import StateSnapshot

PLENTY = 1 << 30


class Writer(NamedTuple):
    """What a test knows of the thread that writes, and says to it."""

    go_on: threading.Event
    """It waits for this before it reads its first buffer."""
    waits: list[int]
    """One entry for each time that training waited for it."""


@contextmanager
def slow_writer(memory_bytes: int = PLENTY) -> Iterator[Writer]:
    """It reads nothing before it is told to, or training waits for it."""
    writer = Writer(threading.Event(), [])
    read, wait = StateSnapshot.read_range, PendingReads.wait_for

    def reading(snapshot: StateSnapshot, key: int, which: str) -> Tensor:
        assert writer.go_on.wait(60)
        return read(snapshot, key, which)

    def waiting(pending_reads: PendingReads, released: int) -> None:
        writer.waits.append(released)
        writer.go_on.set()
        wait(pending_reads, released)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateSnapshot, "read_range", reading)
        patch.setattr(PendingReads, "wait_for", waiting)
        patch.setattr(saving, "memory_for_speculation", lambda: memory_bytes)
        try:
            yield writer
        finally:
            writer.go_on.set()


@contextmanager
def interrupted_soon() -> Iterator[None]:
    """As Ctrl-C does: the main thread gets it, whatever it waits for, also where it began with signals ignored."""
    main = threading.main_thread().ident
    assert main is not None
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, former)


def undisturbed(setting: Setting, steps: int) -> dict[str, Any]:
    with engine_of(setting) as engine:
        torch.manual_seed(100)
        train(engine, steps)
        return state_of(engine)


def buffers_of(engine: Any) -> int:
    counted = [tier.state_bytes() for tier in engine.optimizer._core.members.store.tiles.tiers]
    return sum(each["state"] + each["spares"] for each in counted)


def train_while_writing(setting: Setting, folder: str, memory_bytes: int) -> dict[str, Any]:
    """Three steps, a checkpoint, two steps while it waits to be written, and two more."""
    with engine_of(setting) as engine, slow_writer(memory_bytes) as writer:
        torch.manual_seed(100)
        train(engine, 3)
        before = buffers_of(engine)
        engine.save_checkpoint(folder, async_save=True)
        saved = state_of(engine)
        train(engine, 1)
        during = buffers_of(engine)
        train(engine, 1)
        writer.go_on.set()
        engine.wait_for_checkpoint()
        train(engine, 1)
        after = buffers_of(engine)
        train(engine, 1)
        buffers = {"before": before, "during": during, "after": after}
        return {"saved": saved, "end": state_of(engine), "state": buffers, "waits": list(writer.waits)}


def write_state_while_writing(setting: Setting, folder: str) -> dict[str, Any]:
    """All that writes to buffers without a step, and an optimizer that gets further arrays."""
    with engine_of(setting) as engine, slow_writer() as writer:
        train(engine, 3)
        state = engine.optimizer.state_dict()
        engine.save_checkpoint(folder, async_save=True)
        saved = state_of(engine)
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                engine.optimizer.state[parameter][MASTER] = torch.full(parameter.shape, 7.0)
                with torch.no_grad():
                    parameter.add_(1.0)
        train(engine, 1)
        engine.optimizer.load_state_dict(state)
        for group in engine.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = 0.9  # one more array in every buffer
        train(engine, 1)
        writer.go_on.set()
        engine.wait_for_checkpoint()
        return saved


def fail_to_write(setting: Setting, folder: str, next_call: str) -> dict[str, Any]:
    """The disk is full, on rank 0 alone. Returns the state at the end."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    write = TensorFile.write

    def failing(file: TensorFile, tensor: Tensor) -> None:
        if rank == 0 and file.path.name.startswith("optimizer"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, tensor)

    with pytest.MonkeyPatch.context() as patch, engine_of(setting) as engine:
        torch.manual_seed(100)
        train(engine, 2)
        engine.save_checkpoint(folder)
        patch.setattr(TensorFile, "write", failing)
        engine.save_checkpoint(folder, "lost", async_save=True)
        train(engine, 2)
        state = state_of(engine)
        calls = {
            "save": lambda: engine.save_checkpoint(folder, "next"),
            "load": lambda: engine.load_checkpoint(folder),
            "wait": engine.wait_for_checkpoint,
            "destroy": engine.destroy,
        }
        with pytest.raises(CheckpointError, match=r"lost could not be written.*No space left on device"):
            calls[next_call]()
        patch.undo()
        engine.wait_for_checkpoint()  # it is said once
        if next_call != "destroy":
            assert engine.save_checkpoint(folder, "next", async_save=True).name == "next"
            engine.wait_for_checkpoint()
        return state


def save_under_other_filters(folder: str) -> None:
    """Python's filters of warnings belong to all threads."""
    with engine_of(Setting(2)) as engine, slow_writer() as writer:
        train(engine, 1)
        before = list(warnings.filters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.save_checkpoint(folder, async_save=True)
            time.sleep(0.2)  # the writer is at its first buffer
        writer.go_on.set()
        engine.wait_for_checkpoint()
        assert list(warnings.filters) == before


def interrupted_destroy(folder: str) -> None:
    engine = make_engine(Setting(2))
    with slow_writer() as writer:
        train(engine, 1)
        engine.save_checkpoint(folder, async_save=True)
        with interrupted_soon():
            engine.destroy()
        writer.go_on.set()
        for number in range(50):
            total = torch.full((1,), float(number))
            dist.all_reduce(total)
            assert total.item() == 2 * number
        assert engine._checkpoints._background._done.wait(20)
    dist.barrier()


def destroy_at_once(rank: int, store: str, folder: str) -> None:
    """Save, and leave the process group before anything is written, as the last lines of a program."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    optimizer = longshore.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with slow_writer() as writer:
        longshore.save(folder, model, optimizer, async_save=True)
        dist.destroy_process_group()
        writer.go_on.set()
        longshore.wait_for_checkpoint()
