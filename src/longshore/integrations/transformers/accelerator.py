"""The Trainer's accelerator and optimizer, replaced by ones that call the engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from longshore import Engine


class EngineAccelerator(Accelerator):
    """An ``Accelerator`` whose model is an engine, which scales, reduces and clips gradients itself.

    The Trainer does not accept an accelerator, so :meth:`take_over` converts the one that the Trainer made.
    """

    _engine: Engine
    _pending_norm: Tensor | None

    @classmethod
    def take_over(cls, accelerator: Accelerator, engine: Engine) -> EngineAccelerator:
        """Convert an accelerator, in place."""
        # The classes differ only in their methods, so the attributes stay valid.
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        # The engine scales the loss itself.
        vars(accelerator).update(_engine=engine, _pending_norm=None, scaler=None)
        return accelerator

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run one backward of the window, the last one if gradients are synchronized. The Trainer divided the loss."""
        self._engine.set_gradient_accumulation_boundary(self.sync_gradients)
        self._engine.backward(loss, scale_wrt_gas=False, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the norm before clipping: float32, 0-dim. If ``max_norm`` is finite, the step clips and fills it in.

        Raises:
            ValueError: ``max_norm`` is not the engine's, or ``norm_type`` is not 2.
        """
        if norm_type != 2:
            raise ValueError(f"longshore clips the 2-norm, not norm_type={norm_type}")
        if math.isinf(max_norm):
            return self._engine.optimizer.grad_norm()
        clip = self._engine.config.gradient_clipping
        if clip is None or max_norm != clip:
            raise _clipped_otherwise(f"{max_norm:g}", clip)
        self._pending_norm = torch.full((), math.nan)
        return self._pending_norm

    def step_engine(self) -> None:
        """Step the engine, and fill in the norm. Raises ValueError if it would clip without a request to clip."""
        clip = self._engine.config.gradient_clipping
        if clip is not None and self._pending_norm is None:
            raise _clipped_otherwise("nothing", clip)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if self._pending_norm is not None and norm is not None:
            self._pending_norm.fill_(norm)
        self._pending_norm = None

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: the stage decides at which backward gradients are reduced."""
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return super().unwrap_model(model.module if isinstance(model, Engine) else model, *args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model if isinstance(model, Engine) else super().prepare_model(model, *args, **kwargs)


def _clipped_otherwise(asked: str, clip: float | None) -> ValueError:
    return ValueError(
        f"gradients are to be clipped to {asked}, and the engine was made with gradient_clipping={clip}; set "
        "max_grad_norm before training begins, and leave it as it is; for another one make a new Trainer"
    )


class EngineOptimizer(AcceleratedOptimizer):
    """The optimizer that the Trainer steps: ``step()`` is the engine's, with clipping and the overflow check."""

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine, accelerator: EngineAccelerator) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self._accelerator = accelerator

    def step(self, closure: None = None) -> None:
        if closure is not None:
            raise ValueError("the engine's step() takes no closure; evaluate the model before it")
        if self.gradient_state.sync_gradients:
            self._accelerator.step_engine()
            self._is_overflow = not self._engine.was_step_applied()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._engine.zero_grad()
