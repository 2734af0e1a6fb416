"""Forked processes (workers of a data loader) take nothing of an optimizer's memory, and cannot use its state."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import huge_pages, in_child, memory_at, sleeping_child
from torch import nn
from torch.utils.data import DataLoader, Dataset

import longshore
from longshore import Offload, SimulatedTransfer
from longshore.kernels.buffers import block_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUMEL = 2 << 20
MODES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "default": longshore.AdamW,
    "released": lambda parameters: longshore.AdamW(parameters, release_gradients=True),
    "copied": lambda parameters: longshore.AdamW(parameters, offload=Offload(transfer=SimulatedTransfer())),
    "ahead": lambda parameters: longshore.AdamW(
        parameters, release_gradients=True, offload=Offload(speculation_memory="100%")
    ),
    "bf16": lambda parameters: longshore.AdamW(parameters, offload=Offload(states="bf16")),
    "8 bits": lambda parameters: longshore.AdamW(parameters, offload=Offload(states="8bit")),
}


@pytest.fixture(params=MODES)
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[Any, nn.Parameter]]:
    parameter = nn.Parameter(torch.ones(1024, NUMEL // 1024))
    optimizer = MODES[request.param]([parameter])
    for _ in range(2):
        step(optimizer, parameter)
    yield optimizer, parameter
    optimizer.close()


def step(optimizer: Any, parameter: nn.Parameter) -> None:
    for _ in range(2):
        (parameter * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def addresses(optimizer: Any) -> list[int]:
    """Where the states, spares, sums and slots are."""
    tier = optimizer._core.members.store.tiles.tier
    pools = [tier.buffers, tier.sums, tier.speculator._pool]
    buffers = [tile.buffer for tile in tier.tiles]
    buffers += [each for pool in pools for kept in (pool._free, pool._idle) for some in kept.values() for each in some]
    slots = [tile.slot._buffer for tile in tier.tiles if tile.slot is not None]
    return sorted(tensor.data_ptr() for tensor in (*map(block_of, buffers), *slots))


def test_a_step_after_a_fork_copies_nothing(trained: tuple[Any, nn.Parameter]) -> None:
    optimizer, parameter = trained
    found = addresses(optimizer)
    before = [memory_at(address) for address in found]
    assert min(each["Rss"] for each in before) >= NUMEL
    with sleeping_child() as child:
        step(optimizer, parameter)
        assert addresses(optimizer) == found
        after = [memory_at(address) for address in found]
        assert [memory_at(address, child).get("Rss", 0) for address in found] == [0] * len(found)
    for name in ("Rss", "AnonHugePages"):
        assert [each[name] for each in after] == [each[name] for each in before]
    if huge_pages():
        assert after[0]["AnonHugePages"] >= NUMEL


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_with_workers_of_a_data_loader_the_weights_are_the_same() -> None:
    weights = []
    for workers in (0, 2):
        parameter = nn.Parameter(torch.ones(1024, NUMEL // 1024))
        optimizer = longshore.AdamW([parameter], release_gradients=True)
        for _ in range(2):
            for batch in DataLoader(
                Indices(), num_workers=workers, multiprocessing_context="fork" if workers else None
            ):
                (parameter * batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(parameter.detach())
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones_like(weights[0]))


CALLS: dict[str, Callable[[Any, nn.Parameter, Path], object]] = {
    "step": lambda optimizer, parameter, _: step(optimizer, parameter),
    "state_dict": lambda optimizer, parameter, _: optimizer.state_dict(),
    "state": lambda optimizer, parameter, _: optimizer.state[parameter]["exp_avg"],
    "deepcopy": lambda optimizer, parameter, _: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, parameter, _: pickle.dumps(optimizer),
    "save": lambda optimizer, parameter, folder: longshore.save(folder, nn.ParameterList([parameter]), optimizer, "t"),
    "refresh_master": lambda optimizer, parameter, _: optimizer.refresh_master(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_child_that_uses_the_state_gets_an_error(
    trained: tuple[Any, nn.Parameter], call: str, tmp_path: Path
) -> None:
    optimizer, parameter = trained
    said = in_child(lambda: CALLS[call](optimizer, parameter, tmp_path))
    assert "Error: " in said and "this process was forked from the one that has the optimizer's state" in said
    assert "build optimizers here after the fork" in said
    step(optimizer, parameter)  # the parent goes on


def test_a_child_may_build_its_own() -> None:
    parameter = nn.Parameter(torch.ones(1024, NUMEL // 1024))
    step(longshore.AdamW([parameter]), parameter)

    def child() -> float:
        own = longshore.AdamW([parameter], lr=0.5, weight_decay=0.0)
        before = float(parameter[0, 0].detach())
        step(own, parameter)
        return before - float(parameter[0, 0].detach())

    assert float(in_child(child)) == pytest.approx(0.5)
