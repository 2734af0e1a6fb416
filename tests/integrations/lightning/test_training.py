"""The Trainer with longshore ends with the weights of the plain Trainer."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import longshore
from integrations.lightning.modules import Masters, Net, assert_same, fitted, loader, trainer, weights
from longshore.engine.ranks import join
from longshore.errors import LongshoreError
from longshore.integrations.lightning import LongshoreStrategy


class Grouped(Net):
    """Groups of their own learning rates and decays, one of them frozen, and a schedule."""

    schedule: ClassVar[Any] = {"interval": "step"}

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        net[2].requires_grad_(False)
        optimizer = self.make(
            [
                {"params": net[0].parameters(), "lr": 1e-2},
                {"params": [*net[1].parameters(), *net[2].parameters()], "weight_decay": 0.0},
                {"params": net[3].parameters(), "betas": (0.5, 0.9)},
            ]
        )
        kind, options = torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 20}
        if "monitor" in self.schedule:
            kind, options = torch.optim.lr_scheduler.ReduceLROnPlateau, {"patience": 0, "threshold": 0.9}
        if self.schedule.get("chain"):
            parts: list[Any] = [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ]
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])
        else:
            schedule = kind(optimizer, **options)
        rest = {key: value for key, value in self.schedule.items() if key != "chain"}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **rest}}


class GroupedByEpoch(Grouped):
    schedule: ClassVar[Any] = {"interval": "epoch"}


class OnPlateau(Grouped):
    schedule: ClassVar[Any] = {"interval": "epoch", "monitor": "val"}


class Chained(Grouped):
    schedule: ClassVar[Any] = {"interval": "step", "chain": True}


class Manual(Net):
    """Two backwards a step, some steps left out, gradients of a head that is toggled off."""

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


class ManualAccumulation(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()  # pyright: ignore
            optimizer.zero_grad()  # pyright: ignore
            schedule.step()  # pyright: ignore

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Hooked(Net):
    """Hooks that people override: their own backward, and a step with a warmup that leaves batches out."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()

    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + batch_idx)
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Skipping(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            return None
        return {"loss": self.loss(batch), "more": batch_idx}


class Unfreezing(Net):
    """A part that joins the optimizer after the first epoch, as BaseFinetuning does it."""

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        net[0].requires_grad_(False)
        return self.make([{"params": [p for p in self.parameters() if p.requires_grad]}])

    def on_train_epoch_start(self) -> None:
        net: Any = self.net
        if self.current_epoch == 1:
            net[0].requires_grad_(True)
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 1e-3})


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "one batch a step": (Net, {}),
    "accumulation, the last window of an epoch is short": (Net, {"accumulate_grad_batches": 3}),
    "accumulation by epoch": (Net, {"callbacks": [lambda: GradientAccumulationScheduler({0: 2, 1: 3})]}),
    "groups, schedule by step": (Grouped, {"accumulate_grad_batches": 2}),
    "groups, schedule by epoch": (GroupedByEpoch, {"max_epochs": 3}),
    "groups, plateau": (OnPlateau, {"max_epochs": 4}),
    "groups, schedules in a row": (Chained, {}),
    "manual": (Manual, {}),
    "manual accumulation": (ManualAccumulation, {}),
    "hooks": (Hooked, {}),
    "a training_step that returns None": (Skipping, {"accumulate_grad_batches": 3}),
    "validation between steps": (Net, {"val_check_interval": 2, "num_sanity_val_steps": 2}),
    "parameters that join": (Unfreezing, {}),
    "bf16 autocast": (Net, {"precision": "bf16-mixed"}),
}


def options_of(case: str) -> dict[str, Any]:
    """Callbacks keep state, so each fit has its own."""
    options = CASES[case][1]
    return {**options, "callbacks": [make() for make in options.get("callbacks", [])]}


@pytest.fixture(scope="module")
def plain() -> Any:
    """The plain Trainer's result of a case: weights, and what was validated."""
    done: dict[str, Any] = {}

    def of(case: str) -> tuple[list[Tensor], list[float]]:
        if case not in done:
            torch.manual_seed(0)
            module = fitted(CASES[case][0](), **options_of(case))
            done[case] = weights(module), module.seen
        return done[case]

    return of


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_the_plain_trainers(case: str, plain: Any) -> None:
    expected, seen = plain(case)
    module = fitted(CASES[case][0](), LongshoreStrategy(stage=2, tile_numel=300), **options_of(case))
    assert_same(module, expected)
    assert module.seen == seen


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("case", ["groups, schedule by step", "manual accumulation"])
def test_at_every_stage(case: str, stage: int, plain: Any) -> None:
    strategy = LongshoreStrategy(stage=stage, offload_device="none" if stage == 1 else "cpu")
    assert_same(fitted(CASES[case][0](), strategy, **options_of(case)), plain(case)[0])


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize("ahead", [0, 10**6])
@pytest.mark.parametrize("case", ["accumulation, the last window of an epoch is short", "manual accumulation"])
def test_on_the_simulated_device(case: str, ahead: int, plain: Any) -> None:
    transfer = longshore.SimulatedTransfer(seed=7)
    offload = longshore.Offload(tile_numel=300, transfer=transfer, speculation_memory=ahead)
    strategy = LongshoreStrategy(offload=offload)
    assert_same(fitted(CASES[case][0](), strategy, **options_of(case)), plain(case)[0])
    assert (strategy.engine.optimizer.speculation is not None) is bool(ahead)


class Exactly(Net):
    """Clips in plain torch by longshore's definition of the norm, the squares added in float64."""

    def configure_gradient_clipping(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(gradient.double().pow(2).sum()) for gradient in gradients)
        norm = torch.tensor(total**0.5, dtype=torch.float32)
        self.seen.append(float(norm))
        for gradient in gradients:
            gradient.mul_(torch.clamp(gradient_clip_val / (norm + 1e-6), max=1.0))


class Watching(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.seen.append(float(strategy.grad_norm()))


@pytest.mark.parametrize("steps", [1, 3])
def test_clipping_and_the_norm_before(steps: int) -> None:
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": steps, "limit_val_batches": 0}
    expected = fitted(Exactly(), **options)
    module = fitted(Watching(), LongshoreStrategy(), **options)
    assert_same(module, expected)
    assert module.seen == expected.seen and max(expected.seen) > 0.3


class ClipsItself(Net):
    """Some steps only, each to another norm."""

    def configure_gradient_clipping(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if len(self.seen) % 2:
            self.clip_gradients(optimizer, 0.1 * len(self.seen), "norm")
        self.seen.append(0)


class ClipsItselfExactly(Exactly):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if len(self.seen) % 2:
            super().configure_gradient_clipping(optimizer, 0.1 * len(self.seen))
        else:
            self.seen.append(0)


def test_clipping_by_a_hook() -> None:
    expected = fitted(ClipsItselfExactly(), limit_val_batches=0)
    assert_same(fitted(ClipsItself(), LongshoreStrategy(), limit_val_batches=0), expected)


def test_clipping_in_manual_optimization() -> None:
    class Clips(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()

        def clip(self, optimizer: Any) -> None:
            self.clip_gradients(optimizer, 0.1, "norm")

    class Plain(Clips, Exactly):
        def clip(self, optimizer: Any) -> None:
            self.configure_gradient_clipping(optimizer, 0.1)

    assert_same(fitted(Clips(), LongshoreStrategy(stage=1)), fitted(Plain()))


def test_bf16_parameters_have_float32_masters() -> None:
    found = fitted(Net(), LongshoreStrategy(), precision="bf16-true", accumulate_grad_batches=1)
    assert all(parameter.dtype == torch.bfloat16 for parameter in found.parameters())
    module = Net(Masters)
    expected = fitted(module.bfloat16(), precision="bf16-true")
    assert_same(found, expected)


def test_fp16_autocast_scales_the_loss_and_skips_overflows() -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))

    strategy = LongshoreStrategy()
    found = fitted(Net(), strategy, plugins=plugin(), batches=30)
    assert 0 < strategy.engine.skipped_steps < strategy.engine.global_steps
    assert_same(found, fitted(Net(), plugins=plugin(), batches=30))


def test_callbacks_read_and_average_weights_between_steps() -> None:
    def average() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.9)

    options: dict[str, Any] = {"val_check_interval": 3}
    expected = fitted(Net(), callbacks=[average()], **options)
    assert_same(fitted(Net(), LongshoreStrategy(), callbacks=[average()], **options), expected)


def test_the_learning_rate_monitor_sees_the_schedule(tmp_path: Any) -> None:
    class Kept(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.rates.append(float(trainer.callback_metrics.get("rate", -1)))
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def run(strategy: Any) -> list[Any]:
        kept, monitor = Kept(), LearningRateMonitor("step")
        logger = pl.loggers.CSVLogger(tmp_path)
        fitted(Grouped(), strategy, callbacks=[kept, monitor], logger=logger, log_every_n_steps=1)
        return [kept.rates, dict(monitor.lrs)]

    assert run(LongshoreStrategy()) == run("auto")


def test_the_configuration_may_bring_optimizer_and_schedule() -> None:
    class Bare(Net):
        def configure_optimizers(self) -> None:
            return None

    betas = {"lr": 3e-2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 3e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "AdamW", "params": betas},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    strategy = LongshoreStrategy(config)
    found = fitted(Bare(), strategy, accumulate_grad_batches=2, batches=6)
    assert strategy.lr_scheduler_configs[0].interval == "step"
    assert (strategy.engine.train_micro_batch_size_per_gpu(), strategy.engine.train_batch_size()) == (4, 8)
    numbers = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0}
    module = Bare()
    engine = longshore.initialize(model=module, config={**config, **numbers}).engine
    for _ in range(2):
        for batch in loader(6):
            engine.backward(module.loss(batch))
            engine.step()
    assert_same(found, module)


def test_evaluation_without_an_optimizer(plain: Any) -> None:
    module = fitted(Net(), LongshoreStrategy(stage=3))
    for strategy in (LongshoreStrategy(stage=3), "auto"):
        module.seen.clear()
        run = trainer(strategy)
        run.test(module, loader(2), verbose=False)
        run.validate(module, loader(2), verbose=False)
        predicted = run.predict(module, loader(2))
        found = [*module.seen, *(float(each.sum()) for each in predicted or [])]
        if strategy == "auto":
            assert found == first and len(found) == 6  # noqa: F821
        first = found  # noqa: F841


def test_the_same_strategy_fits_again_and_evaluates_after_a_fit() -> None:
    strategy = LongshoreStrategy()
    ours, theirs = trainer(strategy), trainer()
    module, twin = Net(), Net()
    for run, each in ((ours, module), (theirs, twin)):
        run.fit(each, loader(), loader(1))
        run.test(each, loader(2), verbose=False)
        run.fit_loop.max_epochs = 4
        run.fit(each, loader(), loader(1))
    assert_same(module, twin)
    assert module.seen == twin.seen


class Dropping(Net):
    def loss(self, batch: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self(batch), 0.3).pow(2).mean()


def test_random_numbers_are_the_plain_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device nothing is seeded anew, where seed_everything() was called before the model was made."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which it sets
        monkeypatch.setenv(name, "0")
    found = []
    for strategy in ("auto", LongshoreStrategy()):
        pl.seed_everything(7, verbose=False)
        module = Dropping()
        torch.rand(3)  # as whatever is drawn before the fit
        found.append(fitted(module, strategy))
    assert_same(*found)


@pytest.mark.parametrize("steps", [1, 3])
def test_another_trainer_takes_the_module_over(steps: int) -> None:
    class Failing(Net):
        batches = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.batches += 1
            if self.batches == 5:
                raise KeyError("a batch that is broken")
            return super().training_step(batch, batch_idx)

    found = []
    for make in (LongshoreStrategy, lambda: "auto"):
        module, strategy, failed = Failing(), make(), trainer(make(), accumulate_grad_batches=steps)
        with pytest.raises(KeyError):
            failed.fit(module, loader(), loader(1))
        run = trainer(strategy, accumulate_grad_batches=steps)
        run.fit(module, loader(), loader(1))
        trainer(make(), max_epochs=1).fit(module, loader())
        found.append(module)
        if isinstance(strategy, LongshoreStrategy):  # whose engine has no part in what came after
            with pytest.raises(LongshoreError, match=r"another Trainer .* fitted this module since"):
                run.save_checkpoint("nowhere.ckpt")
            with pytest.raises(LongshoreError, match=r"another Trainer .* fitted this module since"):
                strategy.engine.step()
        run.test(module, loader(1), verbose=False)
    assert_same(*found)
    assert found[0].seen == found[1].seen


def test_stage_3_validates_outside_of_inference_mode() -> None:
    class Looks(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for stage, inference in ((3, False), (2, True)):
        run, module = trainer(LongshoreStrategy(stage=stage)), Looks()
        run.fit(module, loader(), loader(1))
        run.validate(module, loader(1), verbose=False)
        assert module.seen[-1] == (inference, False)


def test_the_engine_is_where_lightning_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(**arguments: Any) -> Any:
        asked.append(arguments["device"])
        return join(**arguments)

    monkeypatch.setattr("longshore.engine.setup.join", recorded)
    fitted(Net(), LongshoreStrategy())
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("name", ["longshore", "longshore_stage_1", "longshore_stage_3_offload"])
def test_names(name: str, plain: Any) -> None:
    run = trainer(name)
    strategy: Any = run.strategy
    assert isinstance(strategy, LongshoreStrategy)
    run.fit(module := Net(), loader(), loader(1))
    assert strategy.engine.zero_optimization_stage() == (int(name[16]) if "_" in name else 2)
    assert strategy.engine.config.offload_device == ("none" if name == "longshore_stage_1" else "cpu")
    assert_same(module, plain("one batch a step")[0])


def test_an_interrupted_fit_ends_and_can_go_on(plain: Any) -> None:
    class Stopping(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.current_epoch == 1 and batch_idx == 3:
                raise KeyboardInterrupt
            return loss

    strategy = LongshoreStrategy()
    run, module = trainer(strategy), Stopping()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            run.fit(module, loader(), loader(1))
    finally:
        signal.signal(signal.SIGINT, handler)  # which Lightning sets, so that nobody disturbs its end
    assert strategy.engine.global_steps == 10 and run.interrupted
    strategy.engine.backward(module.loss(next(iter(loader()))))
    strategy.engine.step()
    assert strategy.engine.global_steps == 11


def test_parameters_that_rest_on_the_host() -> None:
    """The setting reaches the engine, and the weights are the plain Trainer's."""
    found: list[Any] = []

    class Looks(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.strategy.model.config.param_device)

    trained = fitted(Net(), LongshoreStrategy(stage=3, param_device="cpu"), callbacks=[Looks()])
    assert found == ["cpu"]
    assert_same(trained, fitted(Net()))
