"""What the engine prints, where a DeepSpeed file asks for it."""

from __future__ import annotations

import re

import pytest
import torch
from ranks import Ranks
from support import loss_of, small_model

import longshore
from engine import logging_cases
from engine.files import file, started, train

TIMES = r", forward (\d+\.\d) ms, backward (\d+\.\d) ms, step (\d+\.\d) ms"


def lines(text: str) -> list[str]:
    return text.strip().splitlines() if text.strip() else []


def test_steps_per_print(capsys: pytest.CaptureFixture[str]) -> None:
    """A line every so many steps, skipped ones included; what there is to say and nothing else."""
    with started(file(steps_per_print=2)) as engine:
        assert engine.steps_per_print() == 2
        train(engine, (loss_of(engine, step) for step in range(5)))
    assert lines(capsys.readouterr().out) == ["step 2, skipped 0, lr 0.002", "step 4, skipped 0, lr 0.002"]
    with started(file(steps_per_print=float("inf"))) as engine:  # as Accelerate says never
        assert engine.steps_per_print() is None
        train(engine, (loss_of(engine, step) for step in range(2)))
    assert lines(capsys.readouterr().out) == []


def test_the_rate_is_that_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule goes on after it."""
    seen = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with started(file(steps_per_print=1), lr_scheduler=schedule) as engine:
        train(engine, (loss_of(engine, step) for step in range(3)))
    assert seen == [0.002, 0.001, 0.0005]
    assert lines(capsys.readouterr().out) == [f"step {n}, skipped 0, lr {rate:g}" for n, rate in enumerate(seen, 1)]


def test_the_line_has_the_norm_and_the_loss_scale(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(steps_per_print=1, gradient_clipping=1.0, fp16={"enabled": True, "loss_scale": 64})) as engine:
        norms = []
        for factor in (1.0, 1e9):
            train(engine, [loss_of(engine, 0, torch.float16) * factor])
            norms.append(engine.get_global_grad_norm())
    first, second = lines(capsys.readouterr().out)
    assert first == f"step 1, skipped 0, lr 0.002, gradient norm {norms[0]:.4g}, loss scale 64"
    assert second == f"step 2, skipped 1, lr 0.002, gradient norm {norms[1]:.4g}, loss scale 64"


def test_steps_that_are_not_due_are_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(steps_per_print=1, gradient_accumulation_steps=3)) as engine:
        train(engine, (loss_of(engine, step) for step in range(7)))
    assert len(lines(capsys.readouterr().out)) == 2


def test_nothing_is_printed_where_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(wall_clock_breakdown=True)) as engine:  # times of a line that is not there
        train(engine, [loss_of(engine, 0)])
    with started(file()) as engine:
        train(engine, [loss_of(engine, 0)])
    assert capsys.readouterr() == ("", "")


def test_wall_clock_breakdown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's time is a mean over the steps of the line, and begins anew after it."""
    now = [0.0]
    monkeypatch.setattr("longshore.engine.monitoring.time.perf_counter", lambda: now[0])
    model = small_model()
    model[0].register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 0.010))
    model[3].bias.register_hook(lambda _: now.__setitem__(0, now[0] + 0.020))
    with started(file(steps_per_print=2, wall_clock_breakdown=True), model) as engine:
        engine.optimizer.register_step_post_hook(lambda *_: now.__setitem__(0, now[0] + 0.030))
        train(engine, (loss_of(engine, step) for step in range(4)))
    printed = lines(capsys.readouterr().out)
    assert len(printed) == 2
    for line in printed:
        found = re.search(TIMES, line)
        assert found is not None and found.groups() == ("10.0", "20.0", "30.0"), line


def test_dump_state(capsys: pytest.CaptureFixture[str]) -> None:
    """``explain()`` when the engine is made."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with started(file(dump_state=True, zero_optimization=zero)) as engine:
        printed = capsys.readouterr().out
        engine.explain()
        assert printed == capsys.readouterr().out
    assert "longshore: stage 2, rank 0 of 1, optimizer state on the host" in printed
    for name, _ in small_model().named_parameters():
        assert name in printed


def test_only_rank_0_prints(two_ranks: Ranks) -> None:
    first, second = two_ranks(logging_cases.printed)
    assert "rank 0 of 2" in first and "step 1, skipped 0" in first and re.search(TIMES, first)
    assert second == ""


def test_a_file_that_says_nothing_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="gradient_clipping is not given"):
        engine = longshore.initialize(
            model=small_model(), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
        ).engine
    train(engine, [loss_of(engine, 0)])
    engine.destroy()
    assert capsys.readouterr().out == ""
