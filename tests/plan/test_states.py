"""Plans of optimizers whose states are bfloat16 or 8 bits: bytes as the engine counts them, times, and what fits."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from rich.console import Console

from longshore.byte_sizes import format_byte_size
from longshore.engine.config import load_config
from longshore.layout.formats import StateFormat
from longshore.plan import page
from longshore.plan.job import Job, PlanChoice, PlannedModel, PlannedParameter, Use, configuration
from longshore.plan.layout import lay_out
from longshore.plan.memory import count_bytes
from longshore.plan.planner import DoesNotFit, plan
from longshore.plan.reading import plan_of_module
from longshore.plan.simulation import simulate
from longshore.plan.workload import segments_of, tile_jobs
from plan.counting_cases import Wide, counts, made
from plan.models import EIGHT, GB, SMALL, machine

FORMATS = tuple(each.value for each in StateFormat)

ONE_RANK: dict[str, tuple[Any, ...]] = {
    "fp32, in host memory": (0, "direct", "fp32"),
    "bf16, in host memory": (2, "direct", "bf16"),
    "two dtypes in host memory": (2, "direct", "mixed"),
    "fp32, a device": (1, "simulated", "fp32"),
    "a part stays": (2, "simulated", "bf16", 0.55),
    "spares": (2, "simulated", "mixed", 1.0, "100%"),
    "some spares": (2, "simulated", "bf16", 1.0, "30%"),
    "spares by bytes": (2, "simulated", "bf16", 1.0, 100_000),
    "spares and a part": (2, "simulated", "bf16", 0.4, "60%"),
    "spares in host memory": (2, "direct", "fp32", 1.0, "50%"),
    "two backwards": (2, "simulated", "bf16", 1.0, 0, 2),
    "tied": (2, "simulated", "tied"),
    "frozen": (2, "direct", "frozen"),
    "Lion": (2, "simulated", "bf16", 1.0, "40%", 1, "Lion"),
    "SGD": (0, "direct", "fp32", 1.0, 0, 1, "SGD"),
    "Adagrad": (2, "simulated", "bf16", 1.0, 0, 1, "Adagrad"),
    "the engine's tiles": (2, "simulated", "bf16", 1.0, 0, 1, "AdamW", None),
    "tiles smaller than a block": (2, "simulated", "bf16", 1.0, "50%", 1, "AdamW", 48),
}
_REST = (1.0, 0, 1, "AdamW", 1000, 5000, None)


def counted_and_planned(case: tuple[Any, ...], states: str) -> tuple[Any, ...]:
    """The arguments of :func:`counts` for a case, the rest of which is usual."""
    return (*case, *_REST[len(case) - 3 :], states)


@pytest.mark.quick(0)
@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("case", ONE_RANK)
def test_one_rank(case: str, states: str) -> None:
    counted, planned = counts(*counted_and_planned(ONE_RANK[case], states))
    assert planned == counted
    assert counted["host"]["state"] > 0


@pytest.mark.parametrize("states", FORMATS)
def test_no_offload(states: str) -> None:
    """On the CPU the engine counts as the host's what a CUDA device would have."""
    counted, planned = counts(*counted_and_planned((2, "resident", "bf16"), states))
    assert set(planned["host"].values()) == {0}
    assert {kind: planned["device"][kind] for kind in counted["host"]} == counted["host"]


TWO_RANKS: dict[str, tuple[Any, ...]] = {
    **{f"stage {stage}": (stage, "simulated", "bf16", 1.0, "50%") for stage in range(4)},
    "stage 2 in host memory": (2, "direct", "fp32"),
    "stage 3, two dtypes in host memory": (3, "direct", "mixed"),
    "stage 3, a part stays": (3, "simulated", "fp32", 0.5),
    "stage 2, a part stays": (2, "simulated", "bf16", 0.5),
    "stage 2, two dtypes, two backwards": (2, "simulated", "mixed", 1.0, 0, 2),
    "stage 1, two backwards, tied": (1, "direct", "tied", 1.0, 0, 2),
    "stage 0, frozen": (0, "direct", "frozen"),
    "stage 2, one bucket": (2, "simulated", "bf16", 1.0, "50%", 1, "AdamW", 1000, 1 << 20),
}
FAST = ("stage 0", "stage 2", "stage 3", "stage 2, one bucket")


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("case", "states"),
    [
        pytest.param(case, states, marks=() if case in FAST and states == "8bit" else pytest.mark.slow)
        for case in TWO_RANKS
        for states in FORMATS
    ],
)
def test_two_ranks(case: str, states: str, two_ranks: Ranks) -> None:
    for counted, planned in two_ranks(counts, *counted_and_planned(TWO_RANKS[case], states)):
        assert planned == counted


@pytest.mark.slow
@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_three_ranks(stage: int, states: str, three_ranks: Ranks) -> None:
    found = three_ranks(counts, *counted_and_planned((stage, "simulated", "bf16", 0.7, "50%"), states))
    assert all(planned == counted for counted, planned in found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_bucket_has_in_common(stage: int) -> None:
    model = plan_of_module(made("fp32", Wide), "wide")
    found = lay_out(model, Job(states="8bit"), PlanChoice(stage, "cpu"), 2, staged=True)
    common = []
    for bucket in found.buckets:
        members = [model.trainable[index] for index in bucket.parameters]
        (one,) = {each.unit if stage == 3 else StateFormat.EIGHT_BIT.of_parameter(each.shape) for each in members}
        common.append(one)
    assert sorted(map(str, common)) == sorted(map(str, (None, 0, 1) if stage == 3 else list(StateFormat)[1:]))


# -- by hand -------------------------------------------------------------------


def planned_bytes(states: str, dtype: torch.dtype | None = torch.bfloat16, **options: Any) -> dict[str, int]:
    model = plan_of_module(made("fp32", Wide), "wide")
    layout = lay_out(
        model, Job(dtype=dtype, states=states), PlanChoice(2, "cpu", **options), 1, staged=dtype is not None
    )
    return count_bytes(layout).host


def test_bytes_by_hand() -> None:
    """Masters of 4 bytes, and two states of 4, of 2, or of 1 and 4 for each 64 elements."""
    blocks = 71 * 64 + 2 * (130 * 64 + 64 * 64) + 71 * 64  # of 8 bits
    others = 2 * (130 + 64 * 130 + 64 + 64 + 64) + 21 * 64 + 21
    padding = 20 * 16  # at most 15 elements for each parameter
    expected = {"fp32": 12.0 * (blocks + others), "bf16": 8.0 * (blocks + others)}
    expected["8bit"] = (4 + 2 * (1 + 4 / 64)) * blocks + 8 * others
    for states, num_bytes in expected.items():
        found = planned_bytes(states)
        assert 0 <= found["state"] - num_bytes <= 12 * padding
        assert found["gradients"] == planned_bytes("fp32")["gradients"]
        # A float32 parameter in host memory is its own master; stepping ahead, it is not.
        assert 0 <= planned_bytes(states, None)["state"] - (num_bytes - 4 * (blocks + others)) <= 8 * padding
        assert planned_bytes(states, None, speculation="100%")["state"] == found["state"]
        ahead = planned_bytes(states, speculation="100%")
        assert 0 <= ahead["spares"] - ahead["state"] - 2 * (blocks + others) <= 2 * padding + 64 * 20


# -- times ---------------------------------------------------------------------


def square(numel: int) -> PlannedModel:
    return PlannedModel("square", (PlannedParameter("w", (numel >> 10, 1 << 10), torch.bfloat16, Use.MULTIPLIED, 0),))


BYTES = {"fp32": 28.0, "bf16": 20.0, "8bit": 16.25}
"""That a step of AdamW moves for each parameter: states, read and written, the gradient and the new parameter."""


@pytest.mark.parametrize("states", FORMATS)
def test_a_step_moves_the_bytes_of_its_format(states: str) -> None:
    model, choice = square(1 << 24), PlanChoice(0, "cpu")
    layout = lay_out(model, Job(states=states), choice, 1, staged=True)
    moved = sum(tile.num_bytes for tile in tile_jobs(layout, segments_of(layout.model)))
    assert moved == BYTES[states] * model.numel


@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_the_time_of_a_step_goes_with_its_bytes(offload: str) -> None:
    fast = replace(machine(link_bytes_per_s=1e15), bookkeeping_s=0.0)

    def exposed_s(states: str) -> float:
        return simulate(square(1 << 26), fast, Job(clipping=None, states=states), PlanChoice(0, offload)).exposed_s

    for states in ("bf16", "8bit"):
        assert exposed_s(states) / exposed_s("fp32") == pytest.approx(BYTES[states] / BYTES["fp32"], rel=0.01)


def test_a_part_on_the_device_is_stepped_by_its_format() -> None:
    slow = replace(machine(), device_memory_bytes_per_s=1e6)
    seconds = {
        states: simulate(square(1 << 26), slow, Job(clipping=None, states=states), PlanChoice(0, "cpu", 0.5)).exposed_s
        for states in FORMATS
    }
    # Gradients are float32 or 16 bits there; the simulation counts 6 bytes for them and for parameters.
    assert seconds["8bit"] / seconds["fp32"] == pytest.approx((12.25 + 6) / (24 + 6), rel=0.01)
    assert seconds["bf16"] / seconds["fp32"] == pytest.approx((16 + 6) / (24 + 6), rel=0.01)


# -- what fits -----------------------------------------------------------------

NARROW = {"host_memory_bytes": 100 * GB, "device_memory_bytes": 60 * GB}


@pytest.mark.medium
def test_what_fits_by_format() -> None:
    here = machine(host_memory_bytes=120 * GB)
    found = plan(EIGHT, here, Job(1))
    fits = {states: {each.choice.title: each.fits for each in rows} for states, rows in found.by_format.items()}
    assert list(fits) == ["fp32", "bf16", "8bit"]
    assert not any(fits["fp32"].values()) and all(fits["bf16"].values()) and all(fits["8bit"].values())
    assert list(fits["fp32"]) == ["stage 0", "stage 0, offload", "stage 3, offload, streamed"]
    for states, rows in found.by_format.items():
        other = plan(EIGHT, here, Job(1, states=states))
        own = {each.choice: each.bytes for each in other.candidates}
        assert all(own[each.choice] == each.bytes for each in rows)
        assert page.values(found)["choices_by_states"] == page.values(other)["choices_by_states"]


def text_of(found: Any) -> list[str]:
    table, shown = page.formats(found), io.StringIO()
    assert table is not None
    Console(width=100, file=shown).print(table)
    return shown.getvalue().splitlines()


def test_the_table_of_formats() -> None:
    lines = text_of(plan(EIGHT, machine(host_memory_bytes=120 * GB), Job(1)))
    assert max(map(len, lines)) <= 100
    (row,) = (line for line in lines if line.startswith("│ stage 0, offload "))
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["115.2 GiB, no room", "82.3 GiB", "66.9 GiB"]
    small = text_of(plan(EIGHT, machine(device_memory_bytes=16 * GB), Job(1, checkpointing=True)))
    (row,) = (line for line in small if line.startswith("│ stage 0, offload "))
    assert row.count("device full") == 3  # the host would have room
    (row,) = (line for line in small if line.startswith("│ stage 0 "))
    assert row.count("no room") == 3


def test_memory_of_a_host_without_devices_is_all_that_a_rank_takes() -> None:
    found = plan(SMALL, replace(machine(), staged=False), Job(1))
    (row,) = (line for line in text_of(found) if line.startswith("│ stage 0, offload "))
    taken = found.by_format["fp32"][0].bytes
    assert format_byte_size(taken.host_total + taken.device_total) in row


@pytest.mark.medium
def test_a_refusal_names_the_format_that_fits() -> None:
    small = machine(**NARROW)
    with pytest.raises(DoesNotFit, match=r"try --states bf16 \(stage 0, offload then fits\), more memory on each host"):
        plan(EIGHT, small, Job(1))
    assert plan(EIGHT, small, Job(1, states="bf16")).recommended.choice.offload == "cpu"
    less = machine(host_memory_bytes=64 * GB, device_memory_bytes=60 * GB)
    with pytest.raises(DoesNotFit, match=r"try --states 8bit \("):
        plan(EIGHT, less, Job(1, states="bf16"))
    least = machine(host_memory_bytes=40 * GB, device_memory_bytes=60 * GB)
    for states in FORMATS:
        with pytest.raises(DoesNotFit, match=r"try more memory on each host \(--host-memory\), more devices"):
            plan(EIGHT, least, Job(1, states=states))


# -- configurations, and what is refused --------------------------------------


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("choice", [PlanChoice(0, "none"), PlanChoice(2, "cpu", 0.5), PlanChoice(3, "cpu", 1.0, "50%")])
def test_the_configuration_says_the_format(choice: PlanChoice, states: str) -> None:
    content = configuration(Job(states=states), choice)
    loaded = load_config(content, world_size=2, needs_optimizer=True)
    assert loaded.notes == () and loaded.config.states == states
    assert loaded.config.offload_device == choice.offload and loaded.config.offload_ratio == choice.ratio
    assert ("states" in content["zero_optimization"].get("offload_optimizer", {})) == (states != "fp32")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"states bf16 is for .*AdamW.*, and the states of Muon are float32 always"):
        Job(optimizer="Muon", states="bf16")
    with pytest.raises(ValueError, match="'fp32', 'bf16', '8bit', not '4bit'"):
        Job(states="4bit")
    muon = plan(SMALL, machine(), Job(optimizer="Muon"))
    assert list(muon.by_format) == ["fp32"] and page.formats(muon) is None
