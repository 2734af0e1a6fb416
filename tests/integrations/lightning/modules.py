"""Models for Lightning, which train alike with its own strategies and with longshore's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from support import PlainLoop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Rows(Dataset[Tensor]):
    """Batches by their number, the same wherever they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(1000 + index))


def loader(batches: int = 7, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(4 * batches), batch_size=4, **options)


def network() -> nn.Sequential:
    """Parameters of a multiple of 16 elements, which torch's fused CPU optimizer rounds alike; two blocks repeat."""
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))

    return nn.Sequential(nn.Linear(16, 32), block(), block(), nn.Linear(32, 16))


def plain_adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """What longshore promises to equal."""
    return torch.optim.AdamW(parameters, fused=True, **{**OPTIONS, **options})


class Masters(torch.optim.Optimizer):
    """The loop of plain PyTorch with float32 masters, as an optimizer."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**OPTIONS, **options})
        self._loop = PlainLoop(self.param_groups, **{**OPTIONS, **options})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for mine, theirs in zip(self.param_groups, self._loop.optimizer.param_groups, strict=True):
            theirs["lr"] = mine["lr"]
        self._loop.step([parameter.grad for parameter in self._loop.parameters])
        return loss


class Net(pl.LightningModule):
    """A network with a loss; ``make`` makes its optimizer from parameters."""

    def __init__(self, make: Callable[..., Any] = plain_adamw) -> None:
        super().__init__()
        self.net = network()
        self.make = make
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).float().pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("val", loss)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.net(batch).float().pow(2).mean().item())  # not through forward

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Stepping(Net):
    """Manual optimization, one step a batch."""

    def __init__(self, make: Callable[..., Any] = plain_adamw) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Finetuned(Net):
    """A backbone and a head. ``frozen``: the backbone from the start, whatever callbacks do."""

    def __init__(self, make: Callable[..., Any] = plain_adamw, frozen: bool = False) -> None:
        super().__init__(make)
        self.backbone, self.head = self.net[:-1], self.net[-1]
        del self.net
        self.backbone.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return self.make([parameter for parameter in self.parameters() if parameter.requires_grad])


class Layerwise(BaseFinetuning):
    """Adds a group in each of the first two epochs after the first, and thaws what it has added after resuming."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        parts = {1: pl_module.backbone[2:], 2: pl_module.backbone[:2]}
        for start, part in parts.items():
            if epoch == start:
                self.unfreeze_and_add_param_group(part, optimizer, lr=1e-2 / start)
            elif epoch > start:
                self.make_trainable(part)


def trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not supported on CPU")
        return pl.Trainer(
            strategy=strategy, **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **options}
        )


def fitted(module: pl.LightningModule, strategy: Any = "auto", batches: int = 7, **options: Any) -> pl.LightningModule:
    """After a fit with validation, by ``strategy``."""
    trainer(strategy, **options).fit(module, loader(batches), loader(2))
    return module


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_same(found: nn.Module | Sequence[Tensor], expected: nn.Module | Sequence[Tensor]) -> None:
    """Bit for bit, and not what the network began with."""
    lists = [weights(each) if isinstance(each, nn.Module) else list(each) for each in (found, expected)]
    assert len(lists[0]) == len(lists[1])
    for number, (a, b) in enumerate(zip(*lists, strict=True)):
        assert torch.equal(a, b), f"parameter {number} differs by up to {(a - b).abs().max()}"
    begun = weights(network())
    assert len(begun) != len(lists[0]) or any(
        not torch.equal(a.float(), b) for a, b in zip(lists[0], begun, strict=True)
    )
