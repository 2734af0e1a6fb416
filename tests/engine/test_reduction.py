"""The keys that say how gradients of several ranks are added, and who steps what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Ranks
from support import PlainLoop, loss_of, small_model

import longshore
from engine import reduction_cases
from engine.files import OPTIONS, assert_same, file, gradients_of, started, train
from engine.reduction_cases import Arithmetic

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
NUMEL = 3480
"""Elements of the model."""


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"stage": stage, "reduce_bucket_size": 1100, **keys}


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@STAGES
@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_communication_dtype(stage: int, name: str, dtype: torch.dtype, two_ranks: Ranks) -> None:
    """float32 gradients are rounded once, to travel, and added in float32."""
    config = {"zero_optimization": zero(stage), "communication_data_type": name, "gradient_accumulation_steps": 2}
    for found in two_ranks(reduction_cases.reduces, config, torch.float32, Arithmetic(wire=dtype)):
        assert found["differs"]


@pytest.mark.medium
@STAGES
def test_gradients_travel_in_their_own_dtype_and_sums_in_float32(stage: int, two_ranks: Ranks) -> None:
    bf16 = {"enabled": True, "check_grad_overflow": False}
    config = {"zero_optimization": zero(stage), "bf16": bf16, "gradient_accumulation_steps": 3}
    two_ranks(reduction_cases.reduces, config, torch.bfloat16, Arithmetic())


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_accumulation_dtype(stage: int, name: str, dtype: torch.dtype, two_ranks: Ranks) -> None:
    """Where backwards are added before they are reduced; at stage 2 each is reduced, and added in float32."""
    bf16 = {"enabled": True, "check_grad_overflow": False}
    config = {
        "zero_optimization": zero(stage),
        "bf16": bf16,
        "gradient_accumulation_steps": 3,
        "data_types": {"grad_accum_dtype": name},
    }
    for found in two_ranks(reduction_cases.reduces, config, torch.bfloat16, Arithmetic(sums=dtype)):
        assert found["differs"] == (stage < 2)


@pytest.mark.medium
@STAGES
def test_prescale_gradients(stage: int, two_ranks: Ranks) -> None:
    """Halves are added rather than the sum halved: the same bits, unless the sum is no float32 any more."""
    config = {"zero_optimization": zero(stage)}
    prescaled = {**config, "prescale_gradients": True}
    two_ranks(reduction_cases.reduces, prescaled, torch.float32, Arithmetic(before=0.5, after=1.0))
    assert two_ranks(reduction_cases.huge_gradients, config) == [-math.inf] * 2
    for weight in two_ranks(reduction_cases.huge_gradients, prescaled):
        assert weight == pytest.approx(-6.0)


@pytest.mark.medium
@STAGES
def test_gradient_predivide_factor(stage: int, two_ranks: Ranks) -> None:
    config = {"zero_optimization": zero(stage), "gradient_predivide_factor": 3}
    for found in two_ranks(reduction_cases.reduces, config, torch.float32, Arithmetic(before=1 / 3, after=1.5)):
        assert found["differs"]
    for weight in two_ranks(reduction_cases.huge_gradients, config):
        assert weight == pytest.approx(-6.0)


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_stages(two_ranks: Ranks) -> None:
    """0: every rank steps everything; 1: each its part; 2: and each backward is reduced by itself."""
    for stage in (None, 0, 1, 2, 3):
        section = zero(0) if stage is None else zero(stage)
        if stage is None:
            section.pop("stage")
        for rank, found in enumerate(two_ranks(reduction_cases.shards, section, 3)):
            assert found["stage"] == (stage or 0)
            rounds = 3 if (stage or 0) >= 2 else 1
            reduced = {name: count for name, count in found["reduced"].items() if found["numels"][name]}
            assert set(reduced.values()) == {rounds}
            both = {name for name, owners in found["owners"].items() if len(owners) == 2}
            stepped = {rank: 0, 1 - rank: 0}
            for name, owners in found["owners"].items():
                for owner, numel in owners:
                    stepped[owner] += numel
                if not stage:
                    assert owners == tuple((owner, found["numels"][name]) for owner in (0, 1) if found["numels"][name])
            if stage:
                assert sum(stepped.values()) == NUMEL
                assert abs(stepped[0] - stepped[1]) < NUMEL // 4  # padding is at the end of buckets
                assert len(both) < len(found["owners"])
            else:
                assert stepped == {0: NUMEL, 1: NUMEL}


BUCKETS = {
    # Last registered first; one of 1089 has a bucket of its own where it does not fit.
    35: [7, 231, 5, 165, 3, 99, 33, 1089, 33, 1089, 33, 33, 33, 627],
    600: [7 + 231 + 5 + 165 + 3 + 99 + 33, 1089, 33, 1089, 33 + 33 + 33, 627],
    1200: [7 + 231 + 5 + 165 + 3 + 99 + 33, 1089 + 33, 1089 + 33 + 33 + 33, 627],
    10**6: [NUMEL],
}
"""Elements of each bucket, by what one may hold."""


@pytest.mark.medium
@STAGES
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bucket_sizes(stage: int, overlap: bool, two_ranks: Ranks) -> None:
    """Buckets hold as much as they may, or half of it where one fills while another travels; parameters are gathered
    in so many parts."""
    halves = overlap and stage >= 2
    for (most, buckets), gather_size in zip(BUCKETS.items(), (700, 200, 20, 10**6), strict=True):
        section = zero(
            stage,
            reduce_bucket_size=2 * most if halves else most,
            allgather_bucket_size=gather_size,
            overlap_comm=overlap,
        )
        for found in two_ranks(reduction_cases.shards, section, 1):
            assert found["buckets"] == buckets
            if stage == 3:  # each rank has what it steps
                assert found["gathered"] == [0, 0]
                continue
            parts = sum(-(-numel // (gather_size // 2)) for numel in found["shards"])
            # At stage 0 nothing is gathered but gradients, bucket by bucket.
            assert found["gathered"] == [parts if stage else len(buckets)] * 2


@pytest.mark.parametrize("overlap", [None, True, False])
def test_overlap_comm(overlap: bool | None, two_ranks: Ranks) -> None:
    """With it buckets leave while backward runs; without it all of them leave after it."""
    keys = {} if overlap is None else {"overlap_comm": overlap}
    for found in two_ranks(reduction_cases.shards, zero(2, **keys), 2):
        assert len(found["launched in backward"]) == 4
        for launched in found["launched in backward"]:
            if overlap is False:
                assert launched == 0
            else:
                assert 2 <= launched <= len(found["buckets"])


def test_an_idle_head_holds_up_no_bucket_once_that_is_known(two_ranks: Ranks) -> None:
    """The last one registered is in the first bucket, and the first bucket to leave: in the next window, the last."""
    for found in two_ranks(reduction_cases.shards, zero(2), 2, ("a", "b")):
        assert found["launched in backward"] == [0] * 2 + [len(found["buckets"]) - 1] * 2


def test_plain_backwards_are_each_reduced_by_themselves(two_ranks: Ranks) -> None:
    """At stage 2, where nothing but the gradients says that one backward is over and another begins."""
    two_ranks(reduction_cases.plain_backwards, 3)


@pytest.mark.parametrize("overlap", [True, False])
def test_stages_0_and_1_reduce_with_the_last_backward(overlap: bool, two_ranks: Ranks) -> None:
    for stage in (0, 1):
        for found in two_ranks(reduction_cases.shards, zero(stage, overlap_comm=overlap), 2):
            first, last, *again = found["launched in backward"]
            assert first == -1, "nobody even meets"
            assert 2 <= last <= len(found["buckets"]) if overlap else last == -1
            assert again == [first, last]


class _Counting(longshore.SimulatedTransfer):
    """Counts copies."""

    staged_copies = published = 0

    def stage(self, *args: Any) -> Any:
        self.staged_copies += 1
        return super().stage(*args)

    def publish(self, *args: Any) -> Any:
        self.published += 1
        return super().publish(*args)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_offload(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cpu``: gradients and weights move to and from the host; ``none``: nothing moves. The same bits."""
    transfers = [_Counting(seed=3)]
    monkeypatch.setattr("longshore.optim.offload.streams_for", lambda device: transfers[0])
    twin = small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    config = file(zero_optimization={"stage": 2, "offload_optimizer": {"device": device, "pin_memory": True}})
    with started(config) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(engine.module, twin, step)
        assert engine.explain(print_it=False).offload == device
        (transfer,) = transfers
        assert (transfer.staged_copies > 0) == (transfer.published > 0) == (device == "cpu")
