"""An optimizer that is gone has given its memory back, without the garbage collector."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from freed import private_bytes, steps_break_half_way, without_collector
from torch import nn

import longshore
from longshore import Offload, SimulatedTransfer
from longshore.tiles import Tiles

LONG, SHORT = 9216, 64
"""Sides of a matrix whose states are whole huge pages, in each format. A step of Muon costs the cube of the shorter."""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(LONG, SHORT), nn.Linear(SHORT, LONG, bias=False))


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        for _ in range(2):  # the sum has memory of its own
            model(torch.ones(1, LONG)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ahead(**settings: Any) -> dict[str, Any]:
    return {"release_gradients": True, "offload": Offload(speculation_memory="100%", **settings)}


def muon(model: nn.Module, **options: Any) -> Any:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    return longshore.Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=0.01, **options)


Make = Callable[[nn.Module], Any]
KINDS: dict[str, Make] = {
    "default": lambda model: longshore.AdamW(model.named_parameters()),
    "released": lambda model: longshore.AdamW(model.parameters(), release_gradients=True),
    "ahead": lambda model: longshore.AdamW(model.parameters(), **ahead()),
    "copied": lambda model: longshore.AdamW(model.parameters(), offload=Offload(transfer=SimulatedTransfer())),
    "copied ahead": lambda model: longshore.AdamW(model.parameters(), **ahead(transfer=SimulatedTransfer())),
    "divided": lambda model: longshore.AdamW(
        model.parameters(), offload=Offload(transfer=SimulatedTransfer(), ratio=0.5)
    ),
    "bf16": lambda model: longshore.AdamW(model.parameters(), offload=Offload(states="bf16")),
    "8 bits": lambda model: longshore.AdamW(model.parameters(), offload=Offload(states="8bit")),
    "muon": muon,
    "muon ahead": lambda model: muon(model, **ahead()),
    "client": lambda model: longshore.from_client(torch.optim.AdamW(model.parameters())),
    "client without a rule": lambda model: longshore.from_client(torch.optim.RMSprop(model.parameters())),
    "sgd": lambda model: longshore.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True, scope="module")
def first() -> None:
    """torch imports much for the first optimizer of a process, and keeps the frames of that in cycles of its own."""
    model = nn.Linear(1, 1)
    longshore.AdamW(model.parameters())


@pytest.mark.filterwarnings("ignore:torch.optim.RMSprop has no kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_all_memory_comes_back(kind: str) -> None:
    with without_collector():
        model, before = network(), private_bytes()
        optimizer = KINDS[kind](model)
        train(model, optimizer)
        assert private_bytes() - before >= 2 * LONG * SHORT
        del optimizer
        assert private_bytes() == before


def test_several_one_after_the_other_have_the_memory_of_one() -> None:
    with without_collector():
        model, most = network(), []
        for _ in range(3):
            optimizer = longshore.AdamW(model.parameters())
            train(model, optimizer)
            most.append(private_bytes())
            del optimizer
        assert most == most[:1] * 3


def closed(model: nn.Module, optimizer: Any, folder: Path) -> None:
    optimizer.close()


def state_read(model: nn.Module, optimizer: Any, folder: Path) -> None:
    kept = [dict(state) for state in optimizer.state.values()]
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    del kept


def saved(model: nn.Module, optimizer: Any, folder: Path) -> None:
    longshore.save(folder, model, optimizer, "t", async_save=True)
    train(model, optimizer)
    longshore.wait_for_checkpoint()
    longshore.load(folder, model, optimizer)


def scheduled(model: nn.Module, optimizer: Any, folder: Path) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    train(model, optimizer)
    schedule.step()


def clipped(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model(torch.ones(1, LONG)).square().mean().backward()
    optimizer.clip_grad_norm_(1.0)


def traced(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with longshore.trace(optimizer):
        train(model, optimizer)


def refused(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model(torch.ones(1, LONG)).sum().backward()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter).to_sparse()
    with pytest.raises(longshore.GradientError, match="steps dense gradients only"):
        optimizer.step()


def broke_off(model: nn.Module, optimizer: Any, folder: Path) -> None:
    hook = next(model.parameters()).register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer)
    hook.remove()
    optimizer.zero_grad()
    train(model, optimizer)


def left_failed(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """The window is neither discarded nor stepped."""
    optimizer.zero_grad()
    hook = next(model.parameters()).register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer)
    hook.remove()


def broke_half_way(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with steps_break_half_way(), pytest.raises(RuntimeError, match="no more"):
        train(model, optimizer)
    for _ in range(2):
        with pytest.raises(longshore.BrokenStateError, match=r"half way.*\(RuntimeError: no more\); load"):
            optimizer.step()


def loaded_half_way(model: nn.Module, optimizer: Any, folder: Path) -> None:
    longshore.save(folder, model, optimizer, "t")

    def fails(*_: Any) -> None:
        raise OSError("no more")

    cut = mock.patch("longshore.checkpoint.boxes.BoxReader._read", fails)
    with cut, pytest.raises(longshore.CheckpointError, match="no more"):
        longshore.load(folder, model, optimizer)
    with pytest.raises(longshore.BrokenStateError, match="in part only"):
        optimizer.step()


def grown(model: nn.Module, optimizer: Any, folder: Path) -> None:
    added = nn.Parameter(torch.ones(LONG, SHORT))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones_like(added)
    optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()


def copied(model: nn.Module, optimizer: Any, folder: Path) -> None:
    copy.deepcopy(optimizer).step()


def not_taken(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """A gradient does not reach the host, and the window is left so."""
    optimizer.zero_grad()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no way")

    with mock.patch.object(Tiles, "arrive", fails):
        model(torch.ones(1, LONG)).sum().backward()
    for _ in range(2):
        with pytest.raises(longshore.GradientError, match=r"parameter .*: RuntimeError: no way"):
            optimizer.step()


USES = [closed, state_read, saved, scheduled, clipped, traced, refused, broke_off, left_failed, broke_half_way]
USES += [loaded_half_way, grown, copied, not_taken]


@pytest.mark.medium
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_whatever_was_done_with_it(use: Callable[[nn.Module, Any, Path], None], release: bool, tmp_path: Path) -> None:
    if release and use in (refused, copied):
        pytest.skip("the gradient has left")
    if not release and use is not_taken:
        pytest.skip("the gradient stays")
    with without_collector():
        model, before = network(), private_bytes()
        optimizer = longshore.AdamW(model.parameters(), release_gradients=release)
        train(model, optimizer)
        use(model, optimizer, tmp_path)
        assert private_bytes() > before
        del optimizer
        model.zero_grad()
        assert private_bytes() == before


def test_its_thread_ends() -> None:
    with without_collector():
        model, threads = network(), set(threading.enumerate())
        optimizer = longshore.AdamW(model.parameters(), **ahead())
        train(model, optimizer)
        mine = [each for each in threading.enumerate() if each not in threads and each.name == "longshore-host"]
        assert mine
        del optimizer
        for thread in mine:
            thread.join(20)
        assert not any(thread.is_alive() for thread in mine)
