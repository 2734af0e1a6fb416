"""Numbers below are worked out from the formulas by hand or in the test, not with the code under test.

That all five agree with DeepSpeed 0.19.8 to the last bit was checked in an environment that has it, over 144
parameter sets, three groups, 61 steps.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import longshore
from longshore.engine import schedules
from longshore.engine.config import ConfigError, load_config
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from longshore.engine.schedules import Schedule

pytestmark = pytest.mark.filterwarnings("ignore:Warmup.* gives all groups the learning rate")

LRS = (1e-2, 3e-3)


def optimizer_with(lrs: tuple[Any, ...] = LRS, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs]
    return kind(groups, lr=1.0, **options)


def make_schedule(name: str, params: dict[str, Any], optimizer: Any) -> Schedule:
    """As a script that builds the class, and as a configuration: both are the same."""
    made = getattr(schedules, name)(optimizer, **params)
    assert made.state_dict() == schedules.make_schedule(SCHEDULER_CONFIGS[name](**params), optimizer).state_dict()
    return made


def walk(name: str, params: dict[str, Any], steps: int, lrs: tuple[Any, ...] = LRS) -> list[list[float]]:
    """The rates of both groups at construction and after each of ``steps`` steps."""
    optimizer = optimizer_with(lrs)
    schedule = make_schedule(name, params, optimizer)
    assert isinstance(schedule, LRScheduler)
    seen = []
    for _ in range(steps + 1):
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def first(name: str, params: dict[str, Any], steps: int) -> list[float]:
    return [lrs[0] for lrs in walk(name, params, steps)]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_one_rate_for_groups_that_have_several(name: str) -> None:
    """Such as Muon's and AdamW's."""
    params = {"warmup_max_lr": 0.02, **({"total_num_steps": 2000} if "Decay" in name else {})}
    with pytest.warns(UserWarning, match=r"warmup_max_lr = 0.02, and they have .* of their own: give a list of 2"):
        walk(name, params, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(name, {**params, "warmup_max_lr": [0.02, 0.003]}, 1)


def test_linear_warmup_then_constant() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert first("WarmupLR", params, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rel=1e-15)


def test_warmup_is_logarithmic_by_default_and_ends_at_the_groups_own_rates() -> None:
    seen = walk("WarmupLR", {"warmup_num_steps": 8}, 10)
    for step, lrs in enumerate(seen):
        fraction = 0.0 if step == 0 else min(1.0, math.log(step) / math.log(8))
        assert lrs == pytest.approx([1e-2 * fraction, 3e-3 * fraction], rel=1e-14)
    assert seen[2][0] == pytest.approx(1e-2 / 3)  # log 2 / log 8
    assert seen[-1] == list(LRS)


def test_a_warmup_of_one_step_is_two() -> None:
    assert first("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 2.0}, 3) == [0.0, 0.0, 2.0, 2.0]


def test_warmup_then_decay_to_zero() -> None:
    params = {
        "total_num_steps": 8,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "warmup_min_lr": [0.0, 1.0],
        "warmup_max_lr": [1.0, 3.0],
    }
    fractions = [0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]
    assert walk("WarmupDecayLR", params, 10) == [[each, 1 + 2 * each] for each in fractions]


def test_warmup_then_cosine_to_the_floor() -> None:
    params = {
        "total_num_steps": 7,
        "warmup_num_steps": 3,
        "warmup_type": "linear",
        "warmup_min_ratio": 0.1,
        "cos_min_ratio": 0.2,
    }
    half = math.sqrt(0.5)
    ratios = [0.0, 0.1, 0.4, 0.7, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half), 0.2, 0.2]
    expected = [[lr * ratio for lr in LRS] for ratio in ratios]
    for seen, wanted in zip(walk("WarmupCosineLR", params, 8), expected, strict=True):
        assert seen == pytest.approx(wanted, rel=1e-14)


def test_the_range_test_grows_evenly_or_in_stairs() -> None:
    params = {"lr_range_test_min_lr": [1.0, 4.0], "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert walk("LRRangeTest", params, 4) == [[1, 4], [2.5, 10], [4, 16], [5.5, 22], [7, 28]]
    assert walk("LRRangeTest", {**params, "lr_range_test_staircase": True}, 4) == [
        [1, 4], [1, 4], [4, 16], [4, 16], [7, 28],
    ]  # fmt: skip


ONE_CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 5.0, "cycle_first_step_size": 4, "cycle_second_step_size": 2}


@pytest.mark.parametrize("name", ["LRRangeTest", "OneCycle"])
def test_a_step_to_an_iteration_is_deepspeeds(name: str) -> None:
    """The first step() is step(0); a schedule may be set back, and goes on from there."""
    params = ONE_CYCLE if name == "OneCycle" else {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 1}
    one_by_one, given = optimizer_with(), optimizer_with()
    counted, set_to = make_schedule(name, params, one_by_one), make_schedule(name, params, given)
    seen = []
    for iteration in range(5):
        for each in (one_by_one, given):
            each.step()
        counted.step()
        set_to.step(iteration)
        assert set_to.last_batch_iteration == counted.last_batch_iteration == iteration
        assert set_to.get_last_lr() == counted.get_last_lr() == [group["lr"] for group in given.param_groups]
        seen.append(set_to.get_last_lr())
    assert seen[1] != seen[2]
    set_to.step(batch_iteration=1)
    assert set_to.get_last_lr() == seen[1]
    set_to.step()
    assert set_to.get_last_lr() == seen[2]
    wrongs: list[Any] = [-1, 1.5, "1"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="takes an iteration, counted from 0"):
            set_to.step(wrong)


def test_one_cycle_goes_up_and_down_and_decays() -> None:
    params = {**ONE_CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5}
    seen = first("OneCycle", params, 10)
    assert seen == pytest.approx([1, 2, 3, 4, 5, 3, 1, 1 / 1.25, 1 / 1.5, 1 / 1.75, 1 / 2], rel=1e-14)
    assert first("OneCycle", ONE_CYCLE, 10)[6:] == [1.0] * 5  # no decay by default


def test_one_cycle_in_stairs() -> None:
    params = {**ONE_CYCLE, "cycle_first_step_size": 6, "cycle_second_step_size": 4, "cycle_first_stair_count": 2}
    assert first("OneCycle", params, 10) == [1, 1, 1, 3, 3, 3, 5, 3, 3, 1, 1]
    params["cycle_second_stair_count"] = 0
    assert first("OneCycle", params, 10)[6:] == pytest.approx([5, 4, 3, 2, 1], rel=1e-14)


def betas_of(params: dict[str, Any], steps: int) -> list[list[tuple[float, float]]]:
    optimizer = optimizer_with()
    schedule = make_schedule("OneCycle", {**ONE_CYCLE, **params}, optimizer)
    seen = []
    for _ in range(steps + 1):
        seen.append([group["betas"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    seen = betas_of(
        {"cycle_min_mom": [0.5, 0.6], "cycle_max_mom": 0.9, "decay_mom_rate": -0.5, "decay_step_size": 4}, 8
    )
    firsts = [betas[0][0] for betas in seen]
    assert firsts == pytest.approx([0.5, 0.8, 0.7, 0.6, 0.5, 0.7, 0.9, 0.9 * 0.875, 0.9 * 0.75], rel=1e-14)
    assert [betas[1][0] for betas in seen[:5]] == pytest.approx([0.6, 0.825, 0.75, 0.675, 0.6], rel=1e-14)
    assert {beta2 for betas in seen for _, beta2 in betas} == {0.99}


def test_one_cycle_leaves_momentum_alone_when_asked_or_when_there_is_none() -> None:
    assert betas_of({"cycle_momentum": False}, 3) == [[(0.9, 0.999)] * 2] * 4
    sgd = optimizer_with(kind=torch.optim.SGD, momentum=0.7)
    make_schedule("OneCycle", ONE_CYCLE, sgd)
    assert [group["momentum"] for group in sgd.param_groups] == [0.7, 0.7]
    with pytest.raises(ValueError, match="cycle_momentum = true: SGD has groups without betas: set it to false"):
        make_schedule("OneCycle", {**ONE_CYCLE, "cycle_momentum": True}, sgd)


def test_a_momentum_that_decays_out_of_range_raises() -> None:
    with pytest.raises(ValueError, match=r"after 7 steps, decay_mom_rate=0.5 makes betas\[0\] of group 0 1.35"):
        betas_of({"decay_mom_rate": 0.5, "decay_step_size": 1}, 8)


CASES = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {**ONE_CYCLE, "decay_step_size": 1, "decay_lr_rate": 0.1},
    "WarmupLR": {"warmup_num_steps": 9},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 2000},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 2000},
}


@pytest.mark.parametrize("name", SCHEDULER_CONFIGS)
def test_a_saved_state_goes_on_as_if_never_stopped(name: str) -> None:
    whole = walk(name, CASES[name], 12)
    assert len({lrs[0] for lrs in whole}) > 3
    for theirs in (False, True):
        optimizer = optimizer_with()
        schedule = make_schedule(name, CASES[name], optimizer)
        for _ in range(5):
            optimizer.step()
            schedule.step()
        state = {"last_batch_iteration": 4} if theirs else schedule.state_dict()
        # Other rates than it began with: a resumed run takes up those of the saved one.
        resumed = optimizer_with(LRS if theirs else (7.0, 7.0))
        fresh = make_schedule(name, CASES[name], resumed)
        fresh.load_state_dict(state)
        assert fresh.get_last_lr() == whole[5]
        for lrs in whole[6:]:
            resumed.step()
            fresh.step()
            assert [group["lr"] for group in resumed.param_groups] == lrs


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"last_epoch": 3}, "give what state_dict"),
        ({}, "give what state_dict"),
        ({"last_epoch": 3, "base_lrs": [1.0]}, "has 1 groups, and the optimizer has 2"),
        ({"last_batch_iteration": "3"}, "this count is '3'"),
        ({"last_batch_iteration": -2}, "this count is -1"),
    ],
)
def test_another_state_is_refused(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule("WarmupLR", {}, optimizer_with()).load_state_dict(state)


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.5)
    optimizer = optimizer_with((rate,))
    schedule = make_schedule("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.0
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert float(rate) == 0.25
    assert schedule.state_dict()["base_lrs"] == [0.5]


def test_it_drives_our_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = longshore.AdamW([parameter], lr=1.0, weight_decay=0.0)
    schedule = make_schedule("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": 0.25}, optimizer)
    moved = []
    for _ in range(3):
        parameter.grad = torch.ones(2)
        before = parameter.detach().clone()
        optimizer.step()
        schedule.step()
        moved.append(float((before - parameter.detach())[0]))
    assert moved == pytest.approx([0.0, 0.0, 0.25], abs=1e-6)


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_run_that_ends_within_its_warmup_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="total_num_steps 5 is below warmup_num_steps, which is 9"):
        make_schedule(name, {"total_num_steps": 5, "warmup_num_steps": 9}, optimizer_with())


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {
        "cycle_min_lr": "1e-4",
        "cycle_mx_lr": 1.0,
        "cycle_min_mom": [0.1, 1.0],
        "cycle_first_step_size": 0,
        "cycle_momentum": 1,
        "decay_step_size": math.inf,
        "last_batch_iteration": 7,
    }
    optimizer = optimizer_with()
    with pytest.raises(ConfigError) as caught:
        make_schedule("OneCycle", wrong, optimizer)
    for line in (
        'cycle_min_lr = "1e-4": must be a number of at least 0',
        'cycle_mx_lr = 1.0: is not a field of OneCycleConfig; did you mean "cycle_max_lr"?',
        "cycle_max_lr: is missing, and has no default; set it",
        "cycle_min_mom = [0.1, 1.0]: must be a number of at least 0 and below 1, or a list, each",
        "cycle_first_step_size = 0: must be an integer of at least 1",
        "cycle_momentum = 1: must be true or false",
        "decay_step_size = Infinity: must be an integer of at least 0",
        "last_batch_iteration = 7: must be -1: to go on in the middle",
    ):
        assert line in str(caught.value)
    assert str(caught.value).startswith("OneCycle has 8 problems:")
    assert [group["lr"] for group in optimizer.param_groups] == list(LRS)


@pytest.mark.parametrize("by_name", [False, True])
def test_lists_have_one_value_for_each_group(by_name: bool) -> None:
    params = {**ONE_CYCLE, "cycle_max_mom": [0.1, 0.2, 0.3]}
    made = SCHEDULER_CONFIGS["OneCycle"](**params)
    make = schedules.make_schedule if by_name else lambda _, optimizer: schedules.OneCycle(optimizer, **params)
    with pytest.raises(ConfigError, match=r"cycle_max_mom = .*lists 3 values, and the optimizer has 2 groups"):
        make(made, optimizer_with())


@pytest.mark.parametrize(
    ("name", "params", "path", "words"),
    [
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type", 'one of "log", "linear"'),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps", "an integer of at least 1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps", "an integer of at least 1"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr", "a number of at least 0"),
        ("WarmupCosineLR", {}, "total_num_steps", "is missing"),
        ("OneCycle", {**ONE_CYCLE, "decay_mom_rate": -0.1}, "(all fields)", "would never decay"),
        ("OneCycle", {**ONE_CYCLE, "last_batch_iteration": True}, "last_batch_iteration", "must be -1"),
    ],
)
def test_one_problem(name: str, params: Any, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(name, params, optimizer_with())
    (problem,) = caught.value.problems
    assert problem.path == path and words in problem.what


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("warmup_lr", 'did you mean "WarmupLR"'),
        (None, "is missing"),
        ("LambdaLR", r"torch's included, construct it and pass it as initialize\(lr_scheduler=\.\.\.\)"),
        ("CosineAnnealingLR", "torch's included, construct it"),
        ("ReduceLROnPlateau", "takes a metric"),
    ],
)
def test_other_schedules_of_a_configuration_are_refused(name: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.type.*{words}"):
        load_config({"train_batch_size": 1, "scheduler": {"type": name, "params": {}}})


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, not list"):
        make_schedule("WarmupLR", {}, [])  # type: ignore[arg-type]


# -- what scripts read of DeepSpeed's schedules; the numbers are those of DeepSpeed 0.19.8 -------------------------


def stepped(schedule: Any, steps: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer was not stepped
        for _ in range(steps):
            schedule.step()
    return schedule


def adam(lr: float = 1.0) -> Any:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1)) for _ in range(2)], lr=lr)


def test_bounds() -> None:
    warmup = schedules.WarmupLR(adam(), 0.1, 0.5)
    assert (warmup.min_lrs, warmup.max_lrs, warmup.warmup_num_steps) == ([0.1], [0.5], 1000)
    decay = schedules.WarmupDecayLR(adam(), 100, 0.1, 0.5, 10)
    assert (decay.min_lrs, decay.max_lrs, decay.total_num_steps) == ([0.1], [0.5], 100)
    assert schedules.WarmupLR(adam(0.3)).max_lrs == [0.3]
    cycle = schedules.OneCycle(adam(), 0.1, 1.0)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.cycle_momentum) == ([0.1], [1.0], True)


def test_ratio_of_the_cosine() -> None:
    schedule = schedules.WarmupCosineLR(adam(), 100, warmup_num_steps=4)
    for steps, ratio in ((0, 0.0), (2, 0.5), (10, 0.9829646168532197)):
        assert stepped(schedule, steps).get_lr_ratio() == ratio and schedule.get_last_lr() == [ratio]


def test_momentum_of_the_cycle() -> None:
    schedule = schedules.OneCycle(adam(), 0.1, 1.0, 0.1, 4, decay_step_size=10)
    # DeepSpeed answers with where the cycle begins, and gives the groups its other end for the first step.
    assert schedule.get_mom() == [(0.9, 0.99)] and schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for steps, momentum in ((2, 0.8500000000000001), (12, 0.9)):
        assert stepped(schedule, steps).get_mom() == [(momentum, 0.99)]
        assert schedule.optimizer.param_groups[0]["betas"] == (momentum, 0.99)
    assert schedules.OneCycle(adam(), 0.1, 1.0, cycle_momentum=False).get_mom() is None


@pytest.mark.parametrize("name", ["get_mom", "get_lr_ratio", "cycle_momentum", "type", "nothing"])
def test_other_kinds_do_not_have_them(name: str) -> None:
    schedule = schedules.WarmupLR(adam())
    assert not hasattr(schedule, name)
    with pytest.raises(AttributeError, match=f"'WarmupLR' object has no attribute '{name}'"):
        getattr(schedule, name)
    assert not hasattr(schedules.LRRangeTest(adam()), "min_lrs")
