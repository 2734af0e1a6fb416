"""What the threads' tests share: an engine made from a DeepSpeed configuration, beside plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from engine.scenarios import Oracle, Scenario, Window, drive, make_model, norm_of
from support import whole
from torch import Tensor

import longshore

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}


def zero(stage: int, offload: str = "cpu", **options: Any) -> dict[str, Any]:
    """A configuration file's content: this stage, small buckets, no clipping, AdamW."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": dict(OPTIONS)},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": offload, "pin_memory": offload == "cpu"},
            "reduce_bucket_size": 1500,
            "allgather_bucket_size": 1500,
            "overlap_comm": True,
            **options,
        },
    }


class Comparison:
    """An engine and what plain PyTorch makes of the same window, step by step.

    Attributes:
        engine: under test.
        oracle: on a twin of its model.
        norms: that the engine measured, where the scenario clips.
    """

    def __init__(
        self, scenario: Scenario, config: dict[str, Any], dtype: torch.dtype = torch.float32, simulated: bool = False
    ) -> None:
        # Fixed.
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.scenario, self.dtype = scenario, dtype
        config = copy.deepcopy(config)
        if scenario.clip is not None:
            config["gradient_clipping"] = scenario.clip
        zero_options = config["zero_optimization"]
        model = make_model(dtype, scenario.tied)
        scenario.prepare(model)
        place = zero_options["offload_optimizer"]["device"]
        transfer = longshore.SimulatedTransfer(seed=self.rank) if simulated and place == "cpu" else None
        schedule = scenario.schedule
        self.engine, _, _, _ = longshore.initialize(
            model=model,
            model_parameters=scenario.groups(model) if scenario.groups else list(model.parameters()),
            config=config,
            offload=longshore.Offload(scenario.tile_numel, threads=1, transfer=transfer, device=place),
            lr_scheduler=(lambda made: torch.optim.lr_scheduler.LambdaLR(made, schedule)) if schedule else None,
        )
        self.oracle = Oracle(scenario, dtype, self.world_size, zero_options["stage"], **OPTIONS)
        self._base = [group["lr"] for group in self.oracle.loop.optimizer.param_groups]
        # Changes with every step.
        self.norms: list[float] = []

    def drive(self, step: int, window: Window | None = None, calls: Any = None) -> None:
        """The window on the engine; ``calls`` receives the calls in its place."""
        drive(calls or self.engine, window or self.scenario.plan(step), step, self.rank, self.dtype)

    def gradients(self, step: int, window: Window | None = None) -> list[Tensor | None]:
        """What plain PyTorch makes of the window, for :meth:`step`."""
        window = window or self.scenario.plan(step)
        accumulation = window.accumulation or self.engine.gradient_accumulation_steps()
        return self.oracle.gradients(window, step, accumulation)

    def step(self, step: int, gradients: list[Tensor | None]) -> None:
        """Step the twin as the engine stepped, and compare every bit of every weight.

        With clipping, the twin gets the engine's coefficient, and the engine's norm is compared with float64's.
        """
        schedule, clip, coefficient = self.scenario.schedule, self.scenario.clip, 1.0
        if schedule is not None:
            for group, lr in zip(self.oracle.loop.optimizer.param_groups, self._base, strict=True):
                group["lr"] = lr * schedule(step)
        if clip is not None:
            norm = self.engine.get_global_grad_norm()
            assert norm is not None and abs(norm - norm_of(gradients)) <= 1e-6 * norm
            coefficient = float(torch.clamp(clip / (torch.tensor(norm) + 1e-6), max=1.0))
            self.norms.append(norm)
        self.oracle.loop.step(gradients, coefficient)
        named = self.engine.module.named_parameters()
        for (name, ours), theirs in zip(named, self.oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs), f"step {step}: {name} differs"

    def run(self, before: Callable[[int], None] = lambda step: None, calls: Any = None) -> None:
        """All steps of the scenario, each compared; ``before`` is called at the beginning of each."""
        for step in range(self.scenario.steps):
            before(step)
            self.drive(step, calls=calls)
            self.step(step, self.gradients(step))

    def account(self) -> dict[str, tuple[int, int | None, int]]:
        """Of the last window, by parameter: gradients that arrived, were reduced, were applied."""
        rows = self.engine.explain(False).parameters
        return {row.name: (row.arrived, row.reduced, row.applied) for row in rows}


@contextlib.contextmanager
def compared(scenario: Scenario, config: dict[str, Any], **options: Any) -> Iterator[Comparison]:
    """A comparison, closed at the end."""
    with warnings.catch_warnings():
        # Notes about keys of the file are the configuration's business, and tested there.
        warnings.simplefilter("ignore", UserWarning)
        comparison = Comparison(scenario, config, **options)
    try:
        yield comparison
    finally:
        comparison.engine.optimizer.close()
