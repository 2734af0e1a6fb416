"""What is chosen, what is refused, and how much is simulated for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from longshore.engine.config import load_config
from longshore.plan.job import (
    OPTIMIZERS,
    Job,
    PlanChoice,
    PlannedModel,
    PlannedParameter,
    Use,
    configuration,
    parameter_bytes,
)
from longshore.plan.planner import Candidate, DoesNotFit, Planner, plan
from longshore.plan.reading import plan_of_module
from longshore.plan.simulation import simulate
from longshore.plan.workload import MOST_JOBS
from plan.models import EIGHT, FOUR_HUNDRED, GB, SMALL, llama, machine


def test_a_model_that_fits_is_not_offloaded() -> None:
    found = plan(SMALL, machine(), Job())
    assert found.recommended.choice == PlanChoice(0, "none")
    assert {each.choice.stage for each in found.candidates} == {0, 1, 2, 3}
    assert all(each.times is not None for each in found.candidates)
    # The device has room for all of the state, which would be no offload.
    assert {each.choice.ratio for each in found.candidates} == {1.0}


def test_gradients_are_added_on_the_device_where_it_has_room() -> None:
    choice = PlanChoice(0, "cpu")

    def evaluated(accumulate: str, **figures: Any) -> Candidate:
        here = machine(**{"host_bytes_per_s": 130e9, **figures})
        return Planner(EIGHT, here, Job(1, accumulation=4, accumulate=accumulate)).evaluate(choice)

    auto, device, host = map(evaluated, ("auto", "device", "host"))
    assert (auto.bytes, auto.times) == (device.bytes, device.times)
    assert auto.layout.sums_on_device and not host.layout.sums_on_device
    assert auto.times is not None and host.times is not None and auto.times.step_s < 0.9 * host.times.step_s
    numel = sum(each.numel for each in EIGHT.trainable)
    assert auto.bytes.device_estimates["sums of gradients"] == 4 * numel
    copied = [run.times.busy_s["copies to the host"] * 50e9 / numel for run in (auto, host) if run.times is not None]
    assert copied == pytest.approx([4, 4 * 2], rel=0.01)
    small = {"device_memory_bytes": int((host.bytes.device_total + 3 * numel) / 0.94)}
    assert not evaluated("auto", **small).layout.sums_on_device and evaluated("auto", **small).fits
    assert not evaluated("device", **small).fits


def test_ranks_of_a_host_share_its_memory() -> None:
    together, apart = machine(gpus=8), replace(machine(gpus=8), ranks_per_host=1)
    one, other = (Planner(SMALL, each, Job()).evaluate(PlanChoice(2, "cpu")) for each in (together, apart))
    assert one.bytes == other.bytes and one.bytes.host_total > 0
    assert one.missing_host - other.missing_host == 7 * one.bytes.host_total


def test_a_model_that_does_not_is() -> None:
    found = plan(EIGHT, machine(), Job(4))
    plain = [each for each in found.candidates if each.choice.offload == "none"]
    assert len(plain) == 4 and not any(each.fits for each in plain)
    assert found.recommended.choice.offload == "cpu" and found.recommended.times is not None
    assert all(each.times is None for each in found.candidates if not each.fits)
    # It is the fastest of those that fit, or as good.
    least = min(each.times.step_s for each in found.candidates if each.times)
    assert found.recommended.times.step_s <= 1.01 * least
    # What the device has room for stays there.
    assert found.recommended.choice.ratio < 1.0
    assert found.recommended.bytes.device_total <= 0.94 * 141 * GB
    less = replace(found.recommended.choice, ratio=found.recommended.choice.ratio - 0.05)
    assert not Planner(EIGHT, machine(), Job(4)).evaluate(less).fits


@pytest.mark.medium
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_model_larger_than_the_device_is_streamed(gpus: int) -> None:
    small = machine(gpus=gpus, device_memory_bytes=(10 + 3 * gpus) * GB)
    job = Job(1, checkpointing=True)
    found = plan(EIGHT, small, job)
    assert found.recommended.choice.streams and found.offloaded is not None
    others = [each for each in found.candidates if not each.choice.streams]
    assert others and not any(each.fits for each in others)
    # Where the parameters fit, they are not streamed.
    assert not plan(EIGHT, machine(gpus=gpus), job).recommended.choice.streams
    # Of all of it, two blocks and what is in none are on the device.
    rest = 2 * (2 * 128_256 * 4096 + 4096)
    block = (parameter_bytes(EIGHT.parameters) - rest) // 32
    if gpus == 1:
        assert found.recommended.bytes.device == {"parameters": rest + 2 * block}
    assert found.recommended.bytes.host["parameters"] == parameter_bytes(EIGHT.parameters) // gpus


def test_a_model_without_units_or_with_scalars_is_not_streamed() -> None:
    whole = replace(SMALL, parameters=tuple(replace(each, unit=None) for each in SMALL.parameters))
    scalar = PlannedParameter("scale", (), torch.float32, Use.ELEMENTWISE)
    for model in (whole, replace(SMALL, parameters=(*SMALL.parameters, scalar))):
        assert not any(each.choice.streams for each in plan(model, machine(), Job()).candidates)


@pytest.mark.parametrize("staged", [True, False])
def test_where_activations_are_too_large_smaller_batches_are_the_advice(staged: bool) -> None:
    small = replace(machine(), staged=staged)
    with pytest.raises(DoesNotFit, match=r"try a smaller --batch-size or --seq-len, --activation-ch"):
        plan(SMALL, small, Job(seq_len=1 << 30))
    words = "more devices" if staged else r"more memory on each host \(--host-memory\), more devices"
    with pytest.raises(DoesNotFit, match=f"try {words}"):
        plan(SMALL, replace(small, host_bytes=1000, device_bytes=1000), Job(seq_len=1))


@pytest.mark.medium
def test_where_the_host_is_too_small_for_all_of_it_a_part_stays_on_the_device() -> None:
    thirteen = llama(40, 5120, 13824, 32000, "13B")
    small = machine(host_memory_bytes=128 * GB)
    found = plan(thirteen, small, Job(seq_len=512))
    assert found.recommended.choice.offload == "cpu" and 0 < found.recommended.choice.ratio < 1
    assert found.recommended.bytes.host_total <= 0.95 * 128 * GB
    whole = [each for each in found.candidates if each.choice == PlanChoice(0, "cpu") or each.choice.offload == "none"]
    assert whole and not any(each.fits for each in whole)
    # With less yet, that is also what comes nearest.
    with pytest.raises(DoesNotFit, match=r"what comes nearest, stage 0, offload, ratio 0\.\d+, needs .* on each host"):
        plan(thirteen, machine(host_memory_bytes=32 * GB), Job(seq_len=512))


def with_parameter(shape: tuple[int, ...], trainable: bool = True) -> PlannedModel:
    extra = PlannedParameter("logit_scale", shape, torch.bfloat16, Use.ELEMENTWISE, None, 1.0, trainable)
    return replace(SMALL, parameters=(*SMALL.parameters, extra))


@pytest.mark.parametrize("trainable", [True, False])
def test_stage_3_cannot_shard_a_single_number(trainable: bool) -> None:
    found = plan(with_parameter((), trainable), machine(gpus=8), Job())
    assert {each.choice.stage for each in found.candidates} == {0, 1, 2}
    assert any("stage 3" in note and "logit_scale" in note for note in found.model.notes)
    alone = plan(with_parameter((), trainable), machine(), Job())
    assert {each.choice.stage for each in alone.candidates} == {0, 1, 2, 3} and not alone.model.notes


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_parameter_without_elements_changes_nothing(gpus: int) -> None:
    found, without = (plan(model, machine(gpus=gpus), Job()) for model in (with_parameter((0, 7)), SMALL))
    assert [(each.bytes, each.times and each.times.step_s) for each in found.candidates] == [
        (each.bytes, each.times and each.times.step_s) for each in without.candidates
    ]


def test_what_there_is_nothing_of_or_no_kernel_for_is_refused() -> None:
    nothing = PlannedModel("nothing", (PlannedParameter("w", (0, 7), torch.float32, Use.MULTIPLIED),))
    with pytest.raises(ValueError, match="nothing has no parameters that are trained"):
        plan(nothing, machine(), Job())
    eight = PlannedModel("eight", (PlannedParameter("w", (8, 8), torch.float8_e4m3fn, Use.MULTIPLIED),))
    with pytest.raises(ValueError, match=r"w is torch\.float8_e4m3fn.*--dtype"):
        plan(eight, machine(), Job(dtype=None))
    assert plan(eight, machine(), Job()).recommended.choice.offload == "none"


@pytest.mark.quick(0)
@pytest.mark.parametrize("short", ["device", "host"])
def test_what_cannot_fit_is_refused_with_by_how_much(short: str) -> None:
    small = {
        "device": {"device_memory_bytes": 16 * GB},
        "host": {"host_memory_bytes": 100 * GB, "device_memory_bytes": 60 * GB},
    }[short]
    with pytest.raises(DoesNotFit) as refusal:
        plan(EIGHT, machine(**small), Job(1))
    said = str(refusal.value)
    assert "8B (" in said and "does not fit on 1 x H200 SXM" in said and "GiB more on each" in said
    # Parameters alone are as much, so no advice about batches.
    assert parameter_bytes(EIGHT.parameters) > 15 * GB
    missing = float(said.split("needs ")[1].split(" GiB")[0].replace(",", ""))
    # Exactly that much more is enough, and less is not.
    name, bytes_ = next(iter(small.items()))
    share = 0.94 if short == "device" else 0.95
    with pytest.raises(DoesNotFit):
        plan(EIGHT, machine(**{**small, name: bytes_ + int((missing - 1) * 2**30 / share)}), Job(1))
    assert plan(EIGHT, machine(**{**small, name: bytes_ + int((missing + 1) * 2**30 / share)}), Job(1))


def test_a_batch_that_does_not_fit_gets_advice_about_batches() -> None:
    with pytest.raises(DoesNotFit, match=r"smaller --batch-size or --seq-len, --activation-checkpointing"):
        plan(EIGHT, machine(), Job(64, 8192))
    assert plan(EIGHT, machine(gpus=8), Job(4, 8192, checkpointing=True))


def test_a_model_without_parameters() -> None:
    frozen = replace(SMALL, parameters=tuple(replace(each, trainable=False) for each in SMALL.parameters))
    with pytest.raises(ValueError, match="small has no parameters that are trained"):
        plan(frozen, machine(), Job())


def test_offload_is_hidden_from_some_number_of_tokens_on() -> None:
    choice, here = PlanChoice(0, "cpu", speculation="100%"), machine()
    at = Planner(EIGHT, here, Job(1, 2048)).hidden_at(choice)
    assert at is not None and at % 2048 == 0

    def share(tokens: int) -> float:
        times = simulate(EIGHT, here, Job(tokens // 2048, 2048), choice)
        return times.exposed_s / times.step_s

    assert share(at) <= 0.05 < share(at * 7 // 8 // 2048 * 2048)
    # A slower link takes longer to hide.
    slower = Planner(EIGHT, machine(link_bytes_per_s=10e9), Job(1, 2048)).hidden_at(choice)
    assert slower is not None and slower > 2 * at
    assert Planner(EIGHT, machine(link_bytes_per_s=1e3), Job(1, 2048)).hidden_at(choice) is None


@pytest.mark.medium
@pytest.mark.slow
def test_400_billion_on_1024_ranks_is_few_jobs() -> None:
    """Time goes with the jobs that are simulated, and they not with tiles or ranks."""
    assert FOUR_HUNDRED.numel > 380 * GB
    found = plan(FOUR_HUNDRED, machine(gpus=8, hosts=128), Job(1, 8192, checkpointing=True))
    simulated = [len(each.times.spans) for each in found.candidates if each.times]
    assert found.recommended.choice.stage == 3 and simulated
    assert max(simulated) < 8 * MOST_JOBS
    # Tens of thousands of tiles on few ranks are as few jobs.
    few = simulate(FOUR_HUNDRED, machine(gpus=8), Job(1, 8192), PlanChoice(3, "cpu", speculation="100%"))
    assert len(few.spans) < 12 * MOST_JOBS


@pytest.mark.parametrize("accumulation", [1, 4])
def test_grouped_tiles_take_as_long_as_single_ones(accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, here, job = (
        llama(16, 2048, 5632, 32000),
        machine(gpus=2),
        Job(2, accumulation=accumulation, tile_numel=1 << 18),
    )
    for choice in (
        PlanChoice(2, "cpu", speculation="50%"),
        PlanChoice(3, "cpu"),
        PlanChoice(1, "cpu", speculation="100%"),
    ):
        grouped = simulate(model, here, job, choice)
        with monkeypatch.context() as patched:
            patched.setattr("longshore.plan.workload.MOST_JOBS", 1 << 20)
            single = simulate(model, here, job, choice)
        assert len(single.spans) > 3 * len(grouped.spans)
        assert grouped.step_s == pytest.approx(single.step_s, rel=0.01)
        assert grouped.exposed_s == pytest.approx(single.exposed_s, rel=0.03)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "choice",
    [
        PlanChoice(0, "none"),
        PlanChoice(1, "cpu"),
        PlanChoice(2, "cpu", 0.85, "50%"),
        PlanChoice(3, "cpu", 1.0, "100%"),
        PlanChoice(2, "cpu", 1.0, 1 << 30),
        PlanChoice(3, "cpu", param_device="cpu"),
    ],
    ids=lambda choice: choice.title,
)
def test_the_configuration_loads_and_says_the_same(optimizer: str, choice: PlanChoice) -> None:
    import torch

    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (None, None)):
        job = Job(2, 128, 4, dtype, optimizer, 0.5 if name else None, tile_numel=1 << 20 if name else None)
        loaded = load_config(configuration(job, choice), world_size=8, needs_optimizer=True)
        config = loaded.config
        assert loaded.notes == ()  # nothing that a reader has to be told
        places = (choice.stage, choice.offload, choice.param_device)
        assert (config.stage, config.offload_device, config.param_device) == places
        assert (config.offload_ratio, config.speculation_memory) == (choice.ratio, choice.speculation)
        assert (config.micro_batch_size, config.gradient_accumulation_steps, config.train_batch_size) == (2, 4, 64)
        assert (config.dtype, config.gradient_clipping, config.tile_numel) == (name, job.clipping, job.tile_numel)
        assert config.optimizer is not None and config.optimizer.type == optimizer
        assert config.reduce_bucket_numel == job.bucket_numel


def test_a_model_that_cannot_be_streamed_is_not_planned_so() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.LSTM(64, 64), nn.Linear(64, 64)) for _ in range(3)]))
    planned = plan_of_module(model, "recurrent")
    assert planned.units == 3
    assert not any(each.choice.streams for each in plan(planned, machine(), Job(1, 2048)).candidates)
    with pytest.raises(ValueError, match="no choice is left: LSTM keeps its parameters in a list of its own"):
        plan(planned, machine(), Job(1, 2048), lambda choice: choice.streams)


def test_a_parameter_without_a_shape() -> None:
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no shape yet: let the function call the model once"):
        plan_of_module(nn.Sequential(nn.LazyLinear(4)), "lazy")


def test_a_plan_can_be_compared_and_pickled() -> None:
    """Scripts keep plans, and send them to other processes."""
    found, again = (plan(SMALL, machine(gpus=4), Job()) for _ in range(2))
    assert found == again and pickle.loads(pickle.dumps(found)) == found
