"""Checkpoints of the Trainer: a run that goes on from one ends with the bits of the run that was not stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

import longshore
from integrations.lightning.modules import OPTIONS, Net, assert_same, fitted, loader, plain_adamw, trainer, weights
from longshore.errors import CheckpointError
from longshore.integrations.lightning import LongshoreStrategy, models


class Scheduled(Net):
    """With dropout, a schedule, and something of its own in the checkpoint."""

    def __init__(self, make: Any = plain_adamw, width: int = 7) -> None:
        super().__init__(make)
        self.save_hyperparameters("width")
        self.net.insert(1, nn.Dropout(0.2))
        self.counted = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.counted += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_top_k=-1, **options)


def stopped_and_resumed(
    folder: Path, strategies: Any, kind: type[Net] = Scheduled, stop: int = 1, **options: Any
) -> tuple[Net, Net]:
    """A run of three epochs, and one that was stopped after ``stop`` and went on with another strategy and seed."""
    first, second, third = strategies
    torch.manual_seed(5)
    whole = kind()
    trainer(first, max_epochs=3, **options).fit(whole, loader(shuffle=True), loader(1))
    torch.manual_seed(5)
    begun = kind()
    run = trainer(
        second, max_epochs=stop, callbacks=[saving(folder, save_last=True)], enable_checkpointing=True, **options
    )
    run.fit(begun, loader(shuffle=True), loader(1))
    torch.manual_seed(99)
    resumed = kind()
    nn.init.zeros_(resumed.net[0].weight)
    run = trainer(third, max_epochs=3, **options)
    run.fit(resumed, loader(shuffle=True), loader(1), ckpt_path=str(folder / "last.ckpt"))
    return whole, resumed


@pytest.mark.parametrize(
    ("stage", "precision"), [(2, "32-true"), (3, "bf16-true"), pytest.param(1, "bf16-mixed", marks=pytest.mark.slow)]
)
def test_resuming_is_exact(tmp_path: Path, stage: int, precision: str) -> None:
    strategies = [LongshoreStrategy(stage=stage) for _ in range(3)]
    whole, resumed = stopped_and_resumed(tmp_path, strategies, precision=precision)
    assert_same(resumed, whole)
    assert (tmp_path / "last.ckpt").is_dir()
    assert resumed.counted == whole.counted == 21  # pyright: ignore
    found, expected = (each.engine.optimizer for each in (strategies[2], strategies[0]))
    for a, b in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True):
        assert found.state[a].keys() == expected.state[b].keys()
        for name, value in found.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected.state[b][name])), name
    assert found.param_groups[0]["lr"] == expected.param_groups[0]["lr"] < 1e-2


class Clamped(Scheduled):
    """Writes to its parameters after each batch, also the one before a checkpoint, where torch does not see it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class OneLine(Clamped):
    def __init__(self) -> None:
        super().__init__(lambda parameters: longshore.AdamW(parameters, **OPTIONS))


def check_clamped(module: nn.Module) -> None:
    assert max(float(value.abs().max()) for value in weights(module)) < 0.051


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_after_writes_that_torch_cannot_see(tmp_path: Path, precision: str) -> None:
    strategies = [LongshoreStrategy() for _ in range(3)]
    whole, resumed = stopped_and_resumed(tmp_path, strategies, Clamped, precision=precision)
    assert_same(resumed, whole)
    check_clamped(whole)
    if precision == "32-true":
        torch.manual_seed(5)
        plain = Clamped()
        trainer(max_epochs=3).fit(plain, loader(shuffle=True), loader(1))
        assert_same(whole, plain)


def test_a_one_line_optimizer_after_writes_that_torch_cannot_see(tmp_path: Path) -> None:
    """Straight and resumed, as torch's in the same Trainer (which does not restore random numbers)."""
    ours = stopped_and_resumed(tmp_path / "ours", ["auto"] * 3, OneLine)
    theirs = stopped_and_resumed(tmp_path / "theirs", ["auto"] * 3, Clamped)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)
        check_clamped(one)


def test_resuming_at_another_stage_and_place(tmp_path: Path) -> None:
    strategies = [LongshoreStrategy(), LongshoreStrategy(), LongshoreStrategy(stage=0, offload_device="none")]
    whole, resumed = stopped_and_resumed(tmp_path, strategies, accumulate_grad_batches=3)
    assert_same(resumed, whole)


class Resumable(torch.utils.data.DataLoader):
    """A loader that says where it is, as those that Lightning can resume in the middle of an epoch do."""

    def __init__(self, batches: int) -> None:
        super().__init__(loader(batches).dataset, batch_size=4)
        self._at = self._from = 0

    def __iter__(self) -> Any:
        start, self._from = self._from, 0
        return self._rest(super().__iter__(), start)

    def _rest(self, batches: Any, start: int) -> Any:
        for number, batch in enumerate(batches):
            if number >= start:
                self._at = number + 1
                yield batch
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._from = state["at"]


@pytest.mark.parametrize("steps", [1, 2])
def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path, steps: int) -> None:
    torch.manual_seed(5)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": steps, "limit_val_batches": 0}
    whole = Scheduled()
    keep = saving(tmp_path, every_n_train_steps=4 // steps)
    run = trainer(LongshoreStrategy(), callbacks=[keep], enable_checkpointing=True, **options)
    run.fit(whole, Resumable(10))
    path = tmp_path / f"epoch=0-step={4 // steps}.ckpt"
    resumed = Scheduled()
    trainer(LongshoreStrategy(), **options).fit(resumed, Resumable(10), ckpt_path=str(path))
    assert_same(resumed, whole)


def test_what_was_resumed_from_is_not_saved_again_within_a_window(tmp_path: Path) -> None:
    """Lightning's callback forgets that it saved this step, and would save in the middle of the next window."""
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    whole = Scheduled()
    keep = saving(tmp_path, every_n_train_steps=2)
    trainer(LongshoreStrategy(), callbacks=[keep], enable_checkpointing=True, **options).fit(whole, loader(8))
    resumed = Scheduled()
    again = saving(tmp_path, every_n_train_steps=2)
    run = trainer(LongshoreStrategy(), callbacks=[again], enable_checkpointing=True, **options)
    run.fit(resumed, loader(8), ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"))
    assert_same(resumed, whole)
    assert "epoch=1-step=8" in again.best_model_path


def test_the_best_and_the_last_are_kept_and_others_removed(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val", save_top_k=2, save_last="link", filename="{epoch}")
    strategy = LongshoreStrategy()
    module = fitted(Net(), strategy, max_epochs=5, callbacks=[keep], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink() and Path(keep.best_model_path).name == "epoch=4.ckpt"
    run = trainer(LongshoreStrategy())
    other = Net()
    run.test(other, loader(2), ckpt_path=keep.best_model_path, verbose=False)
    assert_same(other, module)
    inspected = longshore.load(keep.best_model_path, Net(), tag="checkpoint")
    assert inspected is not None


def test_weights_only_is_one_file_that_lightning_loads(tmp_path: Path) -> None:
    run, module = trainer(LongshoreStrategy(stage=3)), Scheduled(width=9)
    run.fit(module, loader(), loader(1))
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    run.save_checkpoint(tmp_path / "all.ckpt")
    assert (tmp_path / "weights.ckpt").is_file() and (tmp_path / "all.ckpt").is_dir()
    loaded = Scheduled.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert loaded.hparams["width"] == 9
    assert_same(loaded, module)


def test_going_on_from_a_checkpoint_of_the_plain_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit_val_batches": 0}
    begun = trainer(max_epochs=1, callbacks=[saving(tmp_path, save_last=True)], enable_checkpointing=True, **options)
    begun.fit(Net(), loader())
    whole, resumed = fitted(Net(), max_epochs=3), Net()
    run = trainer(LongshoreStrategy(), max_epochs=3, **options)
    run.fit(resumed, loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert_same(resumed, whole)
    assert run.global_step == 21


def test_what_hooks_put_into_the_state_dict_comes_back(tmp_path: Path) -> None:
    """EMAWeightAveraging saves the average in the place of the weights, and loads both."""

    def run(epochs: int, path: Path | None, strategy: Any) -> Net:
        # Each has a folder of its own, so that none reads what another wrote.
        average, keep = EMAWeightAveraging(decay=0.9), saving(tmp_path / type(strategy).__name__, save_last=True)
        module = Net()
        each = trainer(strategy, max_epochs=epochs, callbacks=[average, keep], enable_checkpointing=True)
        # The average takes the place of the weights where training ends: stopped in its middle, it goes on.
        each.fit(module, loader(), loader(1), ckpt_path=path and str(path))
        return module

    expected = run(3, None, "auto")
    run(3, None, LongshoreStrategy())
    path = tmp_path / "LongshoreStrategy" / "epoch=1-step=14.ckpt"
    assert path.is_dir()
    assert_same(run(3, path, LongshoreStrategy()), expected)


@pytest.mark.parametrize(
    "changed",
    [
        lambda given: {**given, "extra": torch.zeros(1)},
        lambda given: {"weight": given["weight"]},
        lambda given: {**given, "bias": given["bias"].clone()},
        lambda given: list(given.values()),
    ],
    ids=["one more", "one less", "another tensor", "no dictionary"],
)
def test_a_state_dict_that_hooks_changed_is_seen(changed: Callable[[dict[str, Any]], Any]) -> None:
    given = {"weight": torch.ones(2), "bias": torch.ones(1)}
    assert models.unchanged(dict(given), given)
    assert not models.unchanged(changed(given), given)


def test_in_the_middle_of_a_window_it_is_an_error(tmp_path: Path) -> None:
    keep = saving(tmp_path, save_on_train_epoch_end=False)
    run = trainer(
        LongshoreStrategy(),
        callbacks=[keep],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        val_check_interval=3,
    )
    with pytest.raises(CheckpointError, match=r"accumulate_grad_batches is 2.*val_check_interval a multiple"):
        run.fit(Net(), loader(6), loader(1))
    run.save_checkpoint(tmp_path / "weights", weights_only=True)  # which has nothing to lose


def test_a_batch_that_was_interrupted_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    class Failing(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 4:
                raise ValueError("a bad batch")

    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    keep = saving(tmp_path, save_on_exception=True)
    run = trainer(LongshoreStrategy(), callbacks=[keep], enable_checkpointing=True, **options)
    with pytest.raises(ValueError, match="a bad batch"):
        run.fit(Failing(), loader())
    (path,) = tmp_path.iterdir()
    module, strategy = Net(), LongshoreStrategy()
    trainer(strategy, **{**options, "max_steps": 4}).fit(module, loader(), ckpt_path=str(path))
    assert strategy.engine.global_steps == 4
    assert_same(module, fitted(Net(), **{**options, "max_steps": 4}))


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    run = trainer(LongshoreStrategy())
    run.fit(Net(), loader(), loader(1))
    run.save_checkpoint(tmp_path / "one.ckpt")

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(16, 16)

    with pytest.raises(CheckpointError, match=r"more.weight is missing"):
        trainer(LongshoreStrategy(), max_epochs=3).fit(Wider(), loader(), loader(1), ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        run.save_checkpoint(tmp_path / "two.ckpt", storage_options={})
    engine = longshore.initialize(
        model=Net(), config={"optimizer": {"type": "AdamW"}, "train_batch_size": 1, "gradient_clipping": 0}
    ).engine
    engine.save_checkpoint(tmp_path / "other.ckpt", tag="checkpoint")
    with pytest.raises(CheckpointError, match="was not saved by a Trainer or Fabric"):
        trainer(LongshoreStrategy()).fit(Net(), loader(), loader(1), ckpt_path=tmp_path / "other.ckpt")
    engine.destroy()


def test_a_folder_takes_the_place_of_a_file_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = LongshoreStrategy()
    run = trainer(strategy)
    run.fit(Net(), loader(), loader(1))
    path = tmp_path / "last.ckpt"
    path.write_text("of another run")
    with monkeypatch.context() as patch:
        patch.setattr(strategy.engine, "save_checkpoint", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            run.save_checkpoint(path)
    assert path.read_text() == "of another run"
    run.save_checkpoint(path)
    assert path.is_dir() and list(tmp_path.iterdir()) == [path]


def test_weights_stay_readable_after_the_fit() -> None:
    strategy = LongshoreStrategy()
    module = fitted(Net(), strategy)
    assert_same(weights(module), list(module.state_dict().values()))
    strategy.engine.destroy()
