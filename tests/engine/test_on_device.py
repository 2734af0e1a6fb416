"""The table that must hold, with the model on an accelerator."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from on_device import compiles_triton, device_type
from ranks import RankFailure, Ranks, group_cases

import longshore
from engine import cases, failure_cases, resting_cases
from engine.scenarios import SCENARIOS
from engine.test_table import LONG, needs_muon

pytestmark = pytest.mark.gpu

COLUMNS = {
    "scenario": [name for name in SCENARIOS if name != LONG],
    "dtype": list(cases.DTYPES),
    "ahead": list(cases.AHEAD),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(tuple(COLUMNS), list(itertools.product(*COLUMNS.values())))
def test_one_rank(scenario: str, dtype: str, ahead: str) -> None:
    result = cases.run(scenario, 0, "device", "small", dtype, ahead, 1)
    assert result["steps"] == SCENARIOS[scenario].steps


@pytest.mark.covering(1)
@pytest.mark.parametrize(tuple(COLUMNS), list(itertools.product(*COLUMNS.values())))
def test_one_rank_with_parameters_on_the_host(scenario: str, dtype: str, ahead: str) -> None:
    result = cases.run(scenario, 3, "device streamed", "small", dtype, ahead, 1)
    assert result["steps"] == SCENARIOS[scenario].steps


@needs_muon
@pytest.mark.covering(1)
@pytest.mark.parametrize("ahead", ["off", "mixed"])
@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("stage, place", [*((stage, "device") for stage in range(4)), (3, "device streamed")])
@pytest.mark.parametrize(
    "scenario", ["alternating heads", "groups that differ in everything", "writes that torch cannot see"]
)
def test_muon(scenario: str, stage: int, place: str, dtype: str, ahead: str, two_devices: Ranks) -> None:
    """Newton-Schulz runs on the device, and the rest of Muon's step on the host."""
    two_devices(cases.run, scenario, stage, place, "small", dtype, ahead, 2, "Muon")


@pytest.mark.parametrize("to_host", [False, True])
def test_parameters_that_an_optimizer_holds_are_those_of_the_model_that_initialize_moves(to_host: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).to(device_type() if to_host else "cpu")
    held = list(model.parameters())
    held[0].grad = torch.ones_like(held[0])
    config = longshore.Config(stage=3, offload_device="cpu", param_device="cpu" if to_host else "none")
    with pytest.warns(UserWarning, match="discarded the gradients that 1 parameters still had"):
        engine = longshore.initialize(model=model, optimizer=torch.optim.AdamW(held), config=config).engine
    try:
        before = [each.detach().clone() for each in held]
        engine.backward(engine(torch.ones(2, 8, device=engine.device)).sum())
        engine.step()
        assert [id(each) for each in model.parameters()] == [id(each) for each in held]
        assert not any(torch.equal(*each) for each in zip(held, before, strict=True))
        assert {each.device.type for each in held} == {"cpu" if to_host else device_type()}
    finally:
        engine.destroy()


TWO_RANKS = {**COLUMNS, "stage": [0, 1, 2, 3], "place": ["device", "device split"] if compiles_triton() else ["device"]}


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize(tuple(TWO_RANKS), list(itertools.product(*TWO_RANKS.values())))
def test_two_ranks(scenario: str, dtype: str, ahead: str, stage: int, place: str, two_devices: Ranks) -> None:
    for result in two_devices(cases.run, scenario, stage, place, "small", dtype, ahead, 2):
        assert result["steps"] == SCENARIOS[scenario].steps


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize(tuple(COLUMNS), list(itertools.product(*COLUMNS.values())))
def test_two_ranks_with_parameters_on_the_host(scenario: str, dtype: str, ahead: str, two_devices: Ranks) -> None:
    for result in two_devices(cases.run, scenario, 3, "device streamed", "small", dtype, ahead, 2):
        assert result["steps"] == SCENARIOS[scenario].steps


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("first, second", list(itertools.permutations(resting_cases.PLACES)))
def test_checkpoints_go_between_parameters_on_the_host_and_on_the_device(
    first: str, second: str, dtype: str, two_devices: Ranks, tmp_path: Path
) -> None:
    resting_cases.resumed(str(tmp_path / "one"), dtype, first, second)
    two_devices(resting_cases.resumed, str(tmp_path / "two"), dtype, first, second)


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("place", resting_cases.PLACES)
def test_what_scripts_do_with_parameters_and_states(place: str, dtype: str, two_devices: Ranks) -> None:
    resting_cases.handled(place, dtype)
    two_devices(resting_cases.handled, place, dtype)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kernel_us, copy_us", [(0, 3000), (3000, 0)])
def test_a_parameter_on_the_host_that_is_written_after_a_forward(
    kernel_us: int, copy_us: int, frozen: bool, two_devices: Ranks
) -> None:
    resting_cases.written_after_forward(0, kernel_us, copy_us, frozen)
    two_devices(resting_cases.written_after_forward, 0, kernel_us, copy_us, frozen)


@pytest.mark.parametrize("how", ["block(x, x)", "ours", "torch's", "dropped", "another forward"])
def test_habits_with_parameters_on_the_host(how: str, two_devices: Ranks) -> None:
    resting_cases.habits(how)
    two_devices(resting_cases.habits, how)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_one_bucket_that_are_computed_on_two_streams(stage: int, late: int, two_devices: Ranks) -> None:
    for one, two in two_devices(cases.weights_of_two_streams, stage, late):
        for ours, theirs in zip(two, one, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage, gathers", [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_a_rank_killed_while_a_collective_is_under_way_is_named_within_seconds(
    stage: int, gathers: bool, two_devices: Ranks, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailure, match=r"^rank 1: ended with exit code -9$"):
        two_devices(failure_cases.killed_in_a_collective_of_the_device, stage, gathers, str(told))
    first, seconds, state = told.read_text().split("\n")
    under_way = "rank 1 has ended or cannot be reached while a collective was under way; look at the first error"
    at_a_meeting = r"rank 0: a collective failed \(.*\), so rank 1 has ended or cannot be reached; look at the first"
    assert re.match(f"RankError: ({under_way}|{at_a_meeting})", first), first
    if stage in (1, 2) or gathers:  # otherwise the ranks may meet again before one of them waits for the device
        assert first.startswith(f"RankError: {under_way}")
    assert float(seconds) < 10
    if stage > 0:  # at stage 0 each rank has all of it
        assert re.match(f"RankError: ({under_way}|{at_a_meeting})", state), state


@pytest.mark.parametrize("stage", [0, 3])
def test_collectives_are_called_on_the_device_of_their_rank(stage: int, two_devices: Ranks) -> None:
    assert two_devices(cases.device_of_collectives, stage) == [0, 1]


def test_process_groups_are_used_again(two_devices: Ranks) -> None:
    first, second = two_devices(group_cases.in_turn)
    assert first == second  # the same names on both ranks
    assert len(set(first["at once"])) == 2 and sorted(first["again"]) == sorted(first["at once"])
    fifth, sixth = first["after a failure"]
    assert fifth == first["again"][0] and sixth not in first["at once"]


@pytest.mark.slow
def test_as_many_engines_in_one_process_as_one_likes(two_devices: Ranks) -> None:
    """torch gives communicators 32 streams in turn, of which the simulated device has 16 with events."""
    assert all(second == last for second, last in two_devices(group_cases.engines, 40))
