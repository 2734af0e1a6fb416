"""Runs that are interrupted and go on, on every rank."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from engine.fully_sharded_cases import WORDS, Block, Tower
from support import whole
from torch import Tensor, nn

import longshore
from longshore import utils
from longshore.checkpoint import model_state
from longshore.checkpoint.boxes import BoxReader
from longshore.engine.config import AdamWConfig
from longshore.errors import BrokenStateError, CheckpointError, LongshoreError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Setting(NamedTuple):
    """Of an engine; what a resumed run may have otherwise."""

    stage: int = 2
    place: str = "cpu"
    tile_numel: int = 40
    dtype: str = "bf16"
    ahead: bool = False
    optimizer: str = "AdamW"
    accumulation: int = 1
    states: str = "fp32"
    states_seed: int = 0


class Dropping(Tower):
    """A tower with what a checkpoint must not forget: dropout, a buffer that changes, frozen weights; and in a ``wide``
    one, a matrix whose states may have 8 bits."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.frozen = nn.Linear(5, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.wide = nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 64), nn.Linear(64, 5)) if wide else None

    def forward(self, words: Tensor, extra: bool = False, **_: Any) -> Any:
        self.calls += 1
        hidden = nn.functional.dropout(self.frozen(self.embedding(words)), 0.2)
        if self.wide is not None:
            hidden = hidden + self.wide(hidden)
        return super().forward(words, extra, hidden=hidden)


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_engine(setting: Setting, seed: int = 0, wide: bool = False) -> Any:
    torch.manual_seed(seed)
    model = Dropping(wide or setting.states != "fp32").to(DTYPES[setting.dtype])
    staged = setting.place in ("simulated", "split")
    heads = [*model.extra.parameters()]
    trunk = [p for p in model.parameters() if p.requires_grad and not any(p is head for head in heads)]
    options: dict[str, Any] = {"lr": 2e-3} | ({"weight_decay": 0.05} if setting.optimizer == "AdamW" else {})
    if setting.optimizer == "SGD" and setting.states != "fp32":
        options["momentum"] = 0.9  # without it there is nothing to encode
    ours = hasattr(longshore, setting.optimizer)
    settings: Any = {"type": setting.optimizer, **options} if ours else None
    config = longshore.Config(
        stage=setting.stage,
        offload_device="none" if setting.place == "none" else "cpu",
        optimizer=settings,
        reduce_bucket_numel=150,
        allgather_bucket_numel=150,
        gradient_clipping=0.5,
        gradient_accumulation_steps=setting.accumulation,
        micro_batch_size=2,
    )
    offload = longshore.Offload(
        setting.tile_numel,
        threads=1,
        transfer=longshore.SimulatedTransfer(3, 0.0005) if staged else None,
        device=config.offload_device,
        speculation_memory="100%" if setting.ahead else 0,
        ratio=0.2 if setting.place == "split" else 1.0,
        states=setting.states,
        states_seed=setting.states_seed,
    )
    blocks = (lambda _, module: isinstance(module, Block)) if setting.stage == 3 else None
    with warnings.catch_warnings():
        if setting.place == "split" and model.wide is not None:  # of which nothing fits the device's share
            warnings.filterwarnings("ignore", "ratio=")
        return longshore.initialize(
            model=model,
            optimizer=None if ours else lambda groups: getattr(torch.optim, setting.optimizer)(groups, **options),
            model_parameters=[{"params": trunk}, {"params": heads, "lr": 5e-3}],
            config=config,
            offload=offload,
            wrap_policy=blocks,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
            training_data=torch.arange(60).view(20, 3) % WORDS,
        ).engine


@contextmanager
def engine_of(setting: Setting, seed: int = 0, wide: bool = False) -> Iterator[Any]:
    engine = make_engine(setting, seed, wide)
    try:
        yield engine
    finally:
        engine.destroy()


def batches_of(engine: Any) -> Iterator[Tensor]:
    while True:
        yield from engine.training_dataloader
        engine.training_dataloader.set_epoch(engine.training_dataloader.epoch + 1)


def train(engine: Any, steps: int) -> None:
    """The extra head is idle in its first steps, so that it has fewer of them."""
    if not hasattr(engine, "batches"):
        engine.batches = batches_of(engine)
    batches = engine.batches
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(next(batches), extra=engine.global_steps % 3 == 2))
        engine.step()


def state_of(engine: Any) -> dict[str, Any]:
    """All that a run depends on, whole."""
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = whole(parameter).detach().clone()
        if parameter.requires_grad:
            found[f"{name} in full"] = utils.safe_get_full_fp32_param(parameter)
            state = engine.optimizer.state[parameter]
            for key in sorted(state):
                found[f"{name} {key}"] = whole(state[key]).clone()
    found["calls"] = engine.module.calls.clone()
    found["lr"] = torch.tensor(engine.get_lr())
    found["norm"] = torch.tensor(engine.get_global_grad_norm() or 0.0)
    found["steps"] = torch.tensor([engine.global_steps, engine.micro_steps, engine.skipped_steps])
    return found


def check_same(found: dict[str, Any], expected: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value is None or key in but:
            assert key in but or found[key] is None, key
        else:
            assert torch.equal(found[key], value), key


def save_and_go_on(setting: Setting, folder: str, steps: int, more: int) -> dict[str, Any]:
    """Returns the state when it was saved, and at the end."""
    with engine_of(setting) as engine:
        torch.manual_seed(100 + _rank()[0])
        train(engine, steps)
        engine.save_checkpoint(folder, client_state={"epoch": 7, "best": torch.tensor([0.5])})
        saved = state_of(engine)
        train(engine, more)
        return {"saved": saved, "end": state_of(engine)}


def load_and_go_on(setting: Setting, folder: str, more: int) -> dict[str, Any]:
    """In an engine of other weights, with other random numbers."""
    with engine_of(setting, seed=1) as engine:
        train(engine, 1)
        path, client = engine.load_checkpoint(folder)
        del engine.batches
        assert path is not None
        assert client["epoch"] == 7
        assert torch.equal(client["best"], torch.tensor([0.5]))
        loaded = state_of(engine)
        train(engine, more)
        return {"loaded": loaded, "end": state_of(engine)}


def save_whole(setting: Setting, folder: str) -> dict[str, Any]:
    with engine_of(setting) as engine:
        train(engine, 4)
        engine.save_checkpoint(folder)
        return state_of(engine)


def save_shared_out(setting: Setting, folder: str) -> dict[str, Any]:
    """As large tensors are: every rank writes a part of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_state, "_LEAST_NUMEL", 3)
        return save_whole(setting, folder)


def save_unlike_buffers(stage: int, folder: str) -> list[Tensor]:
    """Each rank has statistics of its own. Returns those that were loaded again."""
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
    engine = longshore.initialize(model=model, config=longshore.Config(stage=stage, optimizer=AdamWConfig())).engine
    for buffer in model.buffers():
        buffer.fill_(1 + _rank()[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_state, "_LEAST_NUMEL", 3)
        engine.save_checkpoint(folder, "shared-out")
    engine.save_checkpoint(folder, "one-each")
    found = []
    for tag in ("shared-out", "one-each"):
        for buffer in model.buffers():
            buffer.zero_()
        engine.load_checkpoint(folder, tag)
        found += [buffer.clone() for buffer in model.buffers()]
    engine.destroy()
    return found


def load_whole(setting: Setting, folder: str) -> dict[str, Any]:
    """In an engine of other weights, which has trained already."""
    with engine_of(setting, seed=1) as engine:
        train(engine, 1)
        with warnings.catch_warnings():
            # Another number of ranks, which may have other batches: a test of its own looks at that.
            warnings.filterwarnings("ignore", message=".*(was saved by|samples into its epoch|: backwards a step)")
            engine.load_checkpoint(folder)
        return state_of(engine)


def warned(setting: Setting, folder: str) -> list[str]:
    with engine_of(setting) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
        return [str(each.message) for each in caught]


def replaced_while_it_is_read(setting: Setting, folder: str) -> dict[str, Any]:
    """On rank 0 another one gets its name in between. Returns the state after it was loaded again."""
    with engine_of(setting, seed=1) as engine:
        train(engine, 5)
        engine.save_checkpoint(folder, "other")
        read, count = BoxReader._read, itertools.count()

        def reading(reader: BoxReader, *arguments: Any) -> Tensor:
            if _rank()[0] == 0 and next(count) == 20:
                Path(folder, "global_step4").rename(Path(folder, "kept"))
                Path(folder, "other").rename(Path(folder, "global_step4"))
            return read(reader, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoxReader, "_read", reading)
            with pytest.raises(CheckpointError, match="was replaced or removed by another process while it was read"):
                engine.load_checkpoint(folder, "global_step4")
        with pytest.raises(BrokenStateError, match="a checkpoint was loaded in part only"):
            engine.save_checkpoint(folder, "half")
        engine.load_checkpoint(folder, "kept")
        return state_of(engine)


def written_while_it_is_read(setting: Setting, folder: str, at: int, what: str) -> dict[str, Any]:
    """On rank 0, before box number ``at`` is read, the files of another checkpoint are copied over those that were
    verified: ``"in place"``, or with their ``"times"``. Or only links to them are made, which changes nothing.

    Returns the state after the first one was loaded again.
    """
    here, kept = Path(folder, "global_step4"), Path(folder, "kept")
    with engine_of(setting, seed=1) as engine:
        train(engine, 5)
        engine.save_checkpoint(folder, "other")
        if _rank()[0] == 0:
            shutil.copytree(here, kept)
        read, count = BoxReader._read, itertools.count()

        def reading(reader: BoxReader, *arguments: Any) -> Tensor:
            if _rank()[0] == 0 and next(count) == at:
                for file in sorted(here.glob("*.safetensors")):
                    theirs = Path(folder, "other", file.name)
                    if what == "links":
                        os.link(file, Path(folder, f"link-to-{file.name}"))
                    elif theirs.stat().st_size == file.stat().st_size:
                        times = file.stat()
                        with open(file, "r+b") as written:
                            written.write(theirs.read_bytes())
                        if what == "times":
                            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            return read(reader, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoxReader, "_read", reading)
            if what == "links":
                engine.load_checkpoint(folder, "global_step4")
                return state_of(engine)
            with pytest.raises(CheckpointError, match="while it was read, or its files were written: try again"):
                engine.load_checkpoint(folder, "global_step4")
        with pytest.raises(BrokenStateError, match="a checkpoint was loaded in part only"):
            engine.save_checkpoint(folder, "half")
        engine.load_checkpoint(folder, "kept")
        return state_of(engine)


def broken_on_one_rank(setting: Setting, folder: str) -> dict[str, Any]:
    """As after a Ctrl-C that only rank 0 got in the middle of a step. Returns the state after loading."""
    with engine_of(setting, seed=1) as engine:
        train(engine, 1)
        if _rank()[0] == 0:
            engine.optimizer._core.members.store.states.load_failed("only here")
        engine.load_checkpoint(folder)
        return state_of(engine)


def fail_half_way(setting: Setting, folder: str) -> dict[str, Any]:
    """The disk fails while states are read, on rank 0. Returns the state after all of it was loaded again."""
    with engine_of(setting, seed=1) as engine:
        train(engine, 1)
        read, count = BoxReader._read, itertools.count()

        def failing(reader: BoxReader, *arguments: Any) -> Tensor:
            if _rank()[0] == 0 and next(count) == 20:
                raise OSError(errno.EIO, "Input/output error")
            return read(reader, *arguments)

        BoxReader._read = failing
        try:
            with pytest.raises(CheckpointError, match=r"only partly; load again.*Input/output error"):
                engine.load_checkpoint(folder)
        finally:
            BoxReader._read = read
        with pytest.raises(BrokenStateError, match="a checkpoint was loaded in part only"):
            engine.save_checkpoint(folder, "half")
        with pytest.raises(LongshoreError, match="a checkpoint was loaded in part only"):
            train(engine, 1)  # a BrokenStateError: as it is from step, and inside a GradientError from backward
        engine.load_checkpoint(folder)
        return state_of(engine)
