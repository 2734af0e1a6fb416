"""An engine that is gone, or was destroyed, has given its memory back, without the garbage collector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from freed import private_bytes, without_collector
from ranks import Ranks
from torch import nn

import longshore
from engine import freed_cases
from engine.freed_cases import LONG, SHORT, configuration, train

Use = Callable[[Any, Path], None]


@pytest.fixture(autouse=True, scope="module")
def first() -> None:
    """torch imports much for the first optimizer of a process, and keeps the frames of that in cycles of its own."""
    longshore.AdamW(nn.Linear(1, 1).parameters())


def saved(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, "one")
    engine.load_checkpoint(folder, "one")
    engine.save_checkpoint(folder, "two", async_save=True)
    train(engine)
    engine.wait_for_checkpoint()


def broke_off(engine: Any, folder: Path) -> None:
    hook = next(engine.module.parameters()).register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(engine)
    hook.remove()
    engine.zero_grad()
    train(engine)


def looked_at(engine: Any, folder: Path) -> None:
    engine.explain(False)
    longshore.utils.safe_get_full_fp32_param(next(engine.module.parameters()))
    kept = engine.save_checkpoint, engine.load_checkpoint
    del kept


USES: dict[str, Use | None] = {"nothing": None, "saved": saved, "broke_off": broke_off, "looked_at": looked_at}
KINDS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "bf16": {"states": "bf16"},
    "8 bits": {"states": "8bit"},
    "ahead": {"super_offload": True},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "schedule": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
    "client": {"client": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("destroyed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_memory_comes_back(kind: str, destroyed: bool) -> None:
    with without_collector():
        before = private_bytes()
        engine = freed_cases.start(**KINDS[kind])
        train(engine)
        assert private_bytes() - before >= 2 * LONG * SHORT
        model, optimizer = engine.module, engine.optimizer
        if destroyed:
            engine.destroy()  # while the engine and its optimizer are kept
        else:
            del engine, optimizer
        assert private_bytes() == before
        assert bool(next(model.parameters()).isfinite().all())


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("use", [name for name in USES if name != "nothing"])
def test_whatever_was_done_with_it(use: str, stage: int, tmp_path: Path) -> None:
    with without_collector():
        before = private_bytes()
        engine = freed_cases.start(stage=stage)
        train(engine)
        call = USES[use]
        assert call is not None
        call(engine, tmp_path)
        assert private_bytes() > before
        del engine
        assert private_bytes() == before


def test_a_call_on_an_engine_that_nobody_else_has(tmp_path: Path) -> None:
    freed_cases.start().save_checkpoint(tmp_path, "t")
    save = freed_cases.start().save_checkpoint
    save(tmp_path, "u")
    assert (tmp_path / "t").is_dir() and (tmp_path / "u").is_dir()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_destroy_state_is_gone_and_every_call_says_so(stage: int, tmp_path: Path) -> None:
    engine = freed_cases.start(stage=stage)
    train(engine)
    optimizer, parameter = engine.optimizer, next(engine.module.parameters())
    saved = optimizer.state_dict()
    engine.destroy()
    engine.destroy()
    assert {entry.step for entry in engine.explain(False).parameters} == {2}
    calls: dict[str, Callable[[], Any]] = {
        "engine.step": engine.step,
        "engine.backward": lambda: engine.backward(parameter.sum()),
        "engine.zero_grad": engine.zero_grad,
        "optimizer.step": optimizer.step,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.state": lambda: optimizer.state[parameter]["exp_avg"],
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(saved),
        "engine.save_checkpoint": lambda: engine.save_checkpoint(tmp_path, "t"),
        "safe_get_full_fp32_param": lambda: longshore.utils.safe_get_full_fp32_param(parameter),
    }
    for call in calls.values():
        parameter.grad = torch.ones_like(parameter)
        weights = parameter.detach().clone()
        with pytest.raises(longshore.LongshoreError, match=r"engine\.destroy\(\) was called.*initialize\(\) again"):
            call()
        assert torch.equal(parameter, weights)
    parameter.grad = None
    second = longshore.initialize(model=engine.module, config=configuration(stage=stage)).engine
    train(second)
    assert longshore.utils.safe_get_full_fp32_param(parameter) is not None
    second.destroy()


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_refused_step_keeps_nothing_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    """Not even in the traceback of its error, which the other rank is told of."""
    assert two_ranks(freed_cases.refused, stage) == [False, False]


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(freed_cases.destroyed, stage) == [0, 0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_whose_step_broke_half_way(stage: int) -> None:
    assert freed_cases.broke_half_way(stage) == 0


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(freed_cases.broke_half_way, stage) == [0, 0]
