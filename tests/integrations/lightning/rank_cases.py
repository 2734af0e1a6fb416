"""What two ranks do, each with a Trainer or a Fabric of its own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from support import whole
from torch import Tensor

from integrations.lightning.conftest import THEIRS
from integrations.lightning.modules import Finetuned, Layerwise, Net, Stepping, loader, network, plain_adamw, trainer
from longshore.integrations.lightning import FabricLongshoreStrategy, LongshoreStrategy


class InGroup(ClusterEnvironment):
    """The process group that there is."""

    creates_processes_externally = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    main_address = "127.0.0.1"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    main_port = 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """As the tests of one rank are: warnings are errors, but for Lightning's own."""
    with warnings.catch_warnings():
        for each in THEIRS:
            message, _, category = each.removeprefix("ignore:").partition(":")
            warnings.filterwarnings("ignore", message=message, category=FutureWarning if category else Warning)
        # Both are about what is measured, and not about what is trained.
        warnings.filterwarnings("ignore", message=".*It is recommended to use .*sync_dist")
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        yield


def pair(strategy: Any, **options: Any) -> Any:
    return trainer(strategy, devices=2, plugins=[InGroup()], **options)


def weights_of(module: Any) -> list[Tensor]:
    """Whole ones, on every rank."""
    with torch.no_grad():
        return [whole(parameter).clone() for parameter in module.parameters()]


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        net: Any = self.net
        groups = [{"params": net[0].parameters(), "lr": 1e-2}, {"params": net[1:].parameters()}]
        optimizer = self.make(groups)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


KINDS: dict[str, type[Net]] = {"plain": Net, "automatic": Scheduled, "manual": Stepping}


def fit(kind: str, stage: int | None, **options: Any) -> tuple[list[Tensor], list[Any], float]:
    """After a fit, with validation; stage None is Lightning's DDP."""
    with quiet():
        strategy = "ddp" if stage is None else LongshoreStrategy(stage=stage, tile_numel=300)
        module = KINDS[kind]()
        run = pair(strategy, **options)
        run.fit(module, loader(8), loader(2))
        found = weights_of(module)
        share = 1.0
        if isinstance(strategy, LongshoreStrategy):
            held = sum(
                parameter.to_local().numel() if stage == 3 else parameter.numel()  # pyright: ignore
                for parameter in module.parameters()
            )
            share = held / sum(parameter.numel() for parameter in network().parameters())
            # The engine is there still: an evaluation has the shards.
            module.seen.clear()
            run.test(module, loader(2), verbose=False)
            strategy.engine.destroy()
        return found, module.seen, share


def resume(folder: str, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """A run, and one that was stopped and went on."""
    with quiet():
        found = []
        for epochs, path in ((3, None), (1, None), (3, f"{folder}/last.ckpt")):
            callbacks = [] if path or epochs == 3 else [ModelCheckpoint(folder, save_last=True)]
            strategy = LongshoreStrategy(stage=stage)
            run = pair(strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=bool(callbacks))
            module = Scheduled()
            run.fit(module, loader(8), loader(2), ckpt_path=path)
            found.append(weights_of(module))
            if epochs == 1:
                run.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
            strategy.engine.destroy()
        only = torch.load(f"{folder}/weights.ckpt", weights_only=False)["state_dict"]
        assert all(torch.equal(a, b) for a, b in zip(only.values(), found[1], strict=True))
        files = {entry.name for entry in Path(folder, "last.ckpt", "checkpoint").iterdir()}
        assert {"rank-00000.json", "rank-00001.json"} <= files
        _evaluate(folder, stage, found[1])
        return found[0], found[2]


def finetuned(path: str, stage: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """A run whose callback adds groups, one that was stopped after they were added and went on, and its rates."""
    with quiet():
        found, rates = [], []
        for epochs, start in ((4, None), (3, None), (4, path)):
            strategy = LongshoreStrategy(stage=stage)
            run = pair(strategy, max_epochs=epochs, callbacks=[Layerwise()])
            module = Finetuned()
            run.fit(module, loader(8), loader(2), ckpt_path=start)
            found.append(weights_of(module))
            rates = [group["lr"] for group in run.optimizers[0].param_groups]
            if epochs == 3:
                run.save_checkpoint(path)
            strategy.engine.destroy()
        return found[0], found[2], rates


def _evaluate(folder: str, stage: int, expected: list[Tensor]) -> None:
    """A model that no optimizer steps, from the folder and from the file."""
    for name in ("last.ckpt", "weights.ckpt"):
        module = Net()
        pair(LongshoreStrategy(stage=stage)).test(module, loader(2), ckpt_path=f"{folder}/{name}", verbose=False)
        assert all(hasattr(parameter, "to_local") is (stage == 3) for parameter in module.parameters())
        found = weights_of(module)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


class Late(Net):
    """Its network is made where Lightning says that it can be without weights."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = network()
            self.seen.append(self.net[0].weight.is_meta)


def late() -> tuple[list[Any], list[Tensor]]:
    with quiet():
        module, strategy = Late(), LongshoreStrategy(stage=3)
        pair(strategy, max_epochs=1).fit(module, loader(8), loader(2))
        found = module.seen[:1], weights_of(module)
        strategy.engine.destroy()
        return found


def fabric(stage: int | None, steps: int) -> list[Tensor]:
    with quiet():
        strategy = "ddp" if stage is None else FabricLongshoreStrategy(stage=stage)
        run = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[InGroup()])
        run.launch()
        with run.init_module():
            model = network()
        wrapped, optimizer = run.setup(model, plain_adamw(model.parameters()))
        for number, batch in enumerate(run.setup_dataloaders(loader(8))):
            waits = number % steps != steps - 1
            with run.no_backward_sync(wrapped, enabled=waits):
                run.backward(wrapped(batch).pow(2).mean())
            if not waits:
                optimizer.step()
                optimizer.zero_grad()
        found = weights_of(model)
        if stage is not None:
            wrapped._forward_module.destroy()
        return found


def average() -> str:
    with quiet():
        try:
            pair(LongshoreStrategy(stage=3), callbacks=[EMAWeightAveraging()]).fit(Net(), loader(8), loader(2))
        except ValueError as error:
            return str(error)
        return "nothing"
