"""Muon in a plan: which parameters are matrices, and what making them orthogonal takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import longshore
from longshore.kernels import newton_schulz, newton_schulz_bytes
from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.layout import lay_out
from longshore.plan.matrices import divided, newton_schulz_operations
from longshore.plan.memory import count_bytes
from longshore.plan.planner import plan
from longshore.plan.reading import plan_of_files, plan_of_module
from longshore.plan.simulation import EXCHANGE, Simulation, simulate
from longshore.tiles.events import PUBLISH, STEP_AHEAD, STEP_IN_PLACE, TRANSFORM
from plan.counting_cases import made
from plan.models import EIGHT, SMALL, machine
from plan.test_simulation import N, clock, layers, spans

MUON = Job(optimizer="Muon")
LONGER = 0.93 / 0.74
"""How much longer a pass into a spare takes."""


def muon(**params: Any) -> Job:
    return Job(optimizer="Muon", optimizer_params={"lr": 1e-3, "ns_method": "standard", **params})


def blocks_by_name(model: PlannedModel, job: Job = MUON) -> dict[str, int]:
    """How many matrices each parameter has that Muon steps."""
    return {each.name: len(each.matrices.blocks) for each in divided(model, job).parameters if each.matrices}


def of_groups(model: nn.Module, **options: Any) -> set[str]:
    groups = longshore.muon_groups(model, show=False, **options)
    return {name for group in groups if group["use_muon"] for name, _ in group["params"]}


# -- which parameters are matrices --------------------------------------------


@pytest.mark.parametrize("dtypes", ["bf16", "tied", "frozen"])
def test_a_module_is_divided_as_by_muon_groups(dtypes: str) -> None:
    model = made(dtypes)
    assert set(blocks_by_name(plan_of_module(model, "odd"))) == of_groups(model) != set()


def test_marks_of_parameters_count() -> None:
    assert set(blocks_by_name(plan_of_module(made("marked"), "odd"))) == {"head.weight", "layers.1.0.weight"}


def test_split_and_others_count() -> None:
    job = muon(split={"layers.0.0.weight": [20, 21], "layers.0.1.weight": None}, others=["layers.[12].*"])
    assert blocks_by_name(plan_of_module(made("bf16"), "odd"), job) == {"layers.0.0.weight": 2, "layers.0.1.weight": 1}


def test_files_are_divided_by_their_names(tmp_path: Path) -> None:
    """As the module that they were written by, whatever the order of names in the file."""
    model = nn.ModuleDict({
        "embed_tokens": nn.Embedding(40, 16),
        "layers": nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(16, 16), "norm": nn.LayerNorm(16)}) for _ in "ab"),
        "lm_head": nn.Linear(16, 40, bias=False),
    })  # fmt: skip
    save_file(model.state_dict(), tmp_path / "it.safetensors")
    assert set(blocks_by_name(plan_of_files(tmp_path / "it.safetensors"))) == of_groups(model)
    del model["lm_head"]  # its embedding is the head
    save_file(model.state_dict(), tmp_path / "tied.safetensors")
    assert set(blocks_by_name(plan_of_files(tmp_path / "tied.safetensors"))) == of_groups(model)


def test_a_fused_parameter_has_to_be_explained() -> None:
    model = nn.Sequential()
    model.qkv_proj = nn.Linear(8, 24)
    found = plan_of_module(model, "fused")
    with pytest.raises(ValueError, match=r"qkv_proj\.weight, \[24, 8\], looks as if it held several matrices"):
        plan(found, machine(), MUON)
    assert blocks_by_name(found, muon(split={"qkv_proj.weight": 3})) == {"qkv_proj.weight": 3}


def test_other_optimizers_have_no_matrices() -> None:
    assert divided(SMALL, Job()) is SMALL
    layout = lay_out(SMALL, Job(), PlanChoice(0, "cpu"), 1, True)
    assert layout.main.runs and not layout.main.only(of_matrices=True).runs


# -- what is counted and estimated --------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "steps"), [(24, 40, 5), (40, 24, 1), (16, 16, 3)])
def test_operations_are_those_of_the_products(rows: int, columns: int, steps: int) -> None:
    matrix = torch.randn(rows, columns).bfloat16()
    with FlopCounterMode(display=False) as counter:
        newton_schulz(matrix, (3.4445, -4.7750, 2.0315), steps, 1e-7)
    assert newton_schulz_operations(rows, columns, steps) == counter.get_total_flops()


def test_the_device_has_room_for_the_largest_matrix() -> None:
    """As the engine makes sure of: two matrices going there and coming back, and the workspace."""
    numel, counted = 704 * 256, count_bytes(lay_out(SMALL, MUON, PlanChoice(0, "cpu"), 1, staged=True))
    assert counted.device_estimates["matrices under way"] == 2 * 2 * 2 * numel + newton_schulz_bytes(704, 256)
    halves = muon(split={"*.gate": 2, "*.up": 2, "*.down": {"split": 2, "split_dim": 1}})
    less = count_bytes(lay_out(SMALL, halves, PlanChoice(0, "cpu"), 1, staged=True))
    assert less.device_estimates["matrices under way"] == 2 * 2 * 2 * numel + newton_schulz_bytes(352, 256)
    assert (
        "matrices under way" not in count_bytes(lay_out(SMALL, Job(), PlanChoice(0, "cpu"), 1, True)).device_estimates
    )


def test_one_rank_whose_parameters_rest_transforms_on_the_host() -> None:
    choice = PlanChoice(3, "cpu", param_device="cpu")
    one, two = (count_bytes(lay_out(SMALL, MUON, choice, ranks, staged=True)) for ranks in (1, 2))
    assert "matrices under way" in one.host_estimates and "matrices under way" not in one.device_estimates
    assert "matrices under way" in two.device_estimates and "matrices under way" not in two.host_estimates


def test_parts_between_ranks_take_memory() -> None:
    by_rank = [
        count_bytes(lay_out(SMALL, MUON, PlanChoice(3, "cpu"), ranks, staged=True)).device_estimates for ranks in (2, 4)
    ]
    one = count_bytes(lay_out(SMALL, MUON, PlanChoice(3, "cpu"), 1, staged=True)).device_estimates
    assert all(each["matrices under way"] > one["matrices under way"] for each in by_rank)


NAMES_OF_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batches_have_every_matrix_once(stage: int) -> None:
    layout, others = (lay_out(SMALL, MUON, PlanChoice(stage, "cpu"), 2, staged=True, rank=rank) for rank in (0, 1))
    matrices = {index for index, each in enumerate(SMALL.trainable) if each.name.split(".")[-1] in NAMES_OF_MATRICES}
    shared = [batch for batch in layout.batches if batch.owners]
    assert [batch.matrices for batch in shared] == [batch.matrices for batch in others.batches if batch.owners]
    assert all(set(batch.owners) <= {0, 1} and batch.part_numel > 0 for batch in shared)
    # What both ranks have a part of travels, unless each has all of it.
    on_both = set.intersection(*({rank.parameter_of[each.key] for each in rank.owned} for rank in (layout, others)))
    travelling = {matrix.parameter for batch in shared for matrix in batch.matrices}
    assert travelling == (matrices & on_both if stage > 0 else set()) and bool(travelling) == (stage > 0)
    here = [matrix.parameter for batch in layout.batches for matrix in batch.matrices]
    there = [matrix.parameter for batch in others.batches if not batch.owners for matrix in batch.matrices]
    assert sorted(here if stage == 0 else [*here, *there]) == sorted(matrices)
    numel = sum(each.numel for each in layout.owned if layout.parameter_of[each.key] in matrices)
    assert sum(batch.numel for batch in layout.batches) == numel


# -- times --------------------------------------------------------------------

OPERATIONS = newton_schulz_operations(N // 64, 64, 5)
SECOND_EACH: Mapping[str, Any] = {"host_bytes_per_s": 12.0 * N, "transform_flops": OPERATIONS / 2}
"""The passes before and after Newton-Schulz take a second, Newton-Schulz two, and a copy to the device one."""


def run(choice: PlanChoice, **figures: Any) -> Simulation:
    job = replace(muon(), batch_size=1, seq_len=16, tile_numel=N)
    return simulate(layers(3), clock(**{**SECOND_EACH, **figures}), job, choice)


def test_the_passes_over_one_matrix_go_with_the_transformation_of_another() -> None:
    found = run(PlanChoice(0, "cpu"))
    # 24 bytes an element. Backward ends at 9; two matrices are under way, and the fourth pass is the third's first.
    assert spans(found, TRANSFORM) == [(10, 13), (13, 16), (16, 19)]
    assert spans(found, STEP_IN_PLACE) == [(9, 10), (10, 11), (13, 14), (14, 15), (16, 17), (19, 20)]
    assert spans(found, PUBLISH) == [(14, 15), (17, 18), (20, 21)]
    assert (found.step_s, found.exposed_s) == pytest.approx((21.0, 12.0))


def test_ahead_of_the_verdict_goes_what_is_before_the_transformation() -> None:
    found = run(PlanChoice(0, "cpu", speculation="100%"))
    assert spans(found, STEP_AHEAD) == [(round(at, 6), round(at + LONGER, 6)) for at in (5.0, 7.0, 9.0)]
    begin = 9 + LONGER
    assert spans(found, TRANSFORM) == [(round(begin + at, 6), round(begin + at + 3, 6)) for at in (0, 3, 6)]
    assert [end - start for start, end in spans(found, STEP_IN_PLACE)] == pytest.approx(3 * [LONGER], abs=1e-5)
    assert found.step_s == pytest.approx(begin + 9 + LONGER + 1)


def test_unknown_speed_takes_no_time_and_is_said() -> None:
    known, unknown = machine(), replace(machine(), transform_flops=None)
    less = [simulate(SMALL, here, MUON, PlanChoice(0, "cpu")).busy_s["compute"] for here in (known, unknown)]
    assert less[1] < less[0]
    (note,) = (each for each in plan(SMALL, unknown, MUON).model.notes if "Newton-Schulz" in each)
    assert note == "times leave out Newton-Schulz, whose speed on this machine is not known"
    on_host = "Newton-Schulz runs on the host, and times leave it out"
    assert any(on_host in note for note in plan(SMALL, known, MUON).model.notes)
    assert not any(on_host in note for note in plan(SMALL, machine(gpus=2), MUON).model.notes)
    resident = plan(SMALL, known, MUON, lambda choice: not choice.streams).model.notes
    assert not any(on_host in note for note in resident)
    assert any(note.startswith("Muon steps 3,211,264 parameters in 28 tensors") for note in resident)
    assert not plan(SMALL, known, Job()).model.notes


def test_a_streamed_step_on_one_rank_leaves_newton_schulz_out() -> None:
    choice = PlanChoice(3, "cpu", param_device="cpu")
    assert spans(run(choice), TRANSFORM) == []
    both = [run(choice, transform_flops=speed).step_s for speed in (OPERATIONS / 2, OPERATIONS / 200)]
    assert both[0] == both[1]


def test_two_ranks_share_the_matrices_of_a_batch() -> None:
    """Three matrices: the ranks get two and one. A part of two is half of each of two matrices."""
    speeds = {"exchange_bytes_per_s": 2.0 * N / 5, "to_host_bytes_per_s": 2.0 * N / 3}
    found = run(PlanChoice(3, "cpu"), ranks=2, ranks_per_host=1, **speeds)
    here = 1.5  # this rank's halves of the three, in matrices
    lengths = [end - begin for begin, end in spans(found, EXCHANGE)]
    assert lengths == pytest.approx([5 + here, 5 + 3 * here])
    ((begin, end),) = spans(found, TRANSFORM)
    assert end - begin == pytest.approx(4.0)
    of_matrices = [each for each in found.spans if each.name in (EXCHANGE, TRANSFORM, STEP_IN_PLACE)]
    names = [each.name for each in sorted(of_matrices, key=lambda each: each.begin_s)]
    assert names == [STEP_IN_PLACE, EXCHANGE, TRANSFORM, EXCHANGE, STEP_IN_PLACE]


def test_nothing_travels_before_the_verdict() -> None:
    speeds = {"exchange_bytes_per_s": 2.0 * N / 5}
    found = run(PlanChoice(3, "cpu", speculation="100%"), ranks=2, ranks_per_host=1, **speeds)
    assert spans(found, EXCHANGE)[0][0] == spans(found, STEP_AHEAD)[-1][1]


def test_a_step_moves_24_bytes_for_each_element_of_a_matrix() -> None:
    found = run(PlanChoice(0, "cpu"), transform_flops=1e30)
    passes = sum(end - begin for begin, end in spans(found, STEP_IN_PLACE))
    assert passes * 12 * N == pytest.approx(24 * 3 * N)


def test_muon_takes_longer_than_adamw_where_products_are_slow() -> None:
    for gpus in (1, 8):
        here = machine(gpus=gpus)
        with_muon, with_adamw = (
            simulate(EIGHT, here, Job(1, 2048, optimizer=name), PlanChoice(2, "cpu")) for name in ("Muon", "AdamW")
        )
        assert with_muon.step_s > with_adamw.step_s and with_muon.busy_s["host"] < with_adamw.busy_s["host"]
