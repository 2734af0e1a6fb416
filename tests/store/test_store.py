"""A store of one process: parameters over tiles."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import longshore
from longshore.engine.sharded_offload import ShardedOffload
from longshore.kernels import HostKernels
from longshore.layout.tiles import Spec
from longshore.store import Store
from longshore.store.rounds import ReductionSettings
from longshore.tiles import MASTER, TierSettings, Tiles, Window
from longshore.transfer import CopyStreams

NUMELS = {3: 40, 5: 0, 7: 1, 8: 100}


@pytest.fixture
def store() -> Store:
    store = Store(Tiles([TierSettings(CopyStreams(), HostKernels(threads=1), 16, hold_gradients=True)]))
    store.add_parameters(Spec(index, numel, torch.float32) for index, numel in NUMELS.items())
    return store


def test_a_parameter_is_known_from_when_it_is_laid_out_until_it_is_removed(store: Store) -> None:
    assert [index in store.ownership for index in (3, 4, 5, 8)] == [True, False, True, True]
    store.add_parameters([])
    tiles = len(store.tiles)
    store.remove({3, 8})
    assert [index in store.ownership for index in (3, 5, 7, 8)] == [False, True, True, False]
    assert len(store.tiles) < tiles
    store.add_parameters([Spec(9, 20, torch.float32)])
    assert 9 in store.ownership and [each.numel for each in store.ownership.owned(9)] == [20]
    with pytest.raises(KeyError):
        store.states.read(3, MASTER)


def test_a_parameter_is_one_range_under_its_own_number(store: Store) -> None:
    for index, numel in NUMELS.items():
        found = [
            (each.key, each.parameter, each.offset, each.numel, each.saves) for each in store.ownership.owned(index)
        ]
        assert found == ([(index, index, 0, numel, True)] if numel else [])


def test_what_is_written_is_read(store: Store) -> None:
    values = {index: torch.arange(numel, dtype=torch.float32) + index for index, numel in NUMELS.items()}
    for index, each in values.items():
        store.states.write(index, MASTER, each)
        assert not store.states.differs(index, MASTER, each)
    for index, each in values.items():
        assert torch.equal(store.states.read(index, MASTER), each)
        store.states.adopt(index, 2.0 * each, keep_matching=False)
        assert torch.equal(store.states.read(index, MASTER), 2.0 * each)
        assert store.states.count_differing(index, 2.0 * each) == 0
        store.states.clear(index)
        assert not store.states.read(index, MASTER).any()
    assert store.states.count_differing(8, values[8]) == 100


def test_an_empty_parameter_steps_nothing(store: Store) -> None:
    assert store.reduced(5) == 0
    store.arrive(5, torch.empty(0))
    store.forget(5)
    assert store.arrivals(5) == 0


def test_the_state_of_an_empty_parameter_is_on_the_host_whatever_the_default_device_is() -> None:
    optimizer = longshore.AdamW([torch.nn.Parameter(torch.empty(0))])
    optimizer.param_groups[0]["params"][0].grad = torch.empty(0)
    optimizer.step()
    with torch.device("meta"):
        state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].device.type == "cpu"
    optimizer.load_state_dict(state)


def test_an_offload_of_a_users_class_keeps_a_ranks_share() -> None:
    @dataclass(frozen=True)
    class Mine(longshore.Offload):
        extra: int = 3

        def streams_to(self, device: torch.device) -> CopyStreams:
            return asked.append(self.extra) or super().streams_to(device)

    asked: list[int] = []
    shared = ShardedOffload.over(Mine(tile_numel=16), group=None, reduction=ReductionSettings(1, 1), gather_numel=1)
    assert shared.tile_numel == 16 and not shared.alone
    shared.share.make_tiles(torch.device("cpu"), False, lambda key: torch.empty(0), Window()).close()
    assert asked == [3]  # once: a device has few streams
