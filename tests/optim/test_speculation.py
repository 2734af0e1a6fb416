"""Stepping ahead of the verdict changes no bit, whatever the verdict is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import longshore
from longshore.errors import BrokenStateError
from longshore.kernels import HostKernels
from longshore.tiles import GRADIENT
from longshore.tiles.speculation import Bet

TILE = 300
TRANSFERS: dict[str, Callable[[], longshore.SimulatedTransfer | None]] = {
    "direct": lambda: None,
    "simulated-0": lambda: longshore.SimulatedTransfer(seed=0),
    "simulated-1": lambda: longshore.SimulatedTransfer(seed=1),
}


class Heads(nn.Module):
    """A trunk and two heads, cut into tiles that hold parts of several parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(24, 9), nn.Linear(24, 7)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return (self.heads[head](self.trunk(x)) ** 2).mean()


class Pair:
    """The same training twice: with and without stepping ahead."""

    def __init__(
        self,
        transfer: Callable[[], Any] = TRANSFERS["direct"],
        memory: int | str = "100%",
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[..., Any] = longshore.AdamW,
        **options: Any,
    ) -> None:
        torch.manual_seed(7)
        model = Heads().to(dtype)
        self.models = (model, copy.deepcopy(model))
        self.dtype = dtype
        self.plain, self.ahead = (
            optimizer(
                model.parameters(),
                release_gradients=True,
                offload=longshore.Offload(tile_numel=TILE, transfer=transfer(), speculation_memory=share),
                **{"lr": 1e-2, **options},
            )
            for model, share in zip(self.models, (0, memory), strict=True)
        )

    @property
    def optimizers(self) -> tuple[Any, Any]:
        return self.plain, self.ahead

    def backward(self, head: int = 0) -> None:
        x = torch.randn(5, 16, dtype=self.dtype)
        for model in self.models:
            model(x, head).backward()

    def both(self, work: Callable[[Any, Any], Any]) -> list[Any]:
        return [work(model, optimizer) for model, optimizer in zip(self.models, self.optimizers, strict=True)]

    def step(self, clip: float | None = None) -> longshore.tiles.SpeculationRecord:
        if clip is not None:
            plain, ahead = (optimizer.clip_grad_norm_(clip) for optimizer in self.optimizers)
            assert torch.equal(plain, ahead)
        for optimizer in self.optimizers:
            optimizer.step()
        self.check()
        record = self.ahead.speculation
        assert record is not None
        return record

    def check(self) -> None:
        for a, b in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(a, b)
            mine, other = self.plain.state[a], self.ahead.state[b]
            assert mine.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(other[name])) for name in mine)

    def train(self, windows: int, backwards: int = 1, clip: float | None = None) -> longshore.tiles.SpeculationRecord:
        for _ in range(windows):
            for _ in range(backwards):
                self.backward()
            record = self.step(clip)
        return record


@pytest.fixture
def pair() -> Pair:
    """After two windows: the next one is stepped ahead."""
    made = Pair()
    assert made.train(2).kept == made.ahead.speculation.begun > 2
    return made


# -- the same bits ------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1e9, 1e-3])
def test_parity(transfer: str, backwards: int, dtype: torch.dtype, clip: float | None) -> None:
    pair = Pair(TRANSFERS[transfer], dtype=dtype)
    records = [pair.train(1, backwards, clip) for _ in range(9)]
    assert records[0].begun == 0, "nothing is known before the first step"
    if clip == 1e-3:
        assert records[1].redone == records[1].begun > 2
        assert records[-1].begun == 0, "where clipping always acts nothing is bet"
    else:
        assert all(record.kept == record.begun > 2 for record in records[1:])


@pytest.mark.quick(0)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_clipping_that_sometimes_acts(transfer: str) -> None:
    pair = Pair(TRANSFERS[transfer])
    pair.train(2)
    kept = redone = 0
    for window in range(12):
        pair.backward()
        record = pair.step(clip=1e-3 if window % 3 == 1 else 1e9)
        kept, redone = kept + record.kept, redone + record.redone
    assert kept > 10 and redone > 5


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (longshore.Adam, {"weight_decay": 0.1}),
        (longshore.Lion, {}),
        (longshore.Adagrad, {"initial_accumulator_value": 0.1}),
        (longshore.SGD, {"momentum": 0.9}),
        (longshore.SGD, {}),
    ],
)
def test_every_rule(optimizer: Callable[..., Any], options: dict[str, Any]) -> None:
    record = Pair(optimizer=optimizer, **options).train(5)
    assert record.kept == record.begun > 2


def test_heads_that_take_turns() -> None:
    pair = Pair()
    for window in range(8):
        pair.backward(head=window % 2)
        record = pair.step()
        assert window < 2 or record.kept > 1


def test_idle_parameters_of_a_tile_that_is_stepped_ahead() -> None:
    """Their masters and moments are on the spare buffer, too."""
    pair = Pair()
    for head in (0, 1):
        pair.backward(head)
    pair.step()
    for head in (0, 0, 0, 0, 1, 1, 1):
        pair.backward(head)
        record = pair.step()
    assert record.kept == record.begun > 2
    heads = {index for index, (name, _) in enumerate(pair.models[0].named_parameters()) if name.startswith("heads")}
    assert any(len(heads & tile.segments.keys()) > 2 for tile in pair.ahead._core.members.store.tiles), (
        "no tile holds both heads"
    )


# -- wrong bets ---------------------------------------------------------------


def test_one_more_backward_drops_what_it_touches(pair: Pair) -> None:
    pair.backward()
    pair.backward()
    record = pair.step()
    assert record.dropped == record.begun > 2 and record.kept == 0
    # From here on two are expected.
    record = pair.train(1, backwards=2)
    assert record.kept == record.begun > 2


def test_backwards_that_are_announced(pair: Pair) -> None:
    pair.ahead.expect_backwards(3)
    record = pair.train(1, backwards=3)
    assert record.kept == record.begun > 2
    pair.ahead.expect_backwards(1)
    record = pair.train(1)
    assert record.kept == record.begun > 2


@pytest.mark.parametrize("backwards", [0, -1, 1.5, "2", None, True])
def test_what_cannot_be_expected(pair: Pair, backwards: Any) -> None:
    with pytest.raises(ValueError, match=rf"number of backwards, at least 1, not {backwards!r}"):
        pair.ahead.expect_backwards(backwards)


def test_an_option_changed_between_backward_and_step(pair: Pair) -> None:
    pair.backward()
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 3e-2
    record = pair.step()
    assert record.redone == record.begun > 2


@pytest.mark.parametrize("write", ["data", "load", "refreshed", "state", "gradient"])
def test_what_a_pass_read_is_written_before_the_step(pair: Pair, write: str) -> None:
    pair.backward()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        weight = model.trunk[0].weight
        if write == "data":
            weight.data = torch.full_like(weight, 0.25)
        elif write == "load":
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        elif write == "refreshed":
            weight.data.numpy()[:] = 0.125
            optimizer.refresh_master()
        elif write == "gradient":
            optimizer._core.members.store.states.write(0, GRADIENT, torch.full((weight.numel(),), 0.5))
        else:
            optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 0.5)
    record = pair.step()
    assert record.dropped > 0
    assert (record.kept == 0) == (write == "load" or write == "refreshed")


def test_a_state_loaded_between_backward_and_step(pair: Pair) -> None:
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.train(2)
    pair.backward()
    for optimizer, state in zip(pair.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    assert pair.step().kept == 0
    assert pair.train(2).kept > 2


def test_one_gradient_is_taken_out(pair: Pair) -> None:
    pair.backward()
    for model in pair.models:
        model.trunk[2].bias.grad = None
    record = pair.step()
    assert record.dropped > 0 and record.kept > 0
    pair.train(2)


def test_one_gradient_is_replaced(pair: Pair) -> None:
    pair.backward()
    for model in pair.models:
        model.heads[0].weight.grad = torch.ones_like(model.heads[0].weight)
    assert pair.step().dropped > 0


def test_discarded_windows_leave_every_bit(pair: Pair) -> None:
    before = copy.deepcopy(pair.ahead.state_dict()["state"])
    spares = pair.ahead.host_bytes()["spares"]
    for _ in range(5):
        pair.backward()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
    after = pair.ahead.state_dict()["state"]
    assert all(torch.equal(before[index][name], after[index][name]) for index in before for name in before[index])
    assert pair.train(1).kept > 2
    assert pair.ahead.host_bytes()["spares"] == spares


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_discarded_window_says_nothing_of_the_next_one(pair: Pair, backwards: int) -> None:
    """Not that nothing will come, where a loop discards what it has just stepped; nor that fewer will."""
    pair.train(2, backwards=2)
    for _ in range(backwards):
        pair.backward()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    record = pair.train(1, backwards=2)
    assert record.kept == record.begun > 2


def test_spares_that_are_dropped_are_used_again(pair: Pair) -> None:
    pool = pair.ahead._core.members.store.tiles.tier.speculator.spares
    allocated = pool.allocated_bytes
    for _ in range(3):
        pair.backward()
        pair.ahead._core.members.store.tiles.settle()  # the passes have ended: the next gradient drops what they made
        pair.backward()
        assert pair.step().dropped > 2
        pair.train(1, backwards=2)
        pair.train(1)
    assert pool.allocated_bytes == allocated


def test_a_pass_that_fails_is_made_again_at_the_verdict(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, failures = HostKernels.step_tile, []

    def failing(self: HostKernels, source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        whole(self, source, target, *rest)
        if source.data_ptr() != target.data_ptr():
            failures.append(1)
            raise RuntimeError("the pass failed")

    monkeypatch.setattr(HostKernels, "step_tile", failing)
    record = pair.train(1)
    assert len(failures) == record.begun > 2 and record.kept == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("arrived", [0, 1])
def test_ctrl_c_while_passes_are_collected(
    pair: Pair, when: str, arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are collected once more, and no spare is given back twice."""
    whole, interrupts = Bet.end, []

    def interrupted(self: Bet, spares: Any) -> bool:
        ended = when == "after" and whole(self, spares)
        if not interrupts:
            interrupts.append(1)
            raise KeyboardInterrupt
        return ended or whole(self, spares)

    pair.backward()
    for _ in range(arrived):
        pair.backward()
    pool = pair.ahead._core.members.store.tiles.tier.speculator.spares
    with monkeypatch.context() as patched:
        patched.setattr(Bet, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.ahead.step()
    free = [buffer.data_ptr() for buffers in pool._free.values() for buffer in buffers]
    assert len(free) == len(set(free))
    pair.step()
    assert pair.train(2).kept > 2


@pytest.mark.parametrize("after", [0, 1, 2])
def test_passes_are_collected_once(pair: Pair, after: int) -> None:
    """Gradients are added to after they were looked at, several times: no spare is given back twice, none is lost."""
    pool = pair.ahead._core.members.store.tiles.tier.speculator.spares
    assert pool is not None
    pair.backward()
    for _ in range(after):
        pair.ahead.grad_norm()  # which waits for all passes
        pair.backward()
        pair.ahead.grad_norm()  # which waits for all passes
    free = [buffer.data_ptr() for buffers in pool._free.values() for buffer in buffers]
    assert len(free) == len(set(free))
    record = pair.step()
    assert record.dropped == (record.begun if after else 0)
    assert pair.train(3, clip=0.1).begun > 2


def test_a_failure_after_only_kept_tiles_breaks_the_store(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile was stepped ahead and kept, and then the bookkeeping fails: the step cannot be made again."""
    pair.backward()

    def fail() -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(pair.ahead._core.members.store.tiles.tier.sums, "trim", fail)
        patched.setattr("longshore.tiles.in_place.commit_tile", lambda *_: pytest.fail("a tile was stepped in place"))
        with pytest.raises(RuntimeError, match="no more"):
            pair.ahead.step()
    with pytest.raises(BrokenStateError, match="no more"):
        pair.ahead.step()


def test_the_norm_goes_ahead_of_passes_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run while other ranks' part of the norm is on its way."""
    pair = Pair()
    pair.train(3, clip=1e9)
    store = pair.ahead._core.members.store.tiles
    hold, known_squares = store.tier.speculator.pause, store.tier.speculator.known_squares
    gate, done, done_when_measured = threading.Event(), [], []

    def holding() -> None:
        hold()
        gate.set()

    def known(scale: Any) -> Any:
        done_when_measured.extend(done)
        return known_squares(scale)

    def told(name: str) -> Callable[..., Any]:
        whole = getattr(HostKernels, name)

        def call(self: HostKernels, *arguments: Any) -> Any:
            done.extend([name] if self is store.kernels else [])
            return whole(self, *arguments)

        return call

    store.tier.worker.submit(lambda: bool(gate.wait(20)), 0)
    pair.backward()
    for name in ("step_tile", "block_sums"):
        monkeypatch.setattr(HostKernels, name, told(name))
    monkeypatch.setattr(store.tier.speculator, "pause", holding)
    monkeypatch.setattr(store.tier.speculator, "known_squares", known)
    norm = pair.ahead.grad_norm()
    assert set(done_when_measured) == {"block_sums"}
    assert torch.equal(norm, pair.plain.grad_norm())
    record = pair.step()
    assert record.kept == record.begun > 2


def test_a_pass_that_is_put_off_for_good_is_stepped_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ctrl-C ends the wait for the worker before it has put the pass off."""
    pair = Pair()
    pair.train(3, clip=1e9)
    store, gate = pair.ahead._core.members.store.tiles, threading.Event()
    speculator = store.tier.speculator
    hold = speculator.pause

    def holding() -> None:
        hold()
        gate.set()

    store.tier.worker.submit(lambda: bool(gate.wait(20)), 0)
    pair.backward()
    monkeypatch.setattr(speculator, "pause", holding)
    monkeypatch.setattr(speculator, "resume", lambda: setattr(speculator, "_paused", False))
    record = pair.step(clip=1e9)
    assert record.begun > 2 and record.kept == 0


def test_a_pass_that_was_put_off_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile is stepped in place then."""
    pair = Pair()
    pair.train(3, clip=1e9)
    store, gate = pair.ahead._core.members.store.tiles, threading.Event()
    hold = store.tier.speculator.pause

    def holding() -> None:
        hold()
        gate.set()

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    store.tier.worker.submit(lambda: bool(gate.wait(20)), 0)
    pair.backward()
    monkeypatch.setattr(store.tier.speculator, "pause", holding)
    monkeypatch.setattr("longshore.tiles.speculation.Bet.run", fail)
    record = pair.step(clip=1e9)
    assert record.begun > 2 and record.kept == 0


@pytest.mark.parametrize("memory", ["100%", "40%"])
@pytest.mark.parametrize("clip", [1e9, 1e-3])
def test_the_norm_is_measured_in_backward(memory: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a spare, and where clipping always acts."""
    pair = Pair(memory=memory, dtype=torch.bfloat16)
    pair.train(6, clip=clip)
    pair.backward()
    pair.ahead._core.members.store.tiles.settle()
    measured: list[int] = []

    def counting(whole: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: HostKernels, parameters: Any, *rest: Any) -> Any:
            if self is pair.ahead._core.members.store.tiles.kernels:
                measured.append(sum(piece.numel() for pieces in parameters for piece in pieces))
            return whole(self, parameters, *rest)

        return count

    monkeypatch.setattr(HostKernels, "block_sums", counting(HostKernels.block_sums))
    norm = pair.ahead.grad_norm()
    assert measured == [0]
    assert torch.equal(norm, pair.plain.grad_norm())
    # One more backward makes all of it void.
    pair.backward()
    norm = pair.ahead.grad_norm()
    assert sum(measured) > 0
    assert torch.equal(norm, pair.plain.grad_norm())


def test_what_is_still_arriving_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is done with a parameter's first tile when the last gradient of its second one is counted, and not
    queued yet; and what would be measured after that fails."""
    pair = Pair()
    pair.train(3, backwards=2, clip=1e9)
    store = pair.ahead._core.members.store.tiles
    (_, _), (second, _) = store.tier.parts[0]
    pair.backward()
    store.settle()
    gate, late = threading.Event(), threading.Event()
    tier = store.tier
    queue, sums = tier.arrivals._queue_addition, store.kernels.block_sums

    def slowly(tile: Any, segment: Any, *rest: Any) -> None:
        if tile is second and segment.layout.parameter == 0:
            gate.set()
            tier.worker.drain()
            late.set()
        queue(tile, segment, *rest)

    def failing(*arguments: Any) -> Any:
        if late.is_set():
            raise RuntimeError("it cannot be measured now")
        return sums(*arguments)

    monkeypatch.setattr(tier.arrivals, "_queue_addition", slowly)
    monkeypatch.setattr(store.kernels, "block_sums", failing)
    tier.worker.submit(gate.wait, 0)
    pair.backward()
    store.settle()
    monkeypatch.undo()
    assert late.is_set()
    assert torch.equal(pair.ahead.grad_norm(), pair.plain.grad_norm())
    pair.step(clip=1e9)


def test_a_norm_is_measured_again_where_the_loss_scale_was_another(pair: Pair) -> None:
    pair.train(2, clip=1e9)
    pair.backward()
    before = pair.ahead.grad_norm()
    for optimizer in pair.optimizers:
        optimizer.set_loss_scale(3.0)
    after = pair.ahead.grad_norm()
    assert after < before / 2 and torch.equal(after, pair.plain.grad_norm())
    pair.step(clip=1e9)


def test_a_gradient_that_is_written_is_measured_again(pair: Pair) -> None:
    pair.train(2, clip=1e9)
    pair.backward()
    before = pair.ahead.grad_norm()
    for optimizer in pair.optimizers:
        optimizer._core.members.store.states.write(0, GRADIENT, torch.full((24 * 16,), 3.0))
    after = pair.ahead.grad_norm()
    assert not torch.equal(before, after) and torch.equal(after, pair.plain.grad_norm())


# -- when to bet, and with what -----------------------------------------------


def test_it_stops_where_clipping_always_acts_and_comes_back(pair: Pair) -> None:
    for _ in range(6):
        pair.backward()
        record = pair.step(clip=1e-3)
    assert not record.bets and record.begun == 0 and record.score < 0.5
    for _ in range(6):
        pair.backward()
        record = pair.step(clip=1e9)
    assert record.bets and record.kept == record.begun > 2


def test_a_budget_of_part_of_the_tiles() -> None:
    whole = Pair()
    everything = whole.train(3).begun
    every_byte = whole.ahead.host_bytes()["spares"]
    for memory in ("50%", every_byte // 2):
        pair = Pair(memory=memory)
        record = pair.train(3)
        assert 0 < record.kept == record.begun == record.spares < everything
        assert record.waited == everything - record.begun
        assert 0 < pair.ahead.host_bytes()["spares"] <= every_byte // 2


def test_counted_bytes_of_spares() -> None:
    pair = Pair(memory="100%", dtype=torch.bfloat16)
    pair.train(2)
    numels = [tile.layout.buffer_numel for tile in pair.ahead._core.members.store.tiles if tile.buffer is not None]
    outputs = sum(-(-2 * numel // 64) * 64 for numel in numels)
    assert pair.ahead.host_bytes()["spares"] == sum(12 * numel for numel in numels) + outputs


def test_auto_is_at_most_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(memory="auto")
    monkeypatch.setattr("longshore.tiles.speculation.available_bytes", lambda: 4 * 12000)
    record = pair.train(2)
    assert 0 < pair.ahead.host_bytes()["spares"] <= 12000 and record.waited > 0


def test_backward_allocates_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("memory was asked for in backward")

    monkeypatch.setattr(pair.ahead._core.members.store.tiles.tier.speculator.spares, "_allocate", refuse)
    assert pair.train(3).kept > 2


def test_a_state_that_is_new_gets_spares_of_its_shape() -> None:
    """Momentum that is turned on between backward and step widens every buffer."""
    pair = Pair(optimizer=longshore.SGD)
    assert pair.train(2).kept > 2
    narrow = pair.ahead.host_bytes()["spares"]
    pair.backward()
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.9
    assert pair.step().kept == 0
    assert pair.train(2).kept > 2
    numel = sum(tile.layout.buffer_numel for tile in pair.ahead._core.members.store.tiles if tile.buffer is not None)
    assert pair.ahead.host_bytes()["spares"] == narrow + 4 * numel


def test_a_state_that_is_new_after_a_step_that_was_dropped() -> None:
    """One more gradient came for tiles that were stepped ahead: no buffer of the old shape is left of that."""
    pair = Pair(optimizer=longshore.SGD)
    assert pair.train(2).kept > 2
    pair.backward()
    pair.ahead._core.members.store.tiles.settle()  # the passes have ended
    pair.backward()
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.9
    assert pair.step().dropped > 2
    assert pair.train(2).kept > 2


def test_new_groups_get_spares_too(pair: Pair) -> None:
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        torch.manual_seed(3)
        model.extra = nn.Linear(24, 24)
        model.trunk.append(model.extra)
        optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 1e-3})
    before = pair.ahead.speculation.spares
    record = pair.train(4)
    assert record.spares > before and record.kept == record.begun == record.spares


@pytest.mark.parametrize("memory", [-1, 1, 1.0, 1.5, -0.5, "0%", "all", True, None])
def test_bad_budgets(memory: Any) -> None:
    with pytest.raises(ValueError, match=r'speculation_memory must be "auto", a percentage .*, and is '):
        longshore.Offload(speculation_memory=memory)


def test_the_default_mode_has_nothing_to_bet_on() -> None:
    model = nn.Linear(4, 4)
    assert longshore.AdamW(model.parameters()).speculation is None
    for memory in ("100%", 1 << 20, "auto"):
        with pytest.raises(
            ValueError, match=r"without release_gradients=True they are \.grad until step\(\): add it, or"
        ):
            longshore.AdamW(model.parameters(), offload=longshore.Offload(speculation_memory=memory))
