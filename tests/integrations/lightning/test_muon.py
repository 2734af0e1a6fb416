"""Muon in Lightning: the weights of torch.optim.Muon and torch.optim.AdamW in the plain Trainer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import Ranks

import longshore
from integrations.lightning import muon_cases as cases
from integrations.lightning.modules import OPTIONS, Net, assert_same, fitted, loader, network, trainer
from integrations.lightning.muon_cases import MUON, ManualMuonNet, MuonNet, PlainMuonOptimizer, groups_of
from longshore.integrations.lightning import FabricLongshoreStrategy, LongshoreStrategy

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")

FITS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "accumulation, schedule by step": (MuonNet, {"accumulate_grad_batches": 3}),
    "manual": (ManualMuonNet, {}),
    "bf16 autocast": (MuonNet, {"precision": "bf16-mixed"}),
    "bf16 parameters": (MuonNet, {"precision": "bf16-true"}),
}


@pytest.fixture(scope="module")
def plain() -> Any:
    """The plain Trainer's weights after a fit, and what was validated."""
    done: dict[str, Any] = {}

    def of(fit: str) -> tuple[pl.LightningModule, list[float]]:
        if fit not in done:
            kind, options = FITS[fit]
            module = kind(PlainMuonOptimizer)
            done[fit] = fitted(module.bfloat16() if "true" in options.get("precision", "") else module, **options)
        return done[fit], done[fit].seen

    return of


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("fit", FITS)
def test_the_weights_are_the_plain_trainers(fit: str, stage: int, plain: Any) -> None:
    kind, options = FITS[fit]
    transfer = longshore.SimulatedTransfer(seed=7)
    offload = longshore.Offload(tile_numel=300, transfer=transfer, speculation_memory="100%")
    expected, seen = plain(fit)
    module = fitted(kind(longshore.Muon), LongshoreStrategy(stage=stage, offload=offload), **options)
    assert_same(module, expected)
    assert module.seen == seen


class Clipping(MuonNet):
    """Clips in plain torch by longshore's definition of the norm, the squares added in float64."""

    def configure_gradient_clipping(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        norm = torch.tensor(sum(float(each.double().pow(2).sum()) for each in gradients) ** 0.5, dtype=torch.float32)
        assert norm > gradient_clip_val
        for gradient in gradients:
            gradient.mul_(gradient_clip_val / (norm + 1e-6))


def test_clipping() -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.05}
    assert_same(
        fitted(MuonNet(longshore.Muon), LongshoreStrategy(), **options),
        fitted(Clipping(PlainMuonOptimizer), **options),
    )


def test_groups_of_a_lightning_module() -> None:
    """``muon_groups`` knows the names of a LightningModule's parameters."""

    class Grouping(Net):
        def configure_optimizers(self) -> Any:
            groups = longshore.muon_groups(self, others=["net.3.weight"], muon=MUON, adamw=OPTIONS, show=False)
            return longshore.Muon(groups)

    assert_same(fitted(Grouping(), LongshoreStrategy()), fitted(cases.Constant(PlainMuonOptimizer)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_configuration_that_names_muon(stage: int) -> None:
    assert_same(
        fitted(cases.Bare(), LongshoreStrategy(cases.configuration(stage))),
        fitted(cases.Decaying(PlainMuonOptimizer)),
    )


def test_resuming(tmp_path: Path) -> None:
    expected = fitted(MuonNet(PlainMuonOptimizer), max_epochs=3)
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    fitted(MuonNet(longshore.Muon), LongshoreStrategy(stage=2), max_epochs=1, **options)
    module = MuonNet(longshore.Muon)
    run = trainer(LongshoreStrategy(stage=3), max_epochs=3)
    run.fit(module, loader(), loader(2), ckpt_path=tmp_path / "last.ckpt")
    assert_same(module, expected)


@pytest.fixture(scope="module")
def ddp() -> Any:
    """DDP's weights."""
    return functools.cache(lambda ranks: ranks(cases.fit, None)[0])


@pytest.mark.medium
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks(stage: int, two_ranks: Ranks, ddp: Any) -> None:
    for found in two_ranks(cases.fit, stage):
        assert_same(found, ddp(two_ranks))


def test_fabric() -> None:
    found = []
    for strategy, make in ((FabricLongshoreStrategy(stage=2), longshore.Muon), ("auto", PlainMuonOptimizer)):
        run = Fabric(accelerator="cpu", strategy=strategy, devices=1)  # pyright: ignore
        run.launch()
        model = network()
        wrapped, optimizer = run.setup(model, make(groups_of(model)))
        for batch in run.setup_dataloaders(loader(4)):
            run.backward(wrapped(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    assert_same(*found)
