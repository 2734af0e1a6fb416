"""The Trainer's strategy."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import DataLoader

from longshore import CheckpointError, Config, Engine, LongshoreError
from longshore.engine.config import LoadedConfig
from longshore.integrations.lightning.models import (
    TAG,
    ModelOnly,
    add_groups,
    is_folder,
    load_into_engine,
    load_into_model,
    load_whole,
    make_engine,
    place,
    save_folder,
    unchanged,
    whole,
)
from longshore.integrations.lightning.names import (
    BaseFinetuning,
    ClipAlgorithm,
    LightningModule,
    LRSchedulerConfig,
    NoOptimizer,
    Trainer,
    TrainerFn,
    TrainerLauncher,
    TrainerParallelStrategy,
    TrainerPrecision,
    is_overridden,
)
from longshore.integrations.lightning.settings import BY_VALUE, LightningArguments, TrainerEnginePrecision
from longshore.integrations.lightning.strategy import EngineStrategy
from longshore.seam import change_over, random_states, restore_random_states

_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
"""Class names of Lightning's callbacks that average weights; not every version has both."""


class LongshoreStrategy(EngineStrategy, TrainerParallelStrategy):
    """``Trainer(strategy=LongshoreStrategy(stage=2))``: sharded and offloaded, with the weights of the plain Trainer.

    Takes the arguments of :class:`~longshore.integrations.lightning.strategy.EngineStrategy`.
    """

    _fitted_by: ClassVar[WeakKeyDictionary[LightningModule, weakref.ref[LongshoreStrategy]]] = WeakKeyDictionary()
    """The last strategy that fitted each module. Weak, since a cycle would keep an engine's memory longer."""
    strategy_name = "longshore"
    _launcher_kind = TrainerLauncher

    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None, **arguments: Any
    ) -> None:
        super().__init__(config, **arguments)
        # These fields change with each call of the Trainer.
        self._engine: Engine | None = None
        self._replaced = False
        """Whether another strategy has fitted the module since."""
        self._handed_out: Any = None
        """The state dict that was given to hooks, which may change it before it is saved or loaded."""
        self._restored = False
        """Whether the engine has loaded the optimizer's state from the checkpoint."""
        self._random: dict[str, Any] | None = None
        """Random states of the checkpoint that was loaded."""
        # This field changes with each batch.
        self._accumulating = False

    # -- precision ------------------------------------------------------------

    @property
    def precision_plugin(self) -> TrainerPrecision:
        return TrainerEnginePrecision.of(self._precision_plugin or TrainerPrecision(), strategy=self)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: TrainerPrecision | None) -> None:
        self._precision_plugin = precision_plugin and TrainerEnginePrecision.of(precision_plugin, strategy=self)

    # -- starting -------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the current fit, or of the last one."""
        if self._engine is None:
            self._check_claim()
            raise LongshoreError("there is no engine before trainer.fit() has called configure_optimizers()")
        return self._engine

    def setup(self, trainer: Trainer) -> None:
        if self.settings.stage == 3:
            # Parameters that FSDP2 gathers in inference mode could not be used in the next training step.
            validation = trainer.fit_loop.epoch_loop.val_loop
            for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not fitting and self._engine is not None and self._engine.module is self.lightning_module:
            self.model = self._engine  # which gathers the shards
            return
        self._close()
        if fitting and self._layer_sync is not None and self.is_distributed:
            self._layer_sync.apply(self.lightning_module)  # Trainer(sync_batchnorm=True)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if fitting:
            self._claim(self.lightning_module)
            self.setup_optimizers(trainer)
        else:
            self._reset_optimizers_and_schedulers()
            # Evaluation steps call its forward, in which FSDP2 gathers the shards.
            self.model = place(module, self._resolved(trainer).config, self._extras, self.root_device)

    def _claim(self, module: LightningModule) -> None:
        """Close the engine of another strategy that fitted the module before: only one may take its gradients."""
        found = self._fitted_by.get(module)
        former = None if found is None else found()
        if former is not None and former is not self:
            former._replaced = True
            former._close()
        self._fitted_by[module] = weakref.ref(self)
        self._replaced = False

    def _check_claim(self) -> None:
        if self._replaced:
            raise LongshoreError(
                "another Trainer with longshore has fitted this module since, and has the optimizer's state; save and "
                "step with that Trainer"
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        with warnings.catch_warnings():
            # The configuration may name an optimizer.
            warnings.filterwarnings("ignore", message=".*configure_optimizers` returned `None`")
            super().setup_optimizers(trainer)
        for callback in getattr(trainer, "callbacks", ()) if self.settings.stage == 3 and self.is_distributed else ():
            if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
                raise ValueError(
                    f"{type(callback).__name__} averages whole weights, and at stage 3 each of several ranks has "
                    "shards; use stage 2, or a callback of yours that reads longshore.gather(module)"
                )
        clients = [each for each in self.optimizers if not isinstance(each, NoOptimizer)]
        if len(clients) > 1:
            names = ", ".join(type(each).__name__ for each in clients)
            raise ValueError(
                f"configure_optimizers() returned {len(clients)} optimizers ({names}), and an engine steps one; return "
                "one with a parameter group for each of them (groups may have their own lr, betas and weight decay, "
                "and parameters without a gradient are not stepped)"
            )
        client: Any = clients[0] if clients else None
        loaded = self._resolved(trainer, client is not None)
        if client is None and loaded.config.optimizer is None:
            raise ValueError(
                "configure_optimizers() returned None, and the configuration names no optimizer, so there is nothing "
                "to step; return an optimizer, or use the Trainer without this strategy"
            )
        engine = self._engine = make_engine(self.lightning_module, client, loaded, self._extras, self.root_device)
        for each in self.lr_scheduler_configs:
            change_over(each.scheduler, engine.optimizer, client)
        if engine.lr_scheduler is not None:
            self.lr_scheduler_configs = [LRSchedulerConfig(engine.lr_scheduler, interval="step")]
            engine.lr_scheduler = None  # Lightning steps it
        self.optimizers = [engine.optimizer]
        self.model = engine
        if self.lightning_module.automatic_optimization:
            # The Trainer says which batch is the window's last, even if an epoch ends before the window is full.
            engine.set_gradient_accumulation_boundary(True)

    def _resolved(self, trainer: Trainer, has_optimizer: bool = False) -> LoadedConfig:
        plugin: Any = self.precision_plugin
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == ClipAlgorithm.VALUE:
            raise ValueError(BY_VALUE.format(f"{trainer.gradient_clip_val:g}"))
        # If the user overrides this hook, the hook decides whether and how to clip.
        clips = trainer.gradient_clip_val and not is_overridden("configure_gradient_clipping", self.lightning_module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        source = trainer.fit_loop._data_source.instance  # the loader that was passed to fit(), unless a hook makes it
        batch_size = getattr(source, "batch_size", None) if isinstance(source, DataLoader) else None
        given = LightningArguments(
            by="Trainer",
            precision=plugin.precision,
            world_size=self.world_size if self.is_distributed else 1,
            accumulation=trainer.accumulate_grad_batches if fitting else None,
            clipping=trainer.gradient_clip_val if clips else None,
            micro_batch_size=batch_size,
            has_optimizer=has_optimizer,
            has_scheduler=bool(self.lr_scheduler_configs),
            loss_scaling=plugin.loss_scaling,
        )
        return self.settings.resolved(given)

    def tensor_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[None]:
        return self._creation(empty_init, self.precision_plugin.tensor_init_context())

    def model_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context for making a model outside of ``configure_model``; ``Trainer.init_module`` enters it."""
        return self.tensor_init_context(empty_init)

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)

    # -- the step -------------------------------------------------------------

    def on_train_start(self) -> None:
        random, self._random = self._random, None
        trainer = self.lightning_module.trainer
        for callback in trainer.checkpoint_callbacks:  # a resumed callback would save this step again, in mid-window
            vars(callback)["_last_global_step_saved"] = trainer.global_step
        for callback in self._finetuning():
            vars(callback)["_restarting"] = False  # the groups are back: the next fit's on_fit_start has none to add
        loop = trainer.fit_loop
        if random is not None and 0 < loop.epoch_loop.batch_progress.current.ready < loop.max_batches:
            # After resuming within an epoch, the loader is started again, and draws a seed that the run drew before.
            restore_random_states(random, self.root_device)

    def _finetuning(self) -> list[Any]:
        """Return the callbacks that add parameter groups, and keep their parameters' names in checkpoints.

        They add the groups of a resumed run in ``on_fit_start``, if their state was loaded before that. With an engine
        it is loaded after that.
        """
        return [each for each in self.lightning_module.trainer.callbacks if isinstance(each, BaseFinetuning)]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        engine, module = self.engine, self.lightning_module
        if not module.automatic_optimization:
            return
        steps = module.trainer.accumulate_grad_batches
        if steps != engine.gradient_accumulation_steps() and not engine.in_window:
            engine.set_gradient_accumulation_steps(steps)  # a GradientAccumulationScheduler
        engine.set_gradient_accumulation_boundary(not self._accumulating)

    def step_engine(self) -> None:
        """Clip, step and publish the window; do nothing if it is empty."""
        engine, module = self.engine, self.lightning_module
        if module is not None and module.automatic_optimization:
            engine.set_gradient_accumulation_boundary(True)  # even if the last batch had no backward
        if engine.world_size > 1 or engine.in_window:
            engine.step()

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the window's gradients over all ranks: float32, 0-dim, on the CPU. All ranks have to
        call it.

        Use it in ``on_before_optimizer_step`` in place of ``lightning.pytorch.utilities.grad_norm``, which does not
        work because gradients are not in ``.grad``.
        """
        return self.engine.optimizer.grad_norm()

    # -- checkpoints ----------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._restored

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; at stage 3 with this rank's shards, gathered only for a weights-only file."""
        self._handed_out = super().lightning_module_state_dict()
        return dict(self._handed_out)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # the engine saves it, each rank its shards

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a folder to which every rank writes its shards; or, for weights only, one file as Lightning's.

        Raises:
            CheckpointError: an accumulation window is unfinished, or the checkpoint cannot be written.
        """
        path, user_state = Path(self.broadcast(filepath)), self._handed_out
        self._handed_out = None
        if "optimizer_states" not in checkpoint or self._engine is None:
            if "optimizer_states" in checkpoint:
                self._check_claim()
            super().save_checkpoint(whole(checkpoint, self.is_global_zero), path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO, and the engine writes this checkpoint itself")
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        if user_state is None or not unchanged(checkpoint.get("state_dict"), user_state):
            rest["state_dict"] = checkpoint["state_dict"]  # a hook's, beside the engine's own
        self._check_window()
        save_folder(self._engine, path, whole(rest, self.is_global_zero))

    def _check_window(self) -> None:
        engine, module = self.engine, self.lightning_module
        if module is None or not engine.in_window:
            return
        steps = module.trainer.accumulate_grad_batches
        if module.trainer.interrupted and module.automatic_optimization and steps == 1:
            engine.zero_grad()  # gradients of an unfinished batch, which is run again
            return
        raise CheckpointError(
            "a checkpoint has no gradients, and those of the current accumulation window would be lost, so a resumed "
            f"run would differ: accumulate_grad_batches is {steps}, and no step was made since the last batch; save "
            "after a step (ModelCheckpoint(every_n_train_steps=...), or val_check_interval a multiple of "
            "accumulate_grad_batches), or weights only"
        )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._restored, self._random = False, None
        if not is_folder(path):
            return super().load_checkpoint(path, weights_only)
        module = self.lightning_module
        strict = module.strict_loading
        if self._engine is None:
            found = load_into_model(module, path, strict=strict, weights_only=weights_only)
        else:
            fitting = module.trainer.state.fn == TrainerFn.FITTING
            if fitting:
                add_groups(self._engine, self._engine._checkpoints.saved_groups(path / TAG))
            found = load_into_engine(self._engine, path, optimizer=fitting, strict=strict, weights_only=weights_only)
            if fitting:
                self._restored, self._random = True, random_states(self.root_device)
        if "state_dict" not in found:
            self._handed_out = module.state_dict()
            found["state_dict"] = dict(self._handed_out)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        user_state, self._handed_out = self._handed_out, None
        if user_state is None or not unchanged(checkpoint["state_dict"], user_state):
            load_whole(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for callback in self._finetuning():  # only they know the names of the groups in a file of the plain Trainer
            groups = callback._internal_optimizer_metadata.get(0, ())
            add_groups(
                self.engine,
                [
                    {"parameters": each["params"], "options": {k: v for k, v in each.items() if k != "params"}}
                    for each in groups
                ],
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    # -- the end --------------------------------------------------------------

    def teardown(self) -> None:
        """Release everything but the engine, which ``save_checkpoint``, ``test`` and ``predict`` use until the next
        ``fit``."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.destroy()
        if isinstance(self.model, ModelOnly):
            self.model.close_streaming()
