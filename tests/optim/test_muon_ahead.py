"""Muon stepped ahead of the verdict, up to what Newton-Schulz takes: no bit changes, whatever the verdict is."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_muon import backward, build, groups_of
from support import same_weights

import longshore
from longshore.errors import BrokenStateError, HostMemoryError
from longshore.kernels import HostKernels
from longshore.optim.rules import muon
from longshore.tiles import SpeculationRecord

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")

TRANSFERS: dict[str, Callable[[], longshore.SimulatedTransfer | None]] = {
    "direct": lambda: None,
    "simulated": lambda: longshore.SimulatedTransfer(seed=0),
}


class Pair:
    """The same training twice: with and without stepping ahead."""

    def __init__(
        self,
        transfer: str = "direct",
        memory: int | str = "100%",
        dtype: torch.dtype = torch.float32,
        tile_numel: int = 300,
        first: int = 0,
    ) -> None:
        """``first``: the group whose matrices are transformed first."""
        self.models = (build(dtype), build(dtype))
        self.waits, self.ahead = (
            longshore.Muon(
                [*groups_of(model)[first:], *groups_of(model)[:first]],
                lr=0.02,
                release_gradients=True,
                offload=longshore.Offload(
                    tile_numel=tile_numel, transfer=TRANSFERS[transfer](), speculation_memory=share
                ),
            )
            for model, share in zip(self.models, (0, memory), strict=True)
        )
        self.steps = itertools.count()
        self.tiles = self.ahead._core.members.store.tiles.tiles

    def backward(self) -> None:
        step = next(self.steps)
        for model in self.models:
            backward(model, step)

    def step(self, clip: float | None = None) -> SpeculationRecord:
        """Step both, and return the record of all tiles: of matrices, and of AdamW's groups."""
        for optimizer in (self.waits, self.ahead):
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
        self.check()
        record = self.ahead.speculation
        assert record is not None
        return record

    def check(self) -> None:
        assert same_weights(*self.models)
        for one, other in zip(*(model.parameters() for model in self.models), strict=True):
            mine, its = self.waits.state[one], self.ahead.state[other]
            assert list(mine) == list(its)
            assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(its[name])) for name in mine)

    def train(self, windows: int, backwards: int = 1, clip: float | None = None) -> SpeculationRecord:
        for _ in range(windows):
            for _ in range(backwards):
                self.backward()
            record = self.step(clip)
        return record


@pytest.fixture
def pair() -> Pair:
    """After two windows: the next one is stepped ahead."""
    made = Pair()
    assert made.train(2).kept == len(made.tiles) > 5
    return made


@pytest.mark.quick(0)
@pytest.mark.parametrize("tile_numel", [300, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_parity(transfer: str, dtype: torch.dtype, tile_numel: int) -> None:
    """Of matrices in one tile and in several."""
    pair = Pair(transfer, dtype=dtype, tile_numel=tile_numel)
    records = [pair.train(1, backwards, clip) for backwards in (1, 2) for clip in (None, 1e9, 1e-3, 1e9)]
    tiles = len(pair.tiles)
    assert [record.begun for record in records] == [0, tiles, tiles, tiles, tiles, tiles, tiles, tiles]
    assert [record.kept for record in records] == [0, tiles, 0, tiles, 0, tiles, 0, tiles]
    assert [record.redone for record in records] == [0, 0, tiles, 0, 0, 0, tiles, 0]
    assert records[4].dropped == tiles, "one more backward came"


def test_with_part_of_the_memory() -> None:
    """Of one matrix some tiles are stepped ahead and some are not; and all spares together stay within the limit."""
    whole = Pair()
    whole.train(2)
    most = whole.ahead.host_bytes()["spares"]
    pair = Pair(memory=most // 2)
    record = pair.train(4)
    assert 0 < record.kept < len(pair.tiles) and record.waited > 0
    assert most // 3 < pair.ahead.host_bytes()["spares"] <= most // 2


def test_the_record_is_of_all_tiles(pair: Pair) -> None:
    """Of matrices, and of AdamW's groups."""
    pair.train(1)
    record = pair.ahead.speculation
    assert record is not None
    assert record.kept == record.begun == record.spares == len(pair.ahead._core.members.store.tiles)


def test_a_schedule_of_learning_rates_keeps_what_was_made(pair: Pair) -> None:
    """Only the last pass, after the verdict, reads the learning rate."""
    for rate in (0.01, 0.03):
        pair.backward()
        for optimizer in (pair.waits, pair.ahead):
            optimizer.param_groups[0]["lr"] = rate
        assert pair.step().kept == len(pair.tiles)


def test_a_momentum_that_changes_is_redone(pair: Pair) -> None:
    pair.backward()
    for optimizer in (pair.waits, pair.ahead):
        optimizer.param_groups[0]["momentum"] = 0.5
    record = pair.step()
    assert record.redone > 0 and record.redone + record.kept == len(pair.tiles)


@pytest.mark.parametrize("write", ["data", "load", "state"])
def test_what_is_written_between_backward_and_step_counts(pair: Pair, write: str) -> None:
    pair.backward()
    for model, optimizer in zip(pair.models, (pair.waits, pair.ahead), strict=True):
        if write == "data":
            model.tall.weight.data = torch.full_like(model.tall.weight, 0.25)
        elif write == "load":
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        else:
            optimizer.state[model.tall.weight]["momentum_buffer"] = torch.full_like(model.tall.weight, 0.5)
    assert pair.step().begun == len(pair.tiles)
    pair.train(2)


def test_discarded_windows_leave_every_bit(pair: Pair) -> None:
    for _ in range(3):
        pair.backward()
        for optimizer in (pair.waits, pair.ahead):
            optimizer.zero_grad()
        pair.check()
    assert pair.train(1).kept == len(pair.tiles)


def test_idle_matrices_keep_everything(pair: Pair) -> None:
    for idle in (("experts", "tall.weight"), (), ("qkv.weight",), ()):
        for model in pair.models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in idle)
        pair.train(1)


def test_a_snapshot_is_of_its_moment(pair: Pair) -> None:
    """Buffers that it has still to read are not written, and steps ahead go on."""
    reads = [(index, "momentum_buffer") for index in pair.ahead._core.members.store.tiles.tier.ranges]
    before = {index: pair.ahead._core.members.store.states.ranges.read(index, which) for index, which in reads}
    snapshot = pair.ahead._core.members.store.states.ranges.snapshot(reads, 1 << 30)
    pair.train(2)
    assert all(torch.equal(snapshot.read_range(index, which), before[index]) for index, which in reads)
    snapshot.close()
    assert pair.train(2).kept == len(pair.tiles)


@pytest.mark.quick(0)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("failing_call", "first"), [(0, 0), (1, 0), (3, 0), (1, 1), (2, 4)])
def test_a_transformation_that_fails_before_anything_was_written(
    failing_call: int, first: int, again: bool, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window can be trained again; or stepped once more, though transformations wrote what had been made ahead:
    those of a parameter with several matrices do."""
    pair = Pair(transfer, tile_numel=1 << 20, first=first)
    pair.train(2)
    before = {name: value.clone() for name, value in pair.models[1].named_parameters()}
    step = next(pair.steps)
    backward(pair.models[1], step)
    calls, whole = itertools.count(), muon.newton_schulz

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) == failing_call:
            raise RuntimeError("no more")
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(muon, "newton_schulz", failing)
        with pytest.raises(RuntimeError, match="no more"):
            pair.ahead.step()
    if any(not torch.equal(value, before[name]) for name, value in pair.models[1].named_parameters()):
        with pytest.raises(BrokenStateError):
            pair.ahead.step()
        return
    if again:
        backward(pair.models[0], step)
        pair.step()
    else:
        pair.ahead.zero_grad()
        pair.steps = itertools.count(step)
    pair.train(2)


@pytest.mark.parametrize("failing_pass", [0, 1, 5])
def test_a_last_pass_that_fails_breaks_the_state(
    pair: Pair, failing_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have written some parameters."""
    whole, passes = HostKernels.step_tile, itertools.count()
    pair.backward()
    pair.ahead._core.members.store.tiles.settle()  # what goes ahead has been made

    def failing(self: HostKernels, *arguments: Any) -> None:
        whole(self, *arguments)
        if next(passes) == failing_pass:
            raise RuntimeError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(HostKernels, "step_tile", failing)
        with pytest.raises(RuntimeError, match="no more"):
            pair.ahead.step()
    with pytest.raises(BrokenStateError, match="no more"):
        pair.ahead.step()


def test_a_broken_optimizer_is_garbage_once_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its memory, though it knows the error, whose traceback knows it."""
    pair = Pair()
    pair.train(1)
    dropped = weakref.ref(pair.ahead)
    pair.backward()
    with monkeypatch.context() as patched:
        patched.setattr(HostKernels, "step_tile", _fail)
        with contextlib.suppress(RuntimeError):
            pair.ahead.step()
    with pytest.raises(BrokenStateError, match="no more"):
        pair.ahead.step()
    del pair
    gc.collect()
    assert dropped() is None


def _fail(*_: object) -> None:
    raise RuntimeError("no more")


# -- parameters that come later -----------------------------------------------


class Grown:
    """Square layers: some are matrices, and some come after the first windows."""

    def __init__(self, memory: int | str, *first: bool) -> None:
        torch.manual_seed(0)
        self.layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(8)]
        self.optimizer = longshore.Muon(
            [self.group(number, use_muon) for number, use_muon in enumerate(first)],
            lr=0.02,
            release_gradients=True,
            offload=longshore.Offload(tile_numel=1024, speculation_memory=memory),
        )
        self.store = self.optimizer._core.members.store.tiles

    def group(self, number: int, use_muon: bool) -> dict[str, Any]:
        """Four of the layers."""
        members = [layer.weight for layer in self.layers[4 * number : 4 * number + 4]]
        return {"params": members, "use_muon": use_muon} | ({} if use_muon else {"lr": 1e-3})

    def step(self, layers: slice = slice(None)) -> None:
        torch.nn.Sequential(*self.layers[layers])(torch.randn(3, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def spares(self) -> int:
        spares = self.optimizer.host_bytes()["spares"]
        speculator = self.store.tier.speculator
        buffers = sum(count * kind.buffer.num_bytes for kind, count in speculator._reserved.items())
        assert speculator.spares is not None and speculator.spares.allocated_bytes == buffers, "held, and not counted"
        return spares


LIMIT = 120_000


@pytest.mark.parametrize("first", [True, False], ids=["matrices first", "others first"])
@pytest.mark.parametrize("way", ["added", "used"])
def test_spares_for_what_comes_later_stay_within_the_limit(first: bool, way: str) -> None:
    grown = Grown(LIMIT, *([first] if way == "added" else [first, not first]))
    for _ in range(3):
        grown.step(slice(4))
    before = grown.spares
    if way == "added":
        grown.optimizer.add_param_group(grown.group(1, not first))
    for _ in range(3):
        grown.step()
    assert LIMIT // 2 < before <= grown.spares <= LIMIT


@pytest.mark.parametrize("between", [True, False], ids=["after a step", "at once"])
def test_a_snapshot_outlives_the_naming_of_other_states(between: bool) -> None:
    """Spares of matrices stay when AdamW's states are named: no step waits for the reader, and no buffer is lost."""
    grown = Grown("100%", True)
    for _ in range(3):
        grown.step(slice(4))
    reads = [
        (record.index, which)
        for record in grown.optimizer._core.members.records
        for which in ("master", "momentum_buffer")
    ]
    snapshot = grown.optimizer._core.members.store.states.ranges.snapshot(reads, 1 << 30)
    closing = threading.Timer(30, snapshot.close)
    closing.start()
    if between:
        grown.step(slice(4))
    grown.optimizer.add_param_group(grown.group(1, False))
    grown.step()
    assert closing.is_alive(), "a step waited for the reader"
    closing.cancel()
    snapshot.close()
    for _ in range(4):
        grown.step()
    assert grown.spares == len(grown.store.tiles) // 2 * (1024 * (8 + 4 + 12 + 4))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, HostMemoryError])
def test_without_memory_for_matrices_nothing_is_stepped(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the part of the others that stays on the device."""
    model = build(torch.bfloat16)
    offload = longshore.Offload(tile_numel=100, ratio=0.3, transfer=longshore.SimulatedTransfer(seed=0))
    optimizer = longshore.Muon(groups_of(model), lr=0.02, offload=offload)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def fail(*_: Any) -> None:
        raise error("no memory")

    owner = "matrix_exchange.reserve" if error is torch.OutOfMemoryError else "matrix_exchange.MatrixMemory.reserve"
    with monkeypatch.context() as patched:
        patched.setattr(f"longshore.tiles.{owner}", fail)
        with pytest.raises(error, match="no memory"):
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
