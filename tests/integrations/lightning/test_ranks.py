"""Two ranks: the weights are those of Lightning's DDP, and each rank saves and holds its part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.utils.data import DistributedSampler

from integrations.lightning import rank_cases
from integrations.lightning.modules import assert_same, loader, network, plain_adamw


@pytest.fixture(scope="module")
def ddp() -> Any:
    """DDP's result of a case."""
    done: dict[Any, Any] = {}

    def of(ranks: Ranks, kind: str, **options: Any) -> Any:
        key = (kind, *sorted(options.items()))
        if key not in done:
            done[key] = ranks(rank_cases.fit, kind, None, **options)
        return done[key]

    return of


@pytest.mark.medium
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3])
def test_a_fit_ends_with_the_weights_of_ddp(stage: int, two_ranks: Ranks, ddp: Any) -> None:
    expected = ddp(two_ranks, "automatic")
    for rank, (found, seen, share) in enumerate(two_ranks(rank_cases.fit, "automatic", stage)):
        assert_same(found, expected[0][0])
        assert len(seen) == 1 and share == (0.5 if stage == 3 else 1.0), rank


@pytest.mark.medium
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_manual_optimization(stage: int, two_ranks: Ranks, ddp: Any) -> None:
    assert_same(two_ranks(rank_cases.fit, "manual", stage)[1][0], ddp(two_ranks, "manual")[0][0])


def test_accumulation_at_stage_1_is_ddps(two_ranks: Ranks, ddp: Any) -> None:
    options = {"accumulate_grad_batches": 3}
    assert_same(
        two_ranks(rank_cases.fit, "automatic", 1, **options)[0][0], ddp(two_ranks, "automatic", **options)[0][0]
    )


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_accumulation_where_each_backward_is_reduced(stage: int, two_ranks: Ranks) -> None:
    """Means over the ranks are added up, in float32; the last window of an epoch is short."""
    found = two_ranks(rank_cases.fit, "automatic", stage, accumulate_grad_batches=3)
    model = network()
    optimizer = plain_adamw([{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1:].parameters()}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(2):
        for step, batches in enumerate(_batches(epoch)):
            for parameter, mean in zip(model.parameters(), _means(model, batches, 3), strict=True):
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            if step in (2, 3):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    assert_same(found[0][0], model)


def _batches(epoch: int, shuffle: bool = True) -> list[list[Tensor]]:
    """Those of both ranks, by step, as Lightning's sampler for a Trainer shuffles them."""
    rows = loader(8).dataset
    samplers = [DistributedSampler(rows, 2, rank, shuffle) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    of_rank = [[rows[index] for index in sampler] for sampler in samplers]
    return [[torch.stack(mine[4 * step : 4 * step + 4]) for mine in of_rank] for step in range(4)]


def _means(model: torch.nn.Module, batches: list[Tensor], steps: int) -> list[Tensor]:
    """Over the ranks, of gradients that are accumulated."""
    parameters = list(model.parameters())
    by_rank = [torch.autograd.grad(model(batch).pow(2).mean() / steps, parameters) for batch in batches]
    return [(a + b) / 2 for a, b in zip(*by_rank, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_resuming_is_exact(stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    for whole, resumed in two_ranks(rank_cases.resume, str(tmp_path), stage):
        assert_same(resumed, whole)


@pytest.mark.needs_torch("stage 3")
def test_configure_model_makes_weights_on_rank_0_only(two_ranks: Ranks, ddp: Any) -> None:
    results = two_ranks(rank_cases.late)
    assert [seen for seen, _ in results] == [[False], [True]]
    expected = ddp(two_ranks, "plain", max_epochs=1)
    for _, found in results:
        assert_same(found, expected[0][0])


def test_averages_of_shards_are_refused(two_ranks: Ranks) -> None:
    for said in two_ranks(rank_cases.average):
        assert "EMAWeightAveraging averages whole weights, and at stage 3" in said


@pytest.mark.parametrize(("stage", "steps"), [(1, 2), (3, 1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_fabric(stage: int, steps: int, two_ranks: Ranks) -> None:
    expected = two_ranks(rank_cases.fabric, None, steps)[0]
    for found in two_ranks(rank_cases.fabric, stage, steps):
        assert_same(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_fabric_does_not_synchronize_is_reduced_as_one(stage: int, two_ranks: Ranks) -> None:
    """The first two of three backwards add up on their rank; at these stages the third is reduced by itself."""
    found = two_ranks(rank_cases.fabric, stage, 3)[0]
    model = network()
    optimizer, parameters = plain_adamw(model.parameters()), list(model.parameters())
    first, second, third = _batches(0, shuffle=False)[:3]
    by_rank = [
        [torch.autograd.grad(model(batch).pow(2).mean(), parameters) for batch in (first[rank], second[rank])]
        for rank in range(2)
    ]
    sums = [[a + b for a, b in zip(*mine, strict=True)] for mine in by_rank]
    last = _means(model, [third[0], third[1]], 1)
    for parameter, a, b, mean in zip(parameters, *sums, last, strict=True):
        parameter.grad = (a + b) / 2 + mean
    optimizer.step()
    assert_same(found, model)


_SCRIPT = """
import warnings; warnings.filterwarnings("ignore")
import sys, torch; sys.path.insert(0, {tests!r})
from integrations.lightning.modules import Net, loader, trainer
from longshore.integrations.lightning import LongshoreStrategy
torch.set_num_threads(1)
run = trainer(LongshoreStrategy(stage=2), devices=2)
module = Net()
run.fit(module, loader(8), loader(2))
if run.global_rank == 0:
    torch.save(list(module.parameters()), {path!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [pytest.param(False, marks=pytest.mark.full), True])
def test_processes_that_lightning_or_torchrun_starts(torchrun: bool, tmp_path: Path) -> None:
    script, path = tmp_path / "script.py", tmp_path / "weights.pt"
    script.write_text(_SCRIPT.format(tests=str(Path(__file__).parents[2]), path=str(path)))
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command = [sys.executable, *(launcher if torchrun else ()), str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model = network()
    optimizer = plain_adamw(model.parameters())
    for epoch in range(2):
        for batches in _batches(epoch):
            for parameter, mean in zip(model.parameters(), _means(model, batches, 1), strict=True):
                parameter.grad = mean
            optimizer.step()
    assert_same(torch.load(path), model)
