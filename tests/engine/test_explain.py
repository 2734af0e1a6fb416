"""``engine.explain()``: the ledger of the last window, as data and as a page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from rich.console import Console
from support import loss_of, small_model
from torch import nn

from engine import explain_cases
from engine.files import file, started, train
from longshore.errors import LongshoreError

NUMELS = {"0.weight": 627, "0.bias": 33, "2.weight": 33, "2.bias": 33, "3.weight": 231, "3.bias": 7}


def test_before_and_after_a_step() -> None:
    with started(file(bf16={"enabled": True, "check_grad_overflow": False})) as engine:
        before = engine.explain(print_it=False)
        assert {row.name: row.numel for row in before.parameters} == NUMELS
        assert all((row.arrived, row.reduced, row.applied, row.step) == (0, 0, 0, 0) for row in before.parameters)
        assert (before.stage, before.rank, before.world_size, before.offload, before.buckets) == (0, 0, 1, "none", ())
        assert before.tiles > 1 and before.tile_numel <= 112
        train(engine, [loss_of(engine, 0, torch.bfloat16)])
        after = engine.explain(print_it=False)
        assert all((row.arrived, row.reduced, row.applied, row.step) == (1, 1, 1, 1) for row in after.parameters)
        assert all((row.dtype, row.bucket) == ("torch.bfloat16", None) for row in after.parameters)
        assert all(row.owners == ((0, row.numel),) for row in after.parameters)
        assert after.device_bytes == {"parameters": 2 * sum(NUMELS.values()), "gradients": 0}
        assert after.host_bytes == engine.optimizer.host_bytes()
        # Masters and two moments, in tiles that may end in padding.
        assert after.host_bytes["state"] >= 12 * sum(NUMELS.values())


def test_a_frozen_parameter_is_stepped_nowhere() -> None:
    with started(file()) as engine:
        engine.module[0].weight.requires_grad_(False)
        train(engine, [loss_of(engine, 0)])
        counts = {
            row.name: (row.arrived, row.reduced, row.applied) for row in engine.explain(print_it=False).parameters
        }
        assert counts["0.weight"] == (0, 0, 0) and counts["2.weight"] == (1, 1, 1)


def test_between_backward_and_step() -> None:
    """Gradients are on the host by then, and what stands for them is no memory."""
    with started(file()) as engine:
        engine.backward(loss_of(engine, 0))
        found = engine.explain(print_it=False)
        assert found.device_bytes == {"parameters": 4 * sum(NUMELS.values()), "gradients": 0}
        assert found.host_bytes["gradients"] == 4 * sum(NUMELS.values())
        engine.step()


def test_the_account_is_of_the_last_window() -> None:
    """Three backwards, one of which uses a part; then one in which nothing but a bias is used."""
    model = small_model()
    with started(file(gradient_accumulation_steps=3), model) as engine:
        engine.backward(loss_of(engine, 0))
        engine.backward(engine.module[3].bias.sum())
        engine.backward(loss_of(engine, 1))
        engine.step()
        counts = {row.name: (row.arrived, row.reduced, row.applied) for row in engine.explain(False).parameters}
        assert counts == {name: (3, 3, 1) if name == "3.bias" else (2, 2, 1) for name in NUMELS}
        for _ in range(3):
            engine.backward(engine.module[3].bias.sum())
        engine.step()
        rows = {row.name: row for row in engine.explain(False).parameters}
        assert (rows["3.bias"].arrived, rows["3.bias"].applied, rows["3.bias"].step) == (3, 1, 2)
        assert (rows["0.weight"].arrived, rows["0.weight"].applied, rows["0.weight"].step) == (0, 0, 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int, two_ranks: Ranks) -> None:
    found = two_ranks(explain_cases.ledger, stage)
    for rank, rows in enumerate(found):
        assert rows.pop("empty").owners == ()
        for name, row in rows.items():
            uses_head_b = name.startswith("heads.b")
            # Head b is used in one backward of two, on rank 1 only.
            arrived = (rank if uses_head_b else 2) if not name.startswith("heads.c") else 0
            owned = sum(numel for owner, numel in row.owners if owner == rank)
            assert row.arrived == arrived, name
            assert row.applied == int(not name.startswith("heads.c")), name
            if owned:
                rounds = 2 if stage >= 2 and not uses_head_b else 1
                assert row.reduced == (rounds if row.applied else 0), name
            else:
                assert row.reduced is None, name
            if stage == 0:
                assert row.owners == ((0, row.numel), (1, row.numel)), name
            else:
                assert sum(numel for _, numel in row.owners) == row.numel, name


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})) as engine:
        train(engine, [loss_of(engine, 0)])
        explanation = engine.explain()
    text = capsys.readouterr().out
    assert text.startswith(f"longshore: stage 1, rank 0 of 1, optimizer state on the host, {explanation.tiles} tiles")
    assert "host: state" in text and "device: parameters 3.8 KiB, gradients 0 B" in text
    for name, numel in NUMELS.items():
        (line,) = [line for line in text.splitlines() if f" {name} " in line]
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        assert cells == [name, str(numel), "", f"0: {numel}", "1", "1", "1", "1"]


def test_a_long_page_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with started(file(), model) as engine:
        console = Console(width=200, record=True)
        engine.explain(print_it=False).print(console)
        assert len(engine.explain(print_it=False).parameters) == 80
    text = console.export_text()
    assert "and 20 more parameters" in text
    assert "29.bias" in text and "30.weight" not in text


def test_a_gradient_that_would_be_lost_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is checked before anything is stepped."""
    model = small_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with started(file(), model) as engine:
        store = engine.optimizer._core.members.store
        agree, lost = store.agree, [True]

        def forgetful(*found: Any, **options: Any) -> Any:
            found = agree(*found, **options)
            return {index: value for index, value in found.items() if index != 3 or not lost[0]}

        monkeypatch.setattr(store, "agree", forgetful)
        engine.backward(loss_of(engine, 0))
        with pytest.raises(
            LongshoreError, match=r"parameter 2\.bias: 1 gradients arrived .* and 0 steps would be made"
        ):
            engine.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
        lost[0] = False
        engine.zero_grad()
        train(engine, [loss_of(engine, 1)])
        assert engine.was_step_applied()
