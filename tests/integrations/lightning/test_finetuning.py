"""Callbacks that add parameter groups while training: a run that goes on has them too, each with its own settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from ranks import Ranks
from torch import Tensor

from integrations.lightning import rank_cases
from integrations.lightning.modules import Finetuned, Layerwise, assert_same, loader, trainer
from longshore.errors import CheckpointError
from longshore.integrations.lightning import LongshoreStrategy


def backbone() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=1e-3, should_align=True)


def resumed(path: Path, strategies: Any, callback: Callable[[], Callback]) -> tuple[Finetuned, Any]:
    """A run that is stopped after 3 of 4 epochs and goes on, with another strategy."""
    run = trainer(strategies[0], max_epochs=3, callbacks=[callback()])
    run.fit(Finetuned(), loader(), loader(1))
    run.save_checkpoint(path)
    module = Finetuned()
    run = trainer(strategies[1], max_epochs=4, callbacks=[callback()])
    run.fit(module, loader(), loader(1), ckpt_path=str(path))
    return module, run.optimizers[0]


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Of the plain Trainer's optimizer and of longshore's, without what only one of them has."""
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    return [
        {"params": len(group["params"]), **{name: group[name] for name in names}} for group in optimizer.param_groups
    ]


@pytest.mark.medium
@pytest.mark.parametrize("kind", [backbone, Layerwise])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [LongshoreStrategy(stage=2, tile_numel=300) for _ in range(2)],
        lambda: [LongshoreStrategy(stage=0, offload_device="none"), LongshoreStrategy(stage=3)],
        lambda: ["auto", LongshoreStrategy()],
    ],
    ids=["stage 2", "stage 0, then 3", "a file of the plain Trainer"],
)
def test_the_groups_of_a_callback_come_back(tmp_path: Path, kind: Any, make: Callable[[], Any]) -> None:
    expected, plain = resumed(tmp_path / "plain.ckpt", ["auto", "auto"], kind)
    found, optimizer = resumed(tmp_path / "ours.ckpt", make(), kind)
    assert len(plain.param_groups) == (2 if kind is backbone else 3)
    assert settings(optimizer) == settings(plain)
    assert_same(found, expected)


def test_the_next_fit_of_a_trainer_that_resumed_begins_without_them(tmp_path: Path) -> None:
    found = []
    for make in (lambda: "auto", LongshoreStrategy):
        path = tmp_path / f"{make.__name__}.ckpt"
        run = trainer(make(), max_epochs=3, callbacks=[backbone()])
        run.fit(Finetuned(), loader(), loader(1))
        run.save_checkpoint(path)
        run = trainer(make(), max_epochs=4, callbacks=[backbone()])
        run.fit(Finetuned(), loader(), loader(1), ckpt_path=str(path))
        run.fit_loop.max_epochs = 5
        module = Finetuned()
        run.fit(module, loader(), loader(1))
        found.append((module, [len(group["params"]) for group in run.optimizers[0].param_groups]))
    assert_same(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


class Joining(Callback):
    """Adds a group that is trained from then on, which Lightning's callbacks know nothing of."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        BaseFinetuning.make_trainable(pl_module.backbone)
        if len(trainer.optimizers[0].param_groups) == 1:
            group = {"params": list(pl_module.backbone.parameters()), "lr": 1e-3, "weight_decay": 0.3}
            trainer.optimizers[0].add_param_group(group)


def test_groups_that_only_the_checkpoint_knows_come_back(tmp_path: Path) -> None:
    """torch's optimizer refuses such a checkpoint; the run that was not stopped is what to compare with."""
    expected = Finetuned(frozen=True)
    trainer(max_epochs=4, callbacks=[Joining()]).fit(expected, loader(), loader(1))
    path, module = tmp_path / "ours.ckpt", Finetuned(frozen=True)
    run = trainer(LongshoreStrategy(), max_epochs=2, callbacks=[Joining()])
    run.fit(Finetuned(frozen=True), loader(), loader(1))
    run.save_checkpoint(path)
    run = trainer(LongshoreStrategy(), max_epochs=4, callbacks=[Joining()])
    run.fit(module, loader(), loader(1), ckpt_path=str(path))
    assert [group["weight_decay"] for group in run.optimizers[0].param_groups] == [0.1, 0.3]
    assert_same(module, expected)


def test_groups_that_are_trained_without_being_asked_for_are_named(tmp_path: Path) -> None:
    run = trainer(LongshoreStrategy(), max_epochs=1, callbacks=[Joining()])
    run.fit(Finetuned(frozen=True), loader(), loader(1))
    run.save_checkpoint(tmp_path / "ours.ckpt")

    class HeadOnly(Finetuned):
        def configure_optimizers(self) -> Any:
            return self.make(self.head.parameters())

    with pytest.warns(UserWarning, match=r"also had backbone\.0\.weight and others.*added again"):
        trainer(LongshoreStrategy(), max_epochs=2).fit(
            HeadOnly(), loader(), loader(1), ckpt_path=str(tmp_path / "ours.ckpt")
        )


def test_other_groups_are_not_rearranged(tmp_path: Path) -> None:
    """A model whose optimizer begins with other groups: loading says what does not fit."""
    run = trainer(LongshoreStrategy(), max_epochs=1, callbacks=[Joining()])
    run.fit(Finetuned(frozen=True), loader(), loader(1))
    run.save_checkpoint(tmp_path / "ours.ckpt")
    with pytest.raises(CheckpointError, match="options differ from each other"):
        trainer(LongshoreStrategy(), max_epochs=2).fit(
            Finetuned(), loader(), loader(1), ckpt_path=str(tmp_path / "ours.ckpt")
        )


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_groups_come_back_on_two_ranks(stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    results: list[tuple[list[Tensor], list[Tensor], list[float]]] = two_ranks(
        rank_cases.finetuned, str(tmp_path / "last.ckpt"), stage
    )
    for whole, found, rates in results:
        assert_same(found, whole)
        assert len(set(rates)) == len(rates) == 3
        assert not any(torch.equal(a, b) for a, b in zip(found, Finetuned().parameters(), strict=True))
