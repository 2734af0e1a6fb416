"""Dtypes, autocast and loss scales, asked for in a DeepSpeed file."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ranks import Ranks
from support import PlainLoop, batch, loss_of, small_model
from torch import Tensor, nn

from engine import precision_cases
from engine.files import OPTIONS, assert_same, file, gradients_of, started, train
from longshore.errors import GradientError

BF16 = {"enabled": True, "check_grad_overflow": False}


def losses_of(model: Any, step: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    return [loss_of(model, count * step + micro, dtype) for micro in range(count)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_bf16(accumulation: int) -> None:
    """The hand-written loop: gradients are added in float32, AdamW steps float32 masters, which are rounded."""
    dtype, twin = torch.bfloat16, small_model(torch.bfloat16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(bf16=BF16, gradient_accumulation_steps=accumulation)) as engine:
        assert {parameter.dtype for parameter in engine.module.parameters()} == {dtype}
        assert engine.loss_scale == 1.0
        for step in range(4):
            train(engine, losses_of(engine, step, accumulation, dtype))
            loop.step(gradients_of(twin, losses_of(twin, step, accumulation, dtype)))
            assert_same(engine.module, twin, step)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_fp16(accumulation: int) -> None:
    dtype, twin = torch.float16, small_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    config = file(fp16={"enabled": True, "initial_scale_power": 5}, gradient_accumulation_steps=accumulation)
    with started(config) as engine:
        assert {parameter.dtype for parameter in engine.module.parameters()} == {dtype}
        assert engine.loss_scale == engine.cur_scale == 32.0
        for step in range(4):
            train(engine, losses_of(engine, step, accumulation, dtype))
            assert engine.was_step_applied()
            loop.step(gradients_of(twin, losses_of(twin, step, accumulation, dtype), 32.0), 1 / 32)
            assert_same(engine.module, twin, step)


def test_buffers_and_integers_keep_their_dtype() -> None:
    model = small_model()
    model.register_buffer("positions", torch.arange(3))
    model.register_buffer("table", torch.ones(3))
    with started(file(bf16=BF16), model):
        assert (model.positions.dtype, model.table.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("scale", [64.0, 100.0])
def test_static_loss_scale(scale: float) -> None:
    """It never changes; a window that overflows is skipped and leaves every bit as it was."""
    dtype, twin = torch.float16, small_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(fp16={"enabled": True, "loss_scale": scale, "hysteresis": 1})) as engine:
        for step in range(4):
            overflows = step == 1
            train(engine, [loss_of(engine, step, dtype) * (1e9 if overflows else 1.0)])
            assert engine.was_step_applied() is not overflows
            assert engine.loss_scale == scale
            if not overflows:
                loop.step(gradients_of(twin, [loss_of(twin, step, dtype)], scale), 1 / scale)
            assert_same(engine.module, twin, step)
        assert (engine.skipped_steps, engine.global_steps, engine.micro_steps) == (1, 4, 4)


class Course(NamedTuple):
    """Windows of a dynamic scale from 16 down to 4, doubled after two good windows, with a hysteresis of 2.

    ``overflows``: o where rank 1's gradients overflow; ``scales``: after each window, worked out by hand.
    """

    consecutive: bool
    overflows: str
    scales: list[float]


COURSES = [
    Course(False, "oo...o.oo", [16, 8, 8, 8, 16, 16, 16, 8, 4]),
    # The good window between the later overflows gives them the whole hysteresis again.
    Course(True, "oo...o.ooo", [16, 8, 8, 8, 16, 16, 16, 16, 8, 4]),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage, course", [(0, COURSES[1]), (1, COURSES[0]), (2, COURSES[0]), (2, COURSES[1])])
def test_dynamic_loss_scale(stage: int, course: Course, two_ranks: Ranks) -> None:
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2,
               "consecutive_hysteresis": course.consecutive, "min_loss_scale": 4}  # fmt: skip
    for found in two_ranks(precision_cases.overflows, section, stage, course.overflows):
        assert found["scales"] == course.scales
        assert found["applied"] == [window == "." for window in course.overflows]
        assert found["skipped"] == course.overflows.count("o") + 1  # and the one at the minimum
        assert "min_loss_scale" in found["at the minimum"]


def test_the_scale_is_that_of_the_window() -> None:
    """A scale that changes after a step is the next window's; the window before was divided by its own."""
    twin = small_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    section = {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 1}
    with started(file(fp16=section)) as engine:
        scales = []
        for step in range(4):
            scale = engine.loss_scale
            scales.append(scale)
            train(engine, [loss_of(engine, step, torch.float16)])
            loop.step(gradients_of(twin, [loss_of(twin, step, torch.float16)], scale), 1 / scale)
            assert_same(engine.module, twin, step)
    assert scales == [8, 8, 16, 32]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bf16_overflow_check(check: bool, bad: float) -> None:
    """With the check the step is skipped; without, what is not finite is applied as torch applies it."""
    dtype, twin = torch.bfloat16, small_model(torch.bfloat16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(bf16={"enabled": True, "check_grad_overflow": check})) as engine:
        for step, factor in enumerate((1.0, bad, 1.0)):
            train(engine, [loss_of(engine, step, dtype) * factor])
            if factor == 1.0 or not check:
                loop.step(gradients_of(twin, [loss_of(twin, step, dtype) * factor]))
            for (name, ours), theirs in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(ours.isnan(), theirs.isnan()), name
                assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), name
            assert engine.was_step_applied() == (factor == 1.0 or not check)
        assert engine.skipped_steps == (1 if check else 0)
        assert any(parameter.isnan().any() for parameter in twin.parameters()) is not check
        assert engine.loss_scale == 1.0


@pytest.mark.parametrize("name, dtype", [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """``torch.autocast`` around forward; with float16 the loss is scaled like torch's scaler does."""
    twin = small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(torch_autocast={"enabled": True, "dtype": name})) as engine:
        assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
        scale = 2.0**16 if dtype == torch.float16 else 1.0
        assert engine.loss_scale == scale
        for step in range(3):
            out = engine(batch(step))
            assert out.dtype == dtype
            train(engine, [out.float().pow(2).mean()])
            assert engine.was_step_applied()
            with torch.autocast("cpu", dtype=dtype):
                out = twin(batch(step))
            loop.step(gradients_of(twin, [out.float().pow(2).mean()], scale), 1 / scale)
            assert_same(engine.module, twin, step)


class Inputs(NamedTuple):
    features: Tensor
    places: Tensor


class TakesMuch(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = (args, kwargs)
        return self.inner(args[0])


def test_cast_inputs() -> None:
    """Floating tensors are cast, wherever they are in what forward gets; nothing else is."""
    twin = small_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    model, mask = TakesMuch(), torch.tensor([True, False])
    with started(file(fp16={"enabled": True, "auto_cast": True, "loss_scale": 8}), model) as engine:
        for step in range(2):
            out = engine(batch(step), [batch(1), "text"], pair=Inputs(batch(2), torch.arange(3)), more={"mask": mask})
            train(engine, [out.float().pow(2).sum()])
            loop.step(gradients_of(twin, [loss_of(twin, step, torch.float16)], 8.0), 1 / 8)
            assert_same(model.inner, twin, step)
    (first, (listed, text)), keywords = model.seen
    pair, more = keywords["pair"], keywords["more"]
    assert isinstance(pair, Inputs)
    assert [entry.dtype for entry in (first, listed, pair.features)] == [torch.float16] * 3
    assert (text, pair.places.dtype, more["mask"].dtype) == ("text", torch.int64, torch.bool)
    assert torch.equal(pair.features, batch(2).half())


def test_without_auto_cast_inputs_stay_as_they_are() -> None:
    model = TakesMuch()
    with started(file(fp16={"enabled": True, "loss_scale": 8}), model) as engine:
        with pytest.raises(RuntimeError, match="dtype"):
            engine(batch(0))
        ((x,), _) = model.seen
        assert x.dtype == torch.float32


def test_a_raw_backward_has_to_be_scaled() -> None:
    dtype, twin = torch.float16, small_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(fp16={"enabled": True, "loss_scale": 128})) as engine:
        loss_of(engine, 0, dtype).backward()
        with pytest.raises(GradientError, match=r"loss scale \(128\).*engine\.scale\(loss\)"):
            engine.step()
        assert_same(engine.module, twin, "after the error")
        engine.zero_grad()
        for step in range(2):
            engine.scale(loss_of(engine, step, dtype)).backward()
            engine.step()
            loop.step(gradients_of(twin, [loss_of(twin, step, dtype)], 128.0), 1 / 128)
            assert_same(engine.module, twin, step)
        # Having scaled in an earlier window says nothing about this one.
        loss_of(engine, 2, dtype).backward()
        with pytest.raises(GradientError, match="without the loss scale"):
            engine.step()


def test_nothing_to_scale_is_scaled_by_nothing() -> None:
    with started(file()) as engine:
        loss = loss_of(engine, 0)
        assert engine.scale(loss) is loss
        assert engine.loss_scale == 1.0
