from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import current_device, device_type
from torch import Tensor

from longshore.errors import BrokenStateError, GradientError
from longshore.kernels import UNSCALED, HostKernels, Scale
from longshore.kernels.reference import rule_step
from longshore.layout.memory import LANDING_SLOTS, PIPELINE_DEPTH
from longshore.layout.tiles import Spec, align
from longshore.optim.rules.adam import AdamRule
from longshore.tiles import MASTER, Ended, ParameterStep, RangeStates, TierSettings, Tiles, TileState
from longshore.transfer import CopyStreams, DeviceStreams, SimulatedTransfer

BF16 = torch.bfloat16
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
NUMELS = (50, 0, 1, 37, 130)

RULES = (
    AdamRule(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=0, decoupled=True),
    AdamRule(lr=3e-2, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1, step=0, decoupled=False),
)
"""Two groups; parameters take turns."""


class Training:
    """Parameters, a store behind them, and the same in plain torch."""

    def __init__(
        self,
        transfer: CopyStreams,
        numels: Sequence[int] = NUMELS,
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        tile_numel: int = 40,
        hold: bool = True,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.transfer = transfer
        self.gradient_dtype = gradient_dtype
        self.hold = hold
        self.store = Tiles([TierSettings(transfer, HostKernels(threads=2), tile_numel, hold)], gradient_dtype)
        self.states = RangeStates(self.store)
        self.states.set_states((EXP_AVG, EXP_AVG_SQ))
        self.dtypes = [dtypes[index % len(dtypes)] for index in range(len(numels))]
        self.device = device_type() if isinstance(transfer, DeviceStreams) else "cpu"
        self.numels = list(numels)
        values = [torch.randn(numel).to(dtype) for numel, dtype in zip(numels, self.dtypes, strict=True)]
        self.parameters = [value.to(self.device, copy=True) for value in values]
        self.expected = [[value.float(), torch.zeros(len(value)), torch.zeros(len(value))] for value in values]
        self.counts = [0] * len(values)
        self.store.add(
            Spec(index, numel, dtype) for index, (numel, dtype) in enumerate(zip(numels, self.dtypes, strict=True))
        )
        self.adopt()

    def adopt(self) -> None:
        for index, parameter in enumerate(self.parameters):
            self.states.adopt(index, parameter, keep_matching=False)

    def gradient(self, index: int) -> Tensor:
        return torch.randn(self.numels[index]).to(self.gradient_dtype or self.dtypes[index])

    def gradients(self, arrivals: Mapping[int, int]) -> dict[int, list[Tensor]]:
        return {index: [self.gradient(index) for _ in range(count)] for index, count in arrivals.items()}

    def arrive(self, index: int, gradient: Tensor) -> None:
        # A fresh tensor that nobody keeps: what autograd gives.
        self.store.arrive(index, gradient.to(self.device, copy=True))

    def rule(self, index: int) -> AdamRule:
        return replace(RULES[index % 2], step=self.counts[index] + 1)

    def commit(self, gradients: Mapping[int, list[Tensor]], scale: Scale = UNSCALED) -> None:
        """Commit a window that has arrived, or, without holding, bring its gradients along."""
        self.store.commit(
            {
                index: ParameterStep(
                    self.rule(index),
                    self.parameters[index],
                    None if self.hold else arrived[0].to(self.device, copy=True),
                )
                for index, arrived in gradients.items()
            },
            scale,
        )
        self.stepped(gradients, scale)

    def stepped(self, gradients: Mapping[int, list[Tensor]], scale: Scale) -> None:
        for index, arrived in gradients.items():
            total = arrived[0]
            for later in arrived[1:]:
                total = total.float() + later.float()
            self.expected[index] = list(rule_step(self.expected[index], total, self.rule(index), scale))
            self.counts[index] += 1

    def window(self, arrivals: Mapping[int, int], scale: Scale = UNSCALED) -> None:
        gradients = self.gradients(arrivals)
        if self.hold:
            for turn in range(max(arrivals.values(), default=0)):
                for index, arrived in gradients.items():
                    if turn < len(arrived):
                        self.arrive(index, arrived[turn])
        self.commit(gradients, scale)

    def discard(self) -> None:
        self.store.discard()
        self.store.window.end(Ended.DISCARDED)

    def load(self) -> None:
        """What ``load_state_dict`` and ``load_state_dict`` of the model do."""
        self.store.begin_load()
        self.store.window.end(Ended.DISCARDED)
        for index, (master, exp_avg, exp_avg_sq) in enumerate(self.expected):
            self.parameters[index].copy_(master)
            for which, values in ((MASTER, master), (EXP_AVG, exp_avg), (EXP_AVG_SQ, exp_avg_sq)):
                self.states.write(index, which, values)

    def held(self) -> set[int]:
        return {index for index in range(len(self.numels)) if self.store.arrivals(index) > 0}

    def check(self) -> None:
        for index, arrays in enumerate(self.expected):
            for which, array in zip((MASTER, EXP_AVG, EXP_AVG_SQ), arrays, strict=True):
                assert torch.equal(self.states.read(index, which), array), (index, which)
            assert torch.equal(self.parameters[index].cpu(), arrays[0].to(self.dtypes[index])), index


def all_parameters(training: Training, arrivals: int = 1) -> dict[int, int]:
    return dict.fromkeys(range(len(training.numels)), arrivals)


def device() -> CopyStreams:
    return DeviceStreams.to_host(current_device(), in_flight_bytes=512)


TRANSFERS = [
    pytest.param(CopyStreams, id="direct"),
    *(pytest.param(lambda seed=seed: SimulatedTransfer(seed, 0.001), id=f"simulated-{seed}") for seed in range(3)),
    pytest.param(device, id="device", marks=pytest.mark.gpu),
]
STAGED = TRANSFERS[1:]


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    """Makes a Training, and closes its store afterwards."""
    made: list[Training] = []

    def make(*args: Any, **options: Any) -> Training:
        made.append(Training(*args, **options))
        return made[-1]

    yield make
    for training in made:
        training.store.close()


# -- parity -------------------------------------------------------------------


@pytest.mark.parametrize("hold", [False, True], ids=["brought", "held"])
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("tile_numel", [7, 40, 10_000])
def test_commit_is_the_reference(train, transfer, tile_numel: int, hold: bool) -> None:
    dtypes = (torch.float32, BF16, torch.float16)
    training = train(transfer(), dtypes=dtypes, tile_numel=tile_numel, hold=hold)
    assert len(training.store.tiles) == {7: 33, 40: 8, 10_000: 3}[tile_numel]
    training.window(all_parameters(training))
    training.window({0: 1, 3: 1}, Scale(0.3, 0.7))
    training.check()
    training.window({})
    training.window(all_parameters(training))
    training.check()
    assert training.counts == [3, 2, 2, 3, 2]


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_accumulation(train, transfer) -> None:
    training = train(transfer(), dtypes=(BF16,))
    training.window({0: 2, 2: 1, 3: 3, 4: 2})
    training.check()
    training.window({0: 1, 3: 1, 4: 4})
    training.check()


windows = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=5),
        st.sampled_from(["commit", "commit", "discard"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(
    numels=st.lists(st.integers(0, 90), min_size=5, max_size=5),
    dtypes=st.lists(st.sampled_from([torch.float32, BF16, torch.float16]), min_size=1, max_size=3),
    tile_numel=st.integers(5, 120),
    seed=st.one_of(st.none(), st.integers(0, 1000)),
    windows=windows,
    hold=st.booleans(),
)
def test_any_history_is_the_reference(numels, dtypes, tile_numel, seed, windows, hold) -> None:
    torch.manual_seed(0)
    transfer = CopyStreams() if seed is None else SimulatedTransfer(seed, max_delay_s=0.0003)
    training = Training(transfer, numels, dtypes, tile_numel, hold)
    try:
        for arrivals, verdict in windows:
            if not hold:
                training.window(dict.fromkeys(arrivals, 1))
            elif verdict == "commit":
                training.window(arrivals)
            else:
                for index, count in arrivals.items():
                    for _ in range(count):
                        training.arrive(index, training.gradient(index))
                training.discard()
            training.check()
    finally:
        training.store.close()


# -- arrivals -----------------------------------------------------------------


def test_a_norm_waits_for_the_gradients_that_it_measures(train) -> None:
    training = train(SimulatedTransfer(1, max_delay_s=0.2), numels=(64,), tile_numel=16)
    gradient = training.gradient(0)
    training.arrive(0, gradient)
    found = training.store.sum_of_squares({0: None}, UNSCALED)
    assert found == pytest.approx(float(gradient.double().pow(2).sum()), rel=1e-12)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_first_arrival_copies_and_later_ones_add_in_float32(train, transfer) -> None:
    training = train(transfer(), dtypes=(BF16,), tile_numel=40)
    first, second, third = (training.gradient(0) for _ in range(3))
    sums = []
    for gradient in (first, second, third):
        training.arrive(0, gradient)
        training.store.settle()
        sums.append(torch.cat([segment.wait() for _, segment in training.store.tier.parts[0]]))
    assert sums[0].dtype == BF16 and torch.equal(sums[0], first)
    assert sums[1].dtype == torch.float32 and torch.equal(sums[1], first.float() + second.float())
    assert torch.equal(sums[2], first.float() + second.float() + third.float())
    # bfloat16 would have lost this.
    assert not torch.equal(sums[1], (first + second).float())


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_whether_a_gradient_is_the_first_is_each_parameters_own_affair(train, transfer) -> None:
    """Two parameters of one tile, with one and with three arrivals; the tile is stepped once."""
    training = train(transfer(), numels=(10, 10), tile_numel=100)
    assert len(training.store.tiles) == 1
    training.window({0: 1, 1: 3})
    training.check()
    training.window({0: 3, 1: 1})
    training.check()


def test_a_single_backward_takes_no_accumulator(train) -> None:
    for transfer in (CopyStreams(), SimulatedTransfer(1)):
        training = train(transfer, dtypes=(BF16,))
        for _ in range(3):
            gradients = training.gradients(all_parameters(training))
            for index, (gradient,) in gradients.items():
                training.arrive(index, gradient)
            training.store.settle()
            assert training.store.host_bytes()["accumulators"] == 0
            training.commit(gradients)
        training.check()


def test_only_tiles_with_a_second_arrival_take_an_accumulator(train) -> None:
    training = train(SimulatedTransfer(1), numels=(32, 32, 32), tile_numel=32)
    training.window({0: 2, 1: 1, 2: 1})
    assert training.store.host_bytes()["accumulators"] == 4 * 32
    training.window({0: 1, 1: 2, 2: 1})
    assert training.store.host_bytes()["accumulators"] == 4 * 32  # tile 0's serves tile 1
    training.window({0: 2, 1: 2, 2: 1})
    assert training.store.host_bytes()["accumulators"] == 2 * 4 * 32
    training.window({0: 1, 1: 1, 2: 1})
    assert training.store.host_bytes()["accumulators"] == 0
    training.check()


def test_the_store_knows_what_the_window_holds(train) -> None:
    training = train(SimulatedTransfer(1))
    assert training.held() == set()
    for index in (0, 3, 3):
        training.arrive(index, training.gradient(index))
    assert training.held() == {0, 3}
    training.store.discard(3)
    assert training.held() == {0}
    training.discard()
    assert training.held() == set()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_several_threads_bring_gradients_of_one_tile(train, transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs the hooks of a model parallel backward on several threads."""
    training = train(transfer(), numels=[5] * 64, tile_numel=160)
    tiles = training.store.tiles
    assert len(tiles) == 2 and len(tiles[0].segments) == 32
    arrivals = all_parameters(training, 3)
    gradients = training.gradients(arrivals)
    failures: list[BaseException] = []
    take = training.store.tier.sums.take

    def slowly(kind: Any) -> Any:
        time.sleep(0.005)  # the others find that the tile has none
        return take(kind)

    monkeypatch.setattr(training.store.tier.sums, "take", slowly)

    def bring(first: int) -> None:
        try:
            for turn in range(3):
                for index in range(first, 64, 4):
                    training.arrive(index, gradients[index][turn])
        except BaseException as failure:
            failures.append(failure)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=bring, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert failures == []
    assert [sum(each.arrivals for each in tile.segments.values()) for tile in tiles] == [32 * 3] * 2
    assert training.store.host_bytes()["accumulators"] == sum(4 * tile.layout.buffer_numel for tile in tiles)
    training.commit(gradients)
    training.check()


# -- discarding ---------------------------------------------------------------


@pytest.mark.quick(0)
@pytest.mark.parametrize("seed", range(25))
def test_discarded_in_the_middle(train, seed: int) -> None:
    """Copies in flight and sums half added; the new window gets the new gradients only, whatever failed in the old."""
    training = train(SimulatedTransfer(seed, max_delay_s=0.001), dtypes=(BF16,), tile_numel=60)
    for _ in range(2):
        for index in range(len(training.numels)):
            for _ in range(1 + (index + seed) % 3):
                training.arrive(index, torch.full_like(training.gradient(index), 1e30))
        if seed % 2:
            training.store.window.fail(ValueError("a backward ended half way"))
        training.discard()
        assert training.held() == set()
        assert all(tile.state is TileState.EMPTY for tile in training.store.tiles)
        training.window(dict.fromkeys(range(0, 5, 1 + seed % 3), 1 + seed % 2))
        training.check()
    assert training.transfer.down.delays > 0


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_one_parameter_is_discarded(train, transfer) -> None:
    """Its neighbours in the same tiles keep what they have; it begins anew."""
    training = train(transfer(), numels=(30, 30, 30), dtypes=(BF16,), tile_numel=40)
    gradients = training.gradients({0: 2, 1: 1, 2: 2})
    for index in (0, 2):
        training.arrive(index, gradients[index][0])
    for _ in range(2):
        training.arrive(1, torch.full((30,), 1e30, dtype=BF16))
    for index in (0, 2):
        training.arrive(index, gradients[index][1])
    training.store.discard(1)
    training.arrive(1, gradients[1][0])
    training.commit(gradients)
    training.check()
    # Left out, it is idle.
    gradients = training.gradients({0: 1, 2: 1})
    for index in range(3):
        training.arrive(index, training.gradient(index) if index == 1 else gradients[index][0])
    training.store.discard(1)
    training.commit(gradients)
    training.check()
    assert training.counts == [2, 1, 2]


def test_discarding_the_last_parameter_of_a_tile_ends_its_window(train) -> None:
    training = train(SimulatedTransfer(1), numels=(30, 30), tile_numel=30)
    first, second = training.store.tiles
    training.arrive(0, training.gradient(0))
    training.arrive(1, training.gradient(1))
    training.store.discard(0)
    assert (first.state, second.state) == (TileState.EMPTY, TileState.FILLING)
    training.store.discard(0)
    training.discard()
    assert (first.state, second.state) == (TileState.EMPTY, TileState.EMPTY)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_was_held_and_not_stepped_goes_with_the_window(train, transfer) -> None:
    """Law 2: nothing left over from an earlier window is ever read."""
    training = train(transfer(), numels=(30, 30), tile_numel=40)
    gradients = training.gradients({0: 1})
    training.arrive(0, gradients[0][0])
    training.arrive(1, torch.full((30,), 1e30))
    training.commit(gradients)
    assert training.held() == set()
    training.check()
    training.window({0: 1, 1: 1})
    training.check()


def test_discard_reuses_the_accumulators(train) -> None:
    training = train(SimulatedTransfer(1))
    for _ in range(3):
        for _ in range(2):
            training.arrive(4, training.gradient(4))
        training.discard()
    tiles = [tile for tile, _ in training.store.tier.parts[4]]
    assert training.store.host_bytes()["accumulators"] == sum(4 * tile.layout.buffer_numel for tile in tiles)


# -- failure ------------------------------------------------------------------


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, failure: BaseException) -> list[int]:
    """``owner.name`` does its work, and its ``call``-th call then raises."""
    original = getattr(owner, name)
    calls: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise failure
        return result

    monkeypatch.setattr(owner, name, failing)
    return calls


def assert_broken(training: Training) -> None:
    store = training.store
    index, values = 0, training.parameters[0]
    calls: list[Callable[[], object]] = [
        lambda: store.arrive(index, values),
        store.settle,
        store.discard,
        lambda: store.discard(index),
        lambda: store.sum_of_squares({index: values}, UNSCALED),
        lambda: store.commit({}, UNSCALED),
        lambda: training.states.adopt(index, values, keep_matching=True),
        lambda: training.states.count_differing(index, values),
        lambda: training.states.read(index, MASTER),
        lambda: training.states.write(index, MASTER, torch.zeros(0)),
        store.check_usable,
    ]
    for call in calls:
        with pytest.raises(BrokenStateError, match="load_state_dict"):
            call()


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("hold", [False, True], ids=["brought", "held"])
def test_a_failure_before_the_first_tile_was_stepped(
    train, transfer, hold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(transfer(), hold=hold)
    training.window(all_parameters(training))
    gradients = training.gradients(all_parameters(training))
    if hold:
        for index, (gradient,) in gradients.items():
            training.arrive(index, gradient)
    with monkeypatch.context() as patch:
        # Held: the first thing of a commit. Brought: in the second tile, while the first waits its turn.
        owner, name = (training.transfer, "begin_publish") if hold else (training.store.tier.arrivals, "bring")
        calls = fail_at(patch, owner, name, 1 if hold else 3, RuntimeError("no such copy"))
        with pytest.raises(RuntimeError, match="no such copy"):
            training.commit(gradients)
        assert calls
    training.check()  # nothing was stepped
    assert training.held() == (set(range(5)) - {1} if hold else set())
    training.commit(gradients)  # the same window, once more
    training.check()


@pytest.mark.quick(0)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("hold", [False, True], ids=["brought", "held"])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 3, 7])
def test_a_failure_in_the_middle_breaks_the_store(
    train, transfer, hold: bool, failure: type[BaseException], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(transfer(), hold=hold)
    training.window(all_parameters(training))
    assert len(training.store.tiles) == 6 > PIPELINE_DEPTH
    with monkeypatch.context() as patch:
        # The seventh: in the bookkeeping, when every tile is stepped already.
        owner, name, at = (
            (training.store.kernels, "step_tile", call) if call < 7 else (training.store.tier.sums, "trim", 1)
        )
        calls = fail_at(patch, owner, name, at, failure())
        with pytest.raises(failure):
            training.window(all_parameters(training))
        assert len(calls) == at
    assert_broken(training)
    training.load()
    training.check()
    training.window(all_parameters(training, 2 if hold else 1))
    training.check()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_a_broken_commit_published_does_not_overtake_what_is_loaded_next(
    train, transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(transfer(), tile_numel=40)
    gradients = training.gradients(all_parameters(training))
    for index, (gradient,) in gradients.items():
        training.arrive(index, gradient)
    with monkeypatch.context() as patch:
        fail_at(patch, training.store.kernels, "step_tile", 3, RuntimeError("the kernel failed"))
        with pytest.raises(RuntimeError, match="the kernel failed"):
            training.commit(gradients)
    training.load()
    training.transfer.synchronize()
    time.sleep(0.01)
    training.check()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_gradient_that_could_not_be_added(train, transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is incomplete until it is discarded, however often one asks."""
    training = train(transfer())
    with monkeypatch.context() as patch:
        fail_at(patch, training.store.kernels, "sum_of_two", 2, MemoryError("no room"))
        for _ in range(2):
            for index in (0, 3):
                training.arrive(index, training.gradient(index))
        training.store.discard(4)  # to discard another parameter does not mend it
        for _ in range(2):
            with pytest.raises(GradientError, match=r"no room.*zero_grad"):
                training.store.commit({}, UNSCALED)
    with pytest.raises(GradientError, match="no room"):
        training.store.sum_of_squares({0: None}, UNSCALED)
    training.discard()
    training.check()
    training.window({0: 2, 3: 2})
    training.check()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_an_addition_that_failed_is_dropped_with_the_gradients_while_the_window_goes_on(
    train, transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ranks reduce anew what one of them had more of."""
    training = train(transfer())
    with monkeypatch.context() as patch:
        fail_at(patch, training.store.kernels, "sum_of_two", 1, MemoryError("no room"))
        for _ in range(2):
            training.arrive(0, training.gradient(0))
        training.store.discard()
    training.window({0: 2, 3: 2})
    training.check()


def test_a_copy_that_fails_on_its_way(train) -> None:
    training = train(SimulatedTransfer(1), numels=(30,), tile_numel=100)
    (tile,) = training.store.tiles
    training.store.arrive(0, training.gradient(0))
    coalesced = tile.coalesced
    assert coalesced is not None and coalesced is tile.segments[0].handle
    (handle,) = coalesced.begin()
    handle.wait()
    handle._failure = RuntimeError("lost on the way")  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost on the way"):
            training.store.commit({0: ParameterStep(training.rule(0), training.parameters[0], None)}, UNSCALED)
    training.check()
    training.discard()
    handle._failure = None  # type: ignore[attr-defined]
    training.window({0: 1})
    training.check()


# -- memory -------------------------------------------------------------------


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_host_bytes_are_counted_exactly(train, transfer, dtype: torch.dtype) -> None:
    training = train(transfer(), numels=(40, 25, 20), dtypes=(dtype,), tile_numel=40)
    # Tiles: 40 | 25 + 15 | 5, each segment aligned to 16 elements.
    buffers = [48, 32 + 16, 16]
    assert [tile.layout.buffer_numel for tile in training.store.tiles] == buffers
    padded = [-(-numel * dtype.itemsize // 64) * 64 for numel in buffers]
    slots, landing = (sum(padded), LANDING_SLOTS * max(padded)) if training.transfer.staged else (0, 0)
    none = {"state": 12 * sum(buffers), "gradients": slots, "spares": 0, "staging": landing, "accumulators": 0}
    assert training.store.host_bytes() == none
    gradients = training.gradients({0: 2, 2: 1})
    training.arrive(0, gradients[0][0])
    training.arrive(2, gradients[2][0])
    training.store.settle()
    held = 0 if training.transfer.staged else 60 * dtype.itemsize
    assert training.store.host_bytes() == {**none, "gradients": slots + held}
    training.arrive(0, gradients[0][1])
    training.store.settle()
    # Parameter 0's gradients are in its tile's sum now.
    held = 0 if training.transfer.staged else 20 * dtype.itemsize
    assert training.store.host_bytes() == {**none, "gradients": slots + held, "accumulators": 4 * 48}
    training.commit(gradients)
    assert training.store.host_bytes() == {**none, "accumulators": 4 * 48}
    training.window({0: 1})
    assert training.store.host_bytes() == none
    training.check()


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gradients_of_another_dtype_than_the_parameters(train, transfer, dtype: torch.dtype) -> None:
    numels = (400, 25, 200, 300)
    training = train(
        transfer(), numels=numels, dtypes=(dtype, torch.float32), tile_numel=40, gradient_dtype=torch.float32
    )
    numel = {tile.layout.buffer_numel for tile in training.store.tiles}
    # Slots of the ring are used again within a step, while what they held is on its way.
    assert sum(tile.dtype is dtype for tile in training.store.tiles) > 2 * PIPELINE_DEPTH
    for arrivals in ({0: 1, 3: 1}, {0: 2, 1: 1, 2: 3}, {2: 1}, {0: 1, 1: 1, 2: 1, 3: 1}):
        training.window(arrivals)
        training.check()
    if training.transfer.staged:
        slots = sum(4 * tile.layout.buffer_numel for tile in training.store.tiles)
        # The new parameters of low-precision tiles go out through a ring.
        assert training.store.host_bytes()["gradients"] == slots
        landing = LANDING_SLOTS * -(-4 * max(numel) // 64) * 64
        assert training.store.host_bytes()["staging"] == landing + PIPELINE_DEPTH * -(-2 * max(numel) // 64) * 64


def test_buffers_come_with_the_first_values() -> None:
    store = Tiles([TierSettings(SimulatedTransfer(), HostKernels(threads=2), 16, hold_gradients=False)])
    states = RangeStates(store)
    states.set_states((EXP_AVG, EXP_AVG_SQ))
    store.add([Spec(0, 16, BF16), Spec(1, 16, BF16)])
    assert store.host_bytes()["state"] == 0
    states.adopt(0, torch.ones(16, dtype=BF16), keep_matching=False)
    assert store.host_bytes()["state"] == 12 * 16
    states.clear(1)
    assert store.host_bytes()["state"] == 12 * 16
    states.write(1, EXP_AVG, torch.zeros(16))
    assert store.host_bytes()["state"] == 2 * 12 * 16
    store.close()


@pytest.mark.parametrize("transfer", STAGED)
def test_the_ring_is_as_deep_as_the_pipeline(train, transfer) -> None:
    training = train(transfer(), numels=(400,), dtypes=(BF16,), tile_numel=16, hold=False)
    assert len(training.store.tiles) == 25
    assert training.store.host_bytes()["staging"] == PIPELINE_DEPTH * 64
    for _ in range(2):
        training.window({0: 1})
    training.check()


@pytest.mark.parametrize("transfer", STAGED)
def test_the_ring_grows_and_is_cut_anew(train, transfer) -> None:
    training = train(transfer(), numels=(16,), dtypes=(BF16,), tile_numel=1000, hold=False)
    store = training.store
    assert store.host_bytes()["staging"] == 64
    training.window({0: 1})

    def add(numel: int, dtype: torch.dtype) -> None:
        index = len(training.numels)
        training.numels.append(numel)
        training.dtypes.append(dtype)
        value = torch.randn(numel).to(dtype)
        training.parameters.append(value.to(training.device, copy=True))
        training.expected.append([value.float(), torch.zeros(numel), torch.zeros(numel)])
        training.counts.append(0)
        store.add([Spec(index, numel, dtype)])
        training.states.adopt(index, training.parameters[index], keep_matching=False)

    add(32, BF16)  # not larger: one more slot
    assert store.host_bytes()["staging"] == 2 * 64
    training.window({0: 1, 1: 1})
    old_block = weakref.ref(store.tier.slots.next()._buffer)
    add(100, torch.float32)  # larger: all are cut anew, and the old ones are let go of
    assert store.host_bytes()["staging"] == 3 * 4 * align(100)
    gc.collect()
    assert old_block() is None
    for _ in range(2):
        training.window(all_parameters(training))
    training.check()


def test_a_gradient_is_freed_when_it_has_arrived(train) -> None:
    """On the device: the handle owns it until then, and nothing does afterwards."""
    training = train(SimulatedTransfer(1), numels=(30,), tile_numel=100)
    for _ in range(2):  # the first and a later one
        gradient = training.gradient(0)
        freed = weakref.ref(gradient)
        training.store.arrive(0, gradient)
        del gradient
        training.store.settle()
        (segment,) = training.store.tiles[0].segments.values()
        segment.wait()
        gc.collect()
        assert freed() is None


def test_nothing_of_a_window_is_kept_after_the_step(train) -> None:
    training = train(CopyStreams(), numels=(30, 30), tile_numel=100)
    gradients = [training.gradient(index) for index in (0, 1, 1)]
    freed = [weakref.ref(gradient) for gradient in gradients]
    for index, gradient in zip((0, 1, 1), gradients, strict=True):
        training.store.arrive(index, gradient)
    steps = {i: ParameterStep(training.rule(i), training.parameters[i], None) for i in (0, 1)}
    training.store.commit(steps, UNSCALED)
    del gradients, gradient
    gc.collect()
    assert [reference() for reference in freed] == [None] * 3


# -- the rest -----------------------------------------------------------------


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_sum_of_squares_is_over_what_is_held_and_what_is_given(train, transfer) -> None:
    training = train(transfer(), dtypes=(BF16,))
    gradients = training.gradients({0: 2, 3: 1, 4: 1})
    for index in (0, 3):
        for gradient in gradients[index]:
            training.arrive(index, gradient)
    given = gradients[4][0].to(training.device)
    total = training.store.sum_of_squares({0: None, 3: None, 4: given}, Scale(0.5))
    summed = gradients[0][0].float() + gradients[0][1].float()
    parts = [summed, gradients[3][0].float(), gradients[4][0].float()]
    assert total == pytest.approx(sum(float((0.5 * part).double().pow(2).sum()) for part in parts), rel=1e-12)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_adopting_keeps_the_digits_of_what_matches(train, transfer) -> None:
    training = train(transfer(), numels=(60,), dtypes=(BF16,))
    training.window({0: 1})
    (parameter,) = training.parameters
    assert training.states.count_differing(0, parameter) == 0
    assert not torch.equal(training.expected[0][0], training.expected[0][0].to(BF16).float())
    parameter[7:10] = 5.0
    assert training.states.count_differing(0, parameter) == 3
    training.states.adopt(0, parameter, keep_matching=True)
    training.expected[0][0][7:10] = 5.0
    training.check()
    training.states.adopt(0, parameter, keep_matching=False)
    assert torch.equal(training.states.read(0, MASTER), parameter.cpu().float())


def test_state_is_read_as_a_copy_and_written_as_given(train) -> None:
    training = train(SimulatedTransfer(1))
    training.states.write(4, EXP_AVG, torch.arange(130.0))
    read = training.states.read(4, EXP_AVG)
    assert torch.equal(read, torch.arange(130.0))
    read.zero_()
    assert torch.equal(training.states.read(4, EXP_AVG), torch.arange(130.0))
    training.states.clear(4)
    assert not training.states.read(4, EXP_AVG).any()
    assert training.states.read(1, EXP_AVG).shape == (0,)


def test_states_may_be_added_later_and_begin_at_zero(train) -> None:
    training = train(SimulatedTransfer(1))
    training.window({0: 1, 4: 1})
    store, buffers = training.store, training.store.host_bytes()["state"]
    training.states.set_states((EXP_AVG, "between", EXP_AVG_SQ))
    assert store.tier.elementwise.names == (MASTER, EXP_AVG, "between", EXP_AVG_SQ)
    assert store.host_bytes()["state"] * 3 == buffers * 4
    training.check()  # the others moved along
    assert not training.states.read(4, "between").any()
    training.states.write(4, "between", torch.ones(130))
    training.check()
    training.states.clear(4)
    assert not any(training.states.read(4, name).any() for name in store.tier.elementwise.names)


def test_close_leaves_no_thread_and_neither_does_garbage() -> None:
    for close in (True, False):
        before = set(threading.enumerate())
        training = Training(SimulatedTransfer(1))
        training.window(all_parameters(training, 2))
        mine = set(threading.enumerate()) - before
        assert len(mine) == 3  # two streams and the worker
        if close:
            training.store.close()
        del training
        gc.collect()
        for thread in mine:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in mine)
