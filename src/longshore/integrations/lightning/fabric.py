"""Fabric's strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore import Config, Engine, LongshoreError
from longshore.integrations.lightning.models import (
    ModelOnly,
    is_folder,
    load_into_engine,
    load_into_model,
    load_whole,
    make_engine,
    place,
    save_folder,
    whole,
)
from longshore.integrations.lightning.names import (
    BackwardSyncControl,
    FabricLauncher,
    FabricParallelStrategy,
    FabricPrecision,
    Stateful,
)
from longshore.integrations.lightning.settings import BY_VALUE, EnginePrecision, LightningArguments, backward, clip
from longshore.integrations.lightning.strategy import EngineStrategy
from longshore.seam import change_over


class FabricLongshoreStrategy(EngineStrategy, FabricParallelStrategy):
    """``Fabric(strategy=FabricLongshoreStrategy(stage=2))``.

    Each ``optimizer.step()`` applies the gradients of every ``fabric.backward`` since the last step. Takes the
    arguments of :class:`~longshore.integrations.lightning.strategy.EngineStrategy`; ``fabric.setup`` raises errors for
    those that contradict Fabric's.
    """

    _launcher_kind = FabricLauncher
    _precision_argument = "precision"

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None, **arguments: Any
    ) -> None:
        super().__init__(config, **arguments)
        self._backward_sync_control = _EngineNoSync()
        # These lists grow with each model that is set up.
        self._engines: list[Engine] = []
        self._models: list[ModelOnly] = []

    @property
    def precision(self) -> FabricPrecision:
        return EnginePrecision.of(self._precision or FabricPrecision())

    @precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
        self._precision = precision and EnginePrecision.of(precision)

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return super().distributed_sampler_kwargs if self.is_distributed else None  # None: loaders are not changed

    # -- models and optimizers ------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        if self.settings.stage < 3 and not any(parameter.is_meta for parameter in module.parameters()):
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context for making a model (``fabric.init_module``); at stage 3 only rank 0 makes the weights."""
        return self._creation(empty_init, self.precision.module_init_context())

    model_init_context = module_init_context

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        engine = self._make_engine(module, optimizers, scheduler)
        return engine, [engine.optimizer], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        made = place(module, self._resolved(False).config, self._extras, self.root_device)
        self._models.append(made)
        return made

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if members & {id(parameter) for parameter in model.module.parameters()}:
                if model.engine is not None:
                    raise ValueError("this model has an optimizer already; give one optimizer parameter groups instead")
                model.close_sharding()
                engine = self._make_engine(model.module, [optimizer], None)
                model.train_with(engine)
                return engine.optimizer
        raise ValueError(
            "no model that was given to fabric.setup_module() has the optimizer's parameters; set the model up first, "
            "make the optimizer from its parameters after that, or call fabric.setup(model, optimizer)"
        )

    def _make_engine(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any) -> Engine:
        if len(optimizers) != 1:
            raise ValueError(
                f"fabric.setup() was given {len(optimizers)} optimizers for one model, and an engine steps one; give "
                "it one with a parameter group for each of them"
            )
        loaded = self._resolved(True, scheduler is not None)
        engine = make_engine(module, optimizers[0], loaded, self._extras, self.root_device)
        if scheduler is not None:
            change_over(scheduler, engine.optimizer, optimizers[0])
        self._engines.append(engine)
        return engine

    def _resolved(self, has_optimizer: bool, has_scheduler: bool = False) -> Any:
        plugin: Any = self.precision
        given = LightningArguments(
            by="Fabric",
            precision=plugin.precision,
            world_size=self.world_size if self.is_distributed else 1,
            has_optimizer=has_optimizer,
            has_scheduler=has_scheduler,
            loss_scaling=plugin.loss_scaling,
        )
        return self.settings.resolved(given)

    # -- the step -------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        backward(self._engine_for(module), tensor, *args, **kwargs)

    def _engine_for(self, module: nn.Module | None) -> Engine:
        if module is not None:
            engine = engine_of(module)
            if engine is None:
                raise LongshoreError(
                    "backward through a model that has no optimizer; call fabric.setup(model, optimizer), or "
                    "fabric.setup_optimizers(optimizer) after fabric.setup_module(model)"
                )
            return engine
        if len(self._engines) != 1:
            raise LongshoreError(
                f"{len(self._engines)} models have an optimizer; call fabric.setup(model, optimizer) first, and if "
                "there are several, name the model of the loss with fabric.backward(loss, model=model)"
            )
        return self._engines[0]

    def optimizer_step(self, optimizer: Any, closure: Any = None, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"optimizer.step() takes a closure only with longshore, not {', '.join(kwargs)}")
        result = closure() if closure is not None else None
        self._engine_of_optimizer(optimizer).step()
        return result

    def _engine_of_optimizer(self, optimizer: Any) -> Engine:
        for engine in self._engines:
            if engine.optimizer is optimizer:
                return engine
        raise LongshoreError("this optimizer was not returned by fabric.setup() or fabric.setup_optimizers()")

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the next step; return the norm over all ranks, float32, 0-dim, on the CPU."""
        engine = self._engine_of_optimizer(optimizer)
        if float(norm_type) != 2.0:
            raise ValueError(f"longshore clips the 2-norm, not norm_type={norm_type}; leave it out")
        norm = engine.optimizer.grad_norm()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; pass error_if_nonfinite=False to clip with it anyway"
            )
        clip(engine, float(max_norm))
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        raise ValueError(BY_VALUE.format(f"{clip_val:g}"))

    # -- checkpoints ----------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole weights. If they are sharded, all ranks have to call it, and only rank 0 gets them."""
        return whole(_model_of(module).state_dict(), self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        load_whole(_model_of(module), state_dict, strict)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Save a model and its optimizer in a folder, each rank its shards; a model without an optimizer in one file.

        Raises:
            CheckpointError: called between a backward and its step, or the checkpoint cannot be written.
            ValueError, TypeError: there are two engines; arguments apply only to a file.
        """
        path = Path(self.broadcast(path))
        values = list(state.values())
        engines = [
            each
            for each in self._engines
            if any(value is each.optimizer for value in values) and any(engine_of(value) is each for value in values)
        ]
        if len(engines) > 1:
            raise ValueError(
                f"{len(engines)} models with their optimizers were to be saved together, and each needs a folder of "
                "its own; call fabric.save() for each of them"
            )
        if not engines:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise TypeError(
                    f"{name} applies to files, and a model with its optimizer is saved in a folder that the engine "
                    "writes; leave it out, or save the model alone"
                )
        others = {key: value for key, value in state.items() if not _is_of(engines[0], value)}
        save_folder(engines[0], path, self._convert_stateful_objects_in_state(others, filter={}))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        path = Path(self.broadcast(path))
        if not is_folder(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        if not isinstance(state, dict):
            raise ValueError(
                f"{path} is a folder with a model and its optimizer; use fabric.load(path, {{'model': model}})"
            )
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        if len(models) != 1:
            raise ValueError(f"{path} has one model, and {len(models)} are to be loaded; pass one in state")
        engine = engine_of(models[0])
        if engine is None:
            rest = load_into_model(_model_of(models[0]), path, strict=strict, weights_only=weights_only)
        else:
            stepped = any(value is engine.optimizer for value in state.values())
            rest = load_into_engine(engine, path, optimizer=stepped, strict=strict, weights_only=weights_only)
        for key, value in state.items():
            if value is models[0] or (engine is not None and _is_of(engine, value)):
                continue
            if key not in rest:
                if strict:
                    raise KeyError(f"{path} has no {key!r}; strict=False leaves it as it is")
            elif isinstance(value, Stateful):
                value.load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


class _EngineNoSync(BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        engine = engine_of(module)
        return engine.no_sync() if enabled and engine is not None else contextlib.nullcontext()


def engine_of(module: Any) -> Engine | None:
    """Return the engine that trains a model that Fabric set up; None: it has no optimizer, or is no such model."""
    return module if isinstance(module, Engine) else module.engine if isinstance(module, ModelOnly) else None


def _model_of(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, (Engine, ModelOnly)) else module


def _is_of(engine: Engine, value: Any) -> bool:
    return value is engine.optimizer or engine_of(value) is engine
