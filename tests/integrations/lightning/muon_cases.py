"""Modules that Muon trains, with longshore's or with torch's; and fits on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import longshore
from integrations.lightning.modules import OPTIONS, Net, loader
from integrations.lightning.rank_cases import pair, quiet, weights_of
from longshore.integrations.lightning import LongshoreStrategy

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def groups_of(network: Any, vectors: float = 0.0) -> list[dict[str, Any]]:
    """As ``muon_groups`` makes them where the last matrix is named; ``vectors``: weight decay of norms and biases."""
    head = network[3].weight
    matrices = [each for each in network.parameters() if each.ndim == 2 and each is not head]
    return [
        {"params": matrices, "use_muon": True, **MUON},
        {"params": [head], "use_muon": False, **OPTIONS},
        {
            "params": [each for each in network.parameters() if each.ndim == 1],
            "use_muon": False,
            **OPTIONS,
            "weight_decay": vectors,
        },
    ]


class PlainMuonOptimizer(torch.optim.Optimizer):
    """``torch.optim.Muon`` and ``torch.optim.AdamW`` on float32 masters, as one optimizer."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        from plain_muon import MuonLoop  # for which torch has to have a Muon

        super().__init__(groups, {})
        self._loop = MuonLoop(self.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for mine, theirs in zip(self.param_groups, self._loop.param_groups, strict=True):
            theirs["lr"] = mine["lr"]
        self._loop.step([parameter.grad for parameter in self._loop.parameters])
        return loss


class Constant(Net):
    """The groups of both, without a schedule."""

    vectors = 0.0

    def configure_optimizers(self) -> Any:
        return self.make(groups_of(self.net, self.vectors))


class Decaying(Constant):
    """Norms and biases have a weight decay too, as a configuration has one for all."""

    vectors = 0.1


class MuonNet(Constant):
    """With a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class ManualMuonNet(Constant):
    """Manual optimization: two backwards a step, and some batches without one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(2 * batch), retain_graph=True)
        if batch_idx % 3 != 2:
            optimizer.step()


class Bare(Net):
    """Leaves the optimizer to the configuration."""

    def configure_optimizers(self) -> None:
        return None


def configuration(stage: int) -> dict[str, Any]:
    """A DeepSpeed file's content with the numbers of :class:`Decaying`."""
    rates = {"muon_lr": MUON["lr"], "adam_lr": OPTIONS["lr"]}
    params = {**OPTIONS, **rates, "ns_method": "standard", "others": ["net.3.weight"]}
    return {
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def fit(stage: int | None) -> list[Tensor]:
    """The whole weights after a fit of two ranks; stage None is Lightning's DDP."""
    with quiet():
        strategy = "ddp" if stage is None else LongshoreStrategy(stage=stage, tile_numel=300, speculation_memory="100%")
        module = MuonNet(PlainMuonOptimizer if stage is None else longshore.Muon)
        pair(strategy).fit(module, loader(8), loader(2))
        found = weights_of(module)
        if isinstance(strategy, LongshoreStrategy):
            strategy.engine.destroy()
        return found
