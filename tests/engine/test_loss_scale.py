from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.engine.config import ConfigError, LossScaling
from longshore.engine.precision import DynamicLossScale, LossScaleError, make_loss_scale


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
