"""Lightning's precision plugins, which leave scaling, clipping and stepping to the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from longshore.engine import Engine
from longshore.engine.config import LossScaling
from longshore.errors import LongshoreError
from longshore.integrations.lightning.names import ClipAlgorithm, LightningModule, is_overridden
from longshore.integrations.lightning.settings import PRECISIONS

BY_VALUE = (
    "gradients were to be clipped by value ({}), and longshore clips only their global norm; "
    'use gradient_clip_algorithm="norm" (Trainer) or max_norm= (Fabric)'
)


def _scaling_of(scaler: Any) -> LossScaling | None:
    if scaler is None or not scaler.is_enabled():  # GradScaler turns itself off where there is no CUDA
        return None
    first, growth, backoff = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()
    if (growth, backoff) != (2.0, 0.5) or math.frexp(first)[0] != 0.5 or first < 1:
        raise ValueError(
            f"GradScaler(init_scale={first:g}, growth_factor={growth:g}, backoff_factor={backoff:g}): longshore's loss "
            "scale is a power of two that doubles and halves; use growth_factor=2, backoff_factor=0.5 and such a scale"
        )
    return LossScaling(initial_scale_power=round(math.log2(first)), window=scaler.get_growth_interval(), hysteresis=1)


class EnginePrecision:
    """A mixin of precision plugins, which leave scaling, clipping and stepping to the engine."""

    loss_scaling: LossScaling | None = None  # of the ``GradScaler`` that the user made

    @classmethod
    def of(cls, plugin: Any, **attributes: Any) -> Any:
        """Return a copy of the plugin that Lightning chose, with this class as its first base, and without its scaler.

        ``attributes`` are set on the copy.

        Raises:
            ValueError: a precision that the engine does not have, or a scaler that its loss scale cannot match.
        """
        if isinstance(plugin, cls):
            return plugin
        if plugin.precision not in PRECISIONS:
            raise ValueError(
                f"precision={plugin.precision!r} is not supported by longshore, which has float32 masters and fp32, "
                f"bf16 or fp16 parameters; use one of {', '.join(PRECISIONS)}"
            )
        made = copy.copy(plugin)
        made.__class__ = type(cls.__name__, (cls, type(plugin)), {})
        scaling = _scaling_of(getattr(plugin, "scaler", None))
        vars(made).update(attributes, loss_scaling=scaling, scaler=None)
        return made


class TrainerEnginePrecision(EnginePrecision):
    """The same for a Trainer, whose plugins also run backward, step and clip."""

    strategy: Any

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        engine = self.strategy.engine
        if is_overridden("backward", model):
            model.backward(engine.scale(tensor), *args, **kwargs)
        else:
            backward(engine, tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"optimizer.step() takes a closure only with longshore, not {', '.join(kwargs)}")
        result = closure()
        self._after_closure(model, optimizer)  # pyright: ignore[reportAttributeAccessIssue]
        self.strategy.step_engine()
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: ClipAlgorithm = ClipAlgorithm.NORM
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == ClipAlgorithm.VALUE:
            raise ValueError(BY_VALUE.format(f"{clip_val:g}"))
        clip(self.strategy.engine, float(clip_val))


def backward(engine: Engine, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Run one backward of the engine's window; arguments that only ``Tensor.backward`` has are passed to it."""
    if not args and set(kwargs) <= {"retain_graph"} and tensor.numel() == 1:
        engine.backward(tensor, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)
    else:
        engine.scale(tensor).backward(*args, **kwargs)


def clip(engine: Engine, max_norm: float) -> None:
    """Clip the next step, unless the configuration clips to the same norm already.

    Raises:
        LongshoreError: the configuration clips to another norm.
    """
    configured = engine.gradient_clipping()
    if configured is None:
        engine.optimizer.clip_grad_norm_(max_norm)
    elif configured != max_norm:
        raise LongshoreError(
            f"gradients were to be clipped to {max_norm:g}, and the configuration of this run clips every step to "
            f"{configured:g}; leave one of them out"
        )
