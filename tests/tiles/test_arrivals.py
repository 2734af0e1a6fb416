"""Small gradients of a tile travel together, and later ones land while the host adds: the same sums."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiles.test_tiles import BF16, EXP_AVG, EXP_AVG_SQ, STAGED, Training, train

from longshore.errors import GradientError
from longshore.kernels import HostKernels
from longshore.layout import tiles as layout
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import Spec
from longshore.tiles import RangeStates, TierSettings, Tiles, tile
from longshore.transfer import Bundle, Copy, SimulatedTransfer

__all__ = ["train"]  # the fixture

SMALL = 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, tile):
        monkeypatch.setattr(module, "SMALL_NUMEL", SMALL)


@pytest.fixture
def publishes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each copy from the host of the simulated transfer had."""
    found: list[int] = []
    publish = SimulatedTransfer.publish

    def recorded(self: Any, output: Any, parameters: Any) -> Any:
        found.append(len(parameters._tensors) if isinstance(parameters, Bundle) else 1)
        return publish(self, output, parameters)

    monkeypatch.setattr(SimulatedTransfer, "publish", recorded)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each copy to the host of the simulated transfer had."""
    found: list[int] = []
    stage = SimulatedTransfer.stage

    def recorded(self: Any, source: Any, *rest: Any) -> Any:
        found.append(len(source._tensors) if isinstance(source, Bundle) else 1)
        return stage(self, source, *rest)

    monkeypatch.setattr(SimulatedTransfer, "stage", recorded)
    return found


def refusing(call: Any, error: BaseException, bundles: bool) -> Any:
    """The method of a transfer, which raises for copies of several tensors together, or for those of one."""

    def refused(first: Any, second: Any, *rest: Any) -> Any:
        if (isinstance(first, Bundle) or isinstance(second, Bundle)) == bundles:
            raise error
        return call(first, second, *rest)

    return refused


FULL = torch.OutOfMemoryError("no memory is left")


NUMELS = (7, 30, 1, 19, 20, 12)
"""In two tiles of 60 elements: 7, 1, 19 | 30, of the last one 3, and 12 | 17 of the last but one."""


@pytest.mark.parametrize("hold", [False, True], ids=["brought", "held"])
def test_small_gradients_of_a_tile_travel_together(train: Any, copies: list[int], hold: bool) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=NUMELS, tile_numel=60, hold=hold)
    assert [[segment.numel for segment in tile.layout.segments] for tile in training.store.tiles] == [
        [7, 1, 19, 3, 30],
        [17, 12],
    ]
    for _ in range(2):  # nothing is known of the first window
        copies.clear()
        training.window(dict.fromkeys(range(6), 1))
        # The parts of what is not small, of 3, 17 and 30 elements, travel alone; the last tile has one small one more.
        assert sorted(copies) == [1, 1, 1, 1, 3]
        training.check()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("hold", [False, True], ids=["brought", "held"])
def test_new_values_of_small_parameters_travel_together(
    train: Any, publishes: list[int], hold: bool, dtype: torch.dtype
) -> None:
    """But for those between two that are stepped, which somebody may write meanwhile."""
    training = train(
        SimulatedTransfer(0, 0.001),
        (7, 30, 1, 19),
        (dtype,),
        60,
        hold=hold,
        gradient_dtype=torch.float32 if hold else None,
    )
    training.window(dict.fromkeys(range(4), 1))
    assert sorted(publishes) == [1, 3]
    training.check()
    publishes.clear()
    training.window({0: 1, 3: 1})
    assert sorted(publishes) == [1, 1]
    training.check()


def test_new_values_travel_alone_where_the_device_has_no_memory_left(
    train: Any, publishes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=NUMELS, tile_numel=60)

    monkeypatch.setattr(training.transfer, "publish", refusing(training.transfer.publish, FULL, bundles=True))
    training.window(dict.fromkeys(range(6), 1))
    assert publishes == [1] * 7
    training.check()


def test_those_that_are_expected_do_not_wait_for_others(train: Any, copies: list[int]) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=NUMELS, tile_numel=60)
    training.window({0: 1, 2: 1})
    gradients = training.gradients({0: 1, 2: 1})
    copies.clear()
    training.arrive(0, gradients[0][0])
    assert copies == []
    training.arrive(2, gradients[2][0])
    assert copies == [2]
    training.commit(gradients)
    training.check()


def test_what_arrived_before_between_others_stays(train: Any, copies: list[int]) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(7, 8, 9), tile_numel=60)
    gradients = training.gradients({0: 1, 1: 1, 2: 1})
    training.arrive(1, gradients[1][0])
    training.store.settle()
    for index in (0, 2):
        training.arrive(index, gradients[index][0])
    training.commit(gradients)
    assert copies == [1, 1, 1]
    training.check()


def test_few_bytes_wait_where_few_may_be_on_their_way(train: Any, copies: list[int]) -> None:
    transfer = SimulatedTransfer(0, 0.001, in_flight_bytes=2 * 4 * (7 + 8))
    training = train(transfer, numels=(7, 8, 9, 10), tile_numel=60)
    gradients = training.gradients(dict.fromkeys(range(4), 1))
    for index in range(4):
        training.arrive(index, gradients[index][0])
    assert copies == [2, 2]
    training.commit(gradients)
    training.check()


def test_few_bytes_wait_in_all_tiles_together(train: Any, copies: list[int]) -> None:
    """The first two parameters of each tile arrive, and its third does not."""
    transfer = SimulatedTransfer(0, 0.001, in_flight_bytes=2 * 4 * (4 * 8))
    training = train(transfer, numels=(4, 4, 2) * 6, tile_numel=10)
    gradients = training.gradients({index: 1 for index in range(18) if index % 3 < 2})
    for number, (index, (gradient,)) in enumerate(gradients.items()):
        training.arrive(index, gradient)
        assert 4 * 4 * (number + 1) - sum(copies) * 16 < 4 * (4 * 8), "what waits"
    assert sum(copies) >= 4
    training.commit(gradients)
    training.check()


def test_a_part_of_something_large_does_not_wait(train: Any, copies: list[int]) -> None:
    """It would keep all of that in memory, as one gradient of FSDP2 all those of its module."""
    training = train(SimulatedTransfer(0, 0.001), numels=(7, 8), tile_numel=60)
    whole = torch.randn(7 + SMALL)
    training.store.arrive(0, whole[:7])
    assert copies == [1]
    gradients = {0: [whole[:7]], 1: [training.gradient(1)]}
    training.arrive(1, gradients[1][0])
    training.commit(gradients)
    training.check()


class Gate(Copy):
    """A copy that is under way until the event is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        assert self.over.wait(20)


def test_small_gradients_wait_for_what_still_reads_their_slot(train: Any, copies: list[int]) -> None:
    training = train(SimulatedTransfer(0, 0.0), numels=(7, 8), tile_numel=60)
    (tile,) = training.store.tiles
    gate = tile.slot.last_publish = Gate()
    gradients = training.gradients({0: 1, 1: 1})
    for index in (0, 1):
        training.arrive(index, gradients[index][0])
    assert copies == [2]
    (copy,) = tile.coalesced.begin()
    assert not copy._finished.wait(0.1)
    gate.over.set()
    training.commit(gradients)
    training.check()


FAILING = RuntimeError("lost")


def test_a_copy_that_cannot_start_is_told_and_its_window_discarded(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(7, 8, 9), tile_numel=60)
    gradients = training.gradients({1: 1, 2: 1})
    with monkeypatch.context() as patch:
        patch.setattr(training.transfer, "stage", refusing(training.transfer.stage, FAILING, bundles=True))
        for index in (1, 2):
            training.arrive(index, gradients[index][0])
        for _ in range(2):
            with pytest.raises(GradientError, match=r"could not be added .*lost.*; zero_grad\(\) discards"):
                training.commit(gradients)
        training.discard()
    training.check()
    training.window({0: 1, 1: 2, 2: 1})
    training.check()


def test_each_travels_alone_where_the_device_has_no_memory_left(
    train: Any, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=NUMELS, tile_numel=60)

    monkeypatch.setattr(training.transfer, "stage", refusing(training.transfer.stage, FULL, bundles=True))
    training.window(dict.fromkeys(range(6), 1))
    assert copies == [1] * 7
    training.check()


def test_a_window_that_is_discarded_takes_what_waits_along(train: Any, copies: list[int]) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=NUMELS, tile_numel=60)
    training.arrive(0, training.gradient(0))
    training.discard()
    assert all(tile.coalesced is None for tile in training.store.tiles)  # nothing keeps its gradients
    training.window({0: 1, 2: 1, 3: 1})
    training.check()


@pytest.mark.quick(0)
@pytest.mark.parametrize("transfer", STAGED)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_arrivals(train: Any, transfer: Callable[[], Any], dtype: torch.dtype, seed: int) -> None:
    """Windows with gradients that are missing, come again, are forgotten, or come after the store was asked."""
    dice = random.Random(seed)
    training: Training = train(transfer(), numels=NUMELS, dtypes=(dtype,), tile_numel=60)
    for _ in range(12):
        arrived: dict[int, list[torch.Tensor]] = {}
        for index in dice.choices(range(6), k=dice.randrange(1, 14)):
            gradient = training.gradient(index)
            training.arrive(index, gradient)
            arrived.setdefault(index, []).append(gradient)
            if dice.random() < 0.15:
                training.store.settle()
            if dice.random() < 0.1:
                training.store.discard(index)
                del arrived[index]
        if dice.random() < 0.2:
            training.discard()
            continue
        training.commit(arrived)
        training.check()


@pytest.fixture
def busy_worker() -> Iterator[Callable[[Training], threading.Event]]:
    """Keeps the worker of a store busy until the event is set, or the test is over."""
    gates: list[threading.Event] = []

    def keep(training: Training) -> threading.Event:
        gates.append(threading.Event())
        training.store.tier.worker.submit(gates[-1].wait, 0)
        return gates[-1]

    yield keep
    for gate in gates:
        gate.set()


def test_later_gradients_land_before_the_host_adds_them(
    train: Any, copies: list[int], busy_worker: Callable[[Training], threading.Event]
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(30, 40), tile_numel=100)
    gradients = training.gradients({0: 3, 1: 2})
    training.arrive(0, gradients[0][0])
    training.arrive(1, gradients[1][0])
    gate = busy_worker(training)
    copies.clear()
    training.arrive(0, gradients[0][1])
    training.arrive(1, gradients[1][1])
    assert copies == [1] * LANDING_SLOTS
    training.arrive(0, gradients[0][2])  # both slots are taken: it waits for the host
    assert copies == [1] * LANDING_SLOTS
    gate.set()
    training.commit(gradients)
    assert len(copies) == LANDING_SLOTS + 1
    training.check()
    copies.clear()
    again = training.gradients({0: 1 + LANDING_SLOTS})
    training.arrive(0, again[0][0])
    gate = busy_worker(training)
    for gradient in again[0][1:]:
        training.arrive(0, gradient)
    assert len(copies) == 1 + LANDING_SLOTS, "the slots came back"
    gate.set()
    training.commit(again)
    training.check()


def test_the_next_one_lands_while_the_host_adds_another(
    train: Any, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(30,), tile_numel=100)
    gradients = training.gradients({0: 2 + LANDING_SLOTS})
    adding, go_on = threading.Event(), threading.Event()
    accumulate = training.store.kernels.accumulate

    def slow(*args: Any, **options: Any) -> None:
        adding.set()
        assert go_on.wait(20)
        accumulate(*args, **options)

    monkeypatch.setattr(training.store.kernels, "accumulate", slow)
    for gradient in gradients[0]:
        training.arrive(0, gradient)
    assert adding.wait(20)  # the third: the second came back with its slot
    assert len(copies) == 2 + LANDING_SLOTS
    go_on.set()
    training.commit(gradients)
    training.check()


def test_a_later_gradient_that_could_not_land_is_copied_when_its_turn_comes(
    train: Any, busy_worker: Callable[[Training], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(30,), tile_numel=100)
    gradients = training.gradients({0: 3})
    training.arrive(0, gradients[0][0])
    gate = busy_worker(training)
    with monkeypatch.context() as patch:
        patch.setattr(training.transfer, "stage", refusing(training.transfer.stage, FAILING, bundles=False))
        for gradient in gradients[0][1:]:
            training.arrive(0, gradient)
    gate.set()
    training.commit(gradients)
    training.check()
    assert len(training.store.tier.arrivals._landing) == LANDING_SLOTS


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("numel", [32, 64])
def test_slots_fit_tiles_that_come_later(
    train: Any, busy: bool, numel: int, busy_worker: Callable[[Training], threading.Event]
) -> None:
    """Also while gradients are in the slots of before, and where the size is no multiple of what slots are cut to."""
    training = train(SimulatedTransfer(0, 0.001), numels=(16, numel), dtypes=(BF16,), tile_numel=100)
    training.store.close()
    settings = TierSettings(SimulatedTransfer(0, 0.001), HostKernels(threads=1), 100, hold_gradients=True)
    store = training.store = Tiles([settings])
    training.states = RangeStates(store)
    training.states.set_states((EXP_AVG, EXP_AVG_SQ))
    store.add([Spec(0, 16, BF16)])
    training.states.adopt(0, training.parameters[0], keep_matching=False)
    first = training.gradients({0: 3})
    if busy:
        gate = busy_worker(training)
        for gradient in first[0]:
            training.arrive(0, gradient)
    store.add([Spec(1, numel, BF16)])
    if busy:
        gate.set()
    training.states.adopt(1, training.parameters[1], keep_matching=False)
    if busy:
        training.commit(first)
    for _ in range(3):
        training.window({0: 4, 1: 5})
        training.check()
    assert len(store.tier.arrivals._landing) == LANDING_SLOTS


def test_an_interrupt_takes_no_slot_along(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(30,), tile_numel=100)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for owner, name in ((training.transfer, "stage"), (training.store.tier.worker, "submit")):
        training.arrive(0, training.gradient(0))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                training.arrive(0, training.gradient(0))
        training.discard()
        assert len(training.store.tier.arrivals._landing) == LANDING_SLOTS
    training.window({0: 3})
    training.check()


def test_slots_come_back_from_a_window_that_was_discarded(
    train: Any, busy_worker: Callable[[Training], threading.Event]
) -> None:
    training = train(SimulatedTransfer(0, 0.001), numels=(30,), tile_numel=100)
    for _ in range(2):
        gate = busy_worker(training)
        for _ in range(1 + LANDING_SLOTS):
            training.arrive(0, training.gradient(0))
        gate.set()
        training.discard()
    assert len(training.store.tier.arrivals._landing) == LANDING_SLOTS
    training.window({0: 2})
    training.check()
