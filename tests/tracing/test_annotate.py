"""longshore.annotate: ranges for profilers on every track, and the same weights."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import longshore
from longshore.tiles import Ranges


def make(offload: longshore.Offload | None = None) -> tuple[nn.Module, longshore.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 9))
    offload = offload or longshore.Offload(
        tile_numel=200, transfer=longshore.SimulatedTransfer(seed=1), speculation_memory="100%"
    )
    return model, longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=offload)


def train(model: nn.Module, optimizer: longshore.AdamW, windows: int = 2) -> None:
    for seed in range(windows):
        model(torch.full((3, 16), 0.1 * seed)).pow(2).sum().backward()
        optimizer.clip_grad_norm_(1e6)
        optimizer.step()
        optimizer.zero_grad()


def seen(work: Any) -> dict[int, Counter[str]]:
    """The names of our ranges, without tiles, by thread."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        work()
    threads: dict[int, Counter[str]] = {}
    for event in profiler.events() or ():
        if event.name.startswith("longshore: "):
            threads.setdefault(event.thread, Counter())[event.name.partition(", tile")[0]] += 1
    return threads


def test_ranges_by_thread() -> None:
    (model, optimizer), (plain_model, plain) = make(), make()
    train(model, optimizer)

    def work() -> None:
        with longshore.annotate(optimizer):
            train(model, optimizer)

    for _ in range(2):
        train(plain_model, plain)

    threads = seen(work)
    every = sum(threads.values(), Counter())
    assert every["longshore: norm"] == 2
    assert every["longshore: publish"] and every["longshore: copy to host"]
    assert every["longshore: step ahead"] + every["longshore: step in place"] >= 2 * len(
        optimizer._core.members.store.tiles
    )
    host = [names for names in threads.values() if names["longshore: host"]]
    assert len(host) == 1 and not host[0]["longshore: norm"], "the worker's own thread"
    assert optimizer._core.members.store.tiles.recorders == ()
    assert all(map(torch.equal, model.parameters(), plain_model.parameters()))
    assert seen(lambda: train(model, optimizer, 1)) == {}


def test_nvtx_is_balanced_on_each_thread_also_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    depth: Counter[int] = Counter()

    def push(_: str) -> None:
        depth[threading.get_ident()] += 1

    def pop() -> None:
        depth[threading.get_ident()] -= 1
        assert depth[threading.get_ident()] >= 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda _: None)
    ranges = Ranges()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda _: None)
    model, optimizer = make()
    optimizer._core.members.store.set_recorders([ranges])
    train(model, optimizer)
    assert depth and not any(depth.values())
    with ranges.working("host"):
        ranges.begin("copy to host", 0)  # whose copy raised
        ranges.span("norm", None, 0)  # that nobody began
    assert not any(depth.values())


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_ANNOTATE", "1")
    model, optimizer = make()
    assert sum(seen(lambda: train(model, optimizer)).values(), Counter())["longshore: norm"] == 2


def test_parameters_that_are_replaced_inside() -> None:
    """The optimizer then has another store."""
    model, other = nn.Linear(16, 24), nn.Linear(16, 24)
    optimizer = longshore.AdamW(other.parameters())
    with longshore.annotate(optimizer), longshore.trace(optimizer) as trace:
        optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer)
    assert trace.summary().steps == 2 and trace.summary().host_bytes_per_second
    assert optimizer._core.members.store.tiles.recorders == ()


def test_beside_a_trace() -> None:
    model, optimizer = make()
    with longshore.annotate(optimizer), longshore.trace(optimizer) as trace:
        train(model, optimizer)
    assert trace.summary().steps == 2 and optimizer._core.members.store.tiles.recorders == ()


def collectives() -> bool:
    torch.manual_seed(0)
    model = nn.Linear(16, 24)
    config = longshore.Config(stage=2, micro_batch_size=3, optimizer={"type": "AdamW"}, offload_device="cpu")
    engine = longshore.initialize(model=model, config=config).engine

    def work() -> None:
        with longshore.annotate(engine):
            engine.backward(engine(torch.ones(3, 16)).sum())
            engine.step()

    threads = seen(work)
    engine.destroy()
    tracks = [names for names in threads.values() if names["longshore: collectives"]]
    return len(tracks) == 1 and not tracks[0]["longshore: step in place"]


def test_the_thread_of_collectives(two_ranks: Ranks) -> None:
    assert two_ranks(collectives) == [True, True]


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"longshore\.annotate takes an engine"), longshore.annotate(nn.Linear(1, 1)):
        pass
