"""Set-up that runs again, as a notebook's cell does: the former engine gives its parameters up, and says so if used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import longshore
from engine import again_cases as cases

STAGE_3 = pytest.param(3, marks=pytest.mark.needs_torch("stage 3"))
SAYS = "the gradients of parameter 0.weight go to another engine, or optimizer with release_gradients=True, that was"
SAYS_AT_3 = "LongshoreError: initialize() was called again for this model, which one engine has at stage 3: go on with"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_cell_that_runs_again(stage: int) -> None:
    cases.cell_run_again(stage)


@pytest.mark.parametrize("stage", [0, 2, STAGE_3])
def test_a_cell_that_runs_again_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.cell_run_again, stage)


def test_a_former_engine_that_is_kept() -> None:
    (said,) = cases.kept(2)
    assert said.startswith(f"GradientError: {SAYS}") and "call its destroy()" in said


@pytest.mark.parametrize("stage", [0, 2, STAGE_3])
def test_a_former_engine_that_is_kept_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    for (said,) in two_ranks(cases.kept, stage):
        assert said.startswith(SAYS_AT_3 if stage == 3 else f"GradientError: {SAYS}")
        assert "destroy()" in said


def test_engines_that_take_turns() -> None:
    cases.taking_turns(2)


@pytest.mark.parametrize("stage", [0, 2])
def test_engines_that_take_turns_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.taking_turns, stage)


def test_a_former_optimizer_that_is_kept() -> None:
    model, plain = cases.make(), cases.Plain()
    optimizers = []
    for turn in range(3):
        optimizers.append(longshore.AdamW(model.parameters(), release_gradients=True, **cases.OPTIONS))
        plain.new()
        for step in range(2):
            model(cases.batch(2 * turn + step, 0)).square().mean().backward()
            optimizers[-1].step()
            plain.step(2 * turn + step)
    plain.check(model)
    model(cases.batch(9, 0)).square().mean().backward()
    with pytest.raises(
        longshore.GradientError, match=r"that was made after this one: .* \(of an optimizer close\(\)\)"
    ):
        optimizers[0].step()
    optimizers[0].zero_grad()  # which leaves the new one's gradient alone
    optimizers[1].close()
    optimizers[2].step()
    plain.step(9)
    plain.check(model)
    optimizers[2].close()
    before = model[0].bias.detach().clone()
    model(cases.batch(10, 0)).square().mean().backward()
    optimizers[0].step()  # it has them again
    assert not torch.equal(model[0].bias, before)


def test_what_a_former_optimizer_has_alone_stays_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    former = longshore.SGD(model.parameters(), lr=1.0, release_gradients=True)
    newer = longshore.SGD(model[0].parameters(), lr=1.0, release_gradients=True)
    del newer
    model(torch.ones(1, 2)).sum().backward()
    before = model[0].bias.detach().clone()
    former.step()
    assert not torch.equal(model[0].bias, before)


class _Torchs(torch.optim.SGD):
    """A user's own subclass."""


@pytest.mark.parametrize("first", ["other", "released", "engine"])
@pytest.mark.parametrize("kind", ["default", "torch", "subclass"])
def test_an_optimizer_that_reads_grad_says_who_has_it_and_what_to_do(kind: str, first: str) -> None:
    """Beside one that takes gradients to the host, whichever of the two was made first."""
    makers: dict[str, Any] = {
        "default": lambda model: longshore.SGD(model.parameters(), lr=1.0),
        "torch": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "subclass": lambda model: _Torchs(model.parameters(), lr=1.0),
    }
    model: Any = cases.make()
    other: Any = makers[kind](model) if first == "other" else None
    owner: Any
    if first == "engine":
        owner = cases.engine_for(model, 0)
    else:
        owner = longshore.SGD(model.parameters(), lr=1.0, release_gradients=True)
    if other is None:
        other = makers[kind](model)
    model(cases.batch(0, 0)).square().mean().backward()
    before = model[0].bias.detach().clone()
    who = {"default": "in the default mode", "torch": r"torch\.optim\.sgd\.SGD, which", "subclass": "_Torchs, which"}
    with pytest.raises(
        longshore.LongshoreError, match=rf"weight.* is on the host.*{who[kind]}.* has the same|{who[kind]}"
    ):
        other.step()
    with pytest.raises(
        longshore.LongshoreError, match=r"call step\(\) of the other alone, or end the other \(destroy\(\)"
    ):
        other.step()
    assert torch.equal(model[0].bias, before)
    owner.step()
    assert not torch.equal(model[0].bias, before)
    owner.destroy() if first == "engine" else owner.close()
    other.zero_grad()
    model(cases.batch(1, 0)).square().mean().backward()
    before = model[0].bias.detach().clone()
    other.step()
    assert not torch.equal(model[0].bias, before)


def test_a_clip_of_torchs_inside_a_closure_is_told_as_one() -> None:
    model = cases.make()
    optimizer: Any = longshore.SGD(model.parameters(), lr=1.0, release_gradients=True)

    def closure() -> torch.Tensor:
        loss = model(cases.batch(0, 0)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    with pytest.raises(longshore.LongshoreError, match=r"With an optimizer alone, call optimizer\.clip_grad_norm_"):
        optimizer.step(closure)


def test_a_former_engine_in_the_middle_of_its_window_says_which_one_saves(tmp_path: Path) -> None:
    model = cases.make()
    former = cases.engine_for(model, 2)
    engine = cases.engine_for(model, 2)
    former.backward(former(cases.batch(0, 0)).square().mean())
    for call in (former.save_checkpoint, former.load_checkpoint):
        with pytest.raises(
            longshore.CheckpointError,
            match=r"the engine that a later initialize\(\) made for this model, which steps it",
        ):
            call(tmp_path)
    engine.zero_grad()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    former.zero_grad()
    former.load_checkpoint(tmp_path)
    former.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_that_was_destroyed_in_the_middle_of_its_window_says_so(stage: int, tmp_path: Path) -> None:
    engine = cases.engine_for(cases.make(), stage)
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(cases.batch(0, 0)).square().mean())
    engine.destroy()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(
            longshore.LongshoreError, match=r"^engine\.destroy\(\) was called.*call initialize\(\) again"
        ):
            call(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_only=True)  # which needs no optimizer
