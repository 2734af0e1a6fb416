"""Dtypes, autocast and loss scales, asked for in a DeepSpeed file."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from support import PlainLoop, batch, loss_of, small_model
from torch import Tensor, nn

from engine import precision_cases
from engine.files import OPTIONS, assert_same, file, gradients_of, started, train
from longshore.engine.config import ConfigError, LossScaling
from longshore.engine.precision import DynamicLossScale, LossScaleError, make_loss_scale
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


def dynamic(**settings: Any) -> DynamicLossScale:
    policy = make_loss_scale(LossScaling(**settings))
    assert isinstance(policy, DynamicLossScale)
    return policy


def values(policy: Any, overflows: str) -> list[float]:
    """The scale after each window; ``x`` overflows, ``.`` does not."""
    seen = []
    for each in overflows:
        policy.update(each == "x")
        seen.append(policy.value)
    return seen


def powers(policy: Any, overflows: str) -> list[float]:
    return [math.log2(value) for value in values(policy, overflows)]


def test_it_starts_at_the_power_of_two() -> None:
    assert dynamic().value == 65536.0
    assert dynamic(initial_scale_power=3).value == 8.0


def test_an_overflow_halves_once_the_hysteresis_is_used_up() -> None:
    # The first of two is forgiven; from then on every one halves.
    assert powers(dynamic(hysteresis=2), "xx.xx") == [16, 15, 15, 14, 13]
    assert powers(dynamic(hysteresis=3), "xxx") == [16, 16, 15]
    assert powers(dynamic(hysteresis=1), "x") == [15]


def test_consecutive_hysteresis_is_refilled_by_a_window_without_overflow() -> None:
    assert powers(dynamic(hysteresis=2, consecutive_hysteresis=True), "xx.x.x.xx") == [
        16, 15, 15, 15, 15, 15, 15, 15, 14,
    ]  # fmt: skip


def test_it_doubles_after_a_window_without_overflow() -> None:
    # DeepSpeed's count: the first doubling of a run comes one window late.
    assert powers(dynamic(window=3), "........") == [16, 16, 16, 17, 17, 17, 18, 18]
    assert powers(dynamic(window=2, hysteresis=1), "..x......") == [16, 16, 15, 15, 15, 16, 16, 17, 17]


def test_doubling_refills_the_hysteresis() -> None:
    assert powers(dynamic(window=2, hysteresis=2), "x...x") == [16, 16, 16, 17, 17]


def test_overflow_at_the_minimum_raises_and_changes_nothing() -> None:
    policy = dynamic(initial_scale_power=2, hysteresis=1, min_scale=1.5)
    assert values(policy, "xx") == [2.0, 1.5]
    before = policy.state_dict()
    for _ in range(2):
        with pytest.raises(
            LossScaleError, match=r"window 2 .* 1\.5, which is min_loss_scale.*no weight changed.*lower"
        ):
            policy.update(True)
    assert policy.state_dict() == before
    policy.update(False)
    assert policy.value == 1.5


def test_it_stays_a_finite_float32() -> None:
    assert values(dynamic(initial_scale_power=126, window=1), "." * 9)[-1] == 2.0**127


def test_the_other_policies_never_change() -> None:
    for scaling, value, skips in ((None, 1.0, False), (LossScaling(scale=128), 128.0, True)):
        policy = make_loss_scale(scaling)
        assert set(values(policy, "x.xx.")) == {value}
        assert policy.skips_overflow is skips
        policy.load_state_dict(policy.state_dict())
    assert dynamic().skips_overflow


settings = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(2, 30),
        "window": st.integers(1, 6),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_scale": st.sampled_from([0.25, 1.0, 3.0]),
    }
)


class Oracle:
    """The rule in its shortest form: replay of the whole history."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.history: list[bool] = []

    @property
    def value(self) -> float:
        at = self.settings
        scale, left, clean = 2.0 ** at["initial_scale_power"], at["hysteresis"], 0
        for overflow in self.history:
            if overflow:
                clean = 0
                if left == 1:
                    scale = max(scale / 2, at["min_scale"])
                left = max(1, left - 1)
                continue
            if at["consecutive_hysteresis"]:
                left = at["hysteresis"]
            # ``clean`` counts the windows before this one, so doubling comes one later.
            if clean > 0 and clean % at["window"] == 0:
                scale, left = scale * 2, at["hysteresis"]
            clean += 1
        return scale


@given(settings, st.lists(st.booleans(), max_size=60), st.integers(0, 60))
def test_any_history_also_across_a_save(settings: dict[str, Any], history: list[bool], saved_at: int) -> None:
    policy, oracle = dynamic(**settings), Oracle(**settings)
    for index, overflow in enumerate(history):
        if index == saved_at:
            state = policy.state_dict()
            policy = dynamic(**settings)
            policy.load_state_dict(state)
        at_minimum = policy.value == settings["min_scale"]
        try:
            policy.update(overflow)
        except LossScaleError:
            assert overflow and at_minimum
            return
        oracle.history.append(overflow)
        assert policy.value == oracle.value
        assert settings["min_scale"] <= policy.value < math.inf


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    settings: dict[str, Any] = {"window": 3, "hysteresis": 3}
    history = "..x......xx....x...."
    whole = values(dynamic(**settings), history)
    assert len(set(whole)) > 3
    resumed, seen = dynamic(**settings), []
    for each in history:
        state = resumed.state_dict()
        resumed = dynamic(**settings)
        resumed.load_state_dict(state)
        seen += values(resumed, each)
    assert seen == whole


def test_a_state_outside_the_settings_is_brought_to_the_bound() -> None:
    saved = dynamic(initial_scale_power=1, hysteresis=5).state_dict()
    policy = dynamic(min_scale=4.0, hysteresis=1)
    policy.load_state_dict(saved)
    assert policy.value == 4.0
    with pytest.raises(LossScaleError):
        policy.update(True)  # no hysteresis left over


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": -1.0}, "scale must be a finite number above 0"),
        ({"scale": math.nan}, "scale must be"),
        ({"windows": -1}, "no run leads to windows=-1"),
        ({"windows": 3, "last_overflow": 3}, "no run"),
        ({"hysteresis_left": 0}, "hysteresis_left"),
        ({"extra": 1}, "saved with another loss scale"),
    ],
)
def test_a_state_that_no_run_leads_to_is_refused_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    policy = dynamic()
    before = policy.state_dict()
    with pytest.raises(ValueError, match=words):
        policy.load_state_dict({**before, **change})
    assert policy.state_dict() == before


def test_policies_do_not_take_each_others_state() -> None:
    state = dynamic().state_dict()
    for policy in (make_loss_scale(None), make_loss_scale(LossScaling(scale=2))):
        with pytest.raises(ValueError, match="configure the same one"):
            policy.load_state_dict(state)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "128", 2.0**128])
def test_a_static_scale_that_is_none_is_refused(scale: Any) -> None:
    with pytest.raises(ConfigError, match=r"scale = .*: must be a number above 0 and at most 1\.70141e\+38"):
        LossScaling(scale=scale)


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong: dict[str, Any] = {
        "initial_scale_power": 128,
        "window": 0,
        "hysteresis": 1.5,
        "consecutive_hysteresis": "no",
        "min_scale": 0,
    }
    with pytest.raises(ConfigError) as caught:
        LossScaling(**wrong)
    found = {problem.path: problem for problem in caught.value.problems}
    assert {name: problem.value for name, problem in found.items()} == wrong
    assert all("must be" in problem.what for problem in found.values())
    with pytest.raises(ConfigError, match=r"above the first scale, 2 \*\* 1 = 2"):
        LossScaling(initial_scale_power=1, min_scale=4)
