"""Lightning's precision plugins, which leave scaling, clipping and stepping to the engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longshore.engine import Engine
from longshore.engine.config import LossScaling
from longshore.errors import LongshoreError
from longshore.integrations.lightning.names import (
    ClipAlgorithm,
    FabricPrecision,
    LightningModule,
    TrainerPrecision,
    is_overridden,
)
from longshore.integrations.lightning.settings import PRECISIONS

if TYPE_CHECKING:
    from longshore.integrations.lightning.trainer import LongshoreStrategy

BY_VALUE = (
    "gradients were to be clipped by value ({}), and longshore clips only their global norm; "
    'use gradient_clip_algorithm="norm" (Trainer) or max_norm= (Fabric)'
)


def check_precision(plugin: FabricPrecision) -> None:
    """Raise ValueError for a precision that the engine does not have."""
    if plugin.precision not in PRECISIONS:
        raise ValueError(
            f"precision={plugin.precision!r} is not supported by longshore, which has float32 masters and fp32, bf16 "
            f"or fp16 parameters; use one of {', '.join(PRECISIONS)}"
        )


def scaling_of(plugin: FabricPrecision) -> LossScaling | None:
    """The settings of the plugin's ``GradScaler``; None: it has none.

    Raises:
        ValueError: a scaler that the engine's loss scale cannot match.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return None
    first, growth, backoff = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()
    if not scaler.is_enabled():
        return None  # GradScaler turns itself off where there is no CUDA
    if (growth, backoff) != (2.0, 0.5) or math.frexp(first)[0] != 0.5 or first < 1:
        raise ValueError(
            f"GradScaler(init_scale={first:g}, growth_factor={growth:g}, backoff_factor={backoff:g}): longshore's loss "
            "scale is a power of two that doubles and halves; use growth_factor=2, backoff_factor=0.5 and such a scale"
        )
    return LossScaling(initial_scale_power=round(math.log2(first)), window=scaler.get_growth_interval(), hysteresis=1)


class _InnerPlugin:
    """Base of both plugins: converts the model and its inputs with the plugin that Lightning chose."""

    inner: Any

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.inner.convert_module(module)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    def convert_input(self, data: Any) -> Any:
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    def teardown(self) -> None:
        self.inner.teardown()


class LongshorePrecision(_InnerPlugin, TrainerPrecision):
    """The precision plugin of a Trainer.

    Args:
        inner: the plugin that Lightning chose; its ``GradScaler`` is not used.
        strategy: has the engine, and steps it.

    Raises:
        ValueError: a precision that the engine does not have.
    """

    def __init__(self, inner: TrainerPrecision, strategy: LongshoreStrategy) -> None:
        check_precision(inner)
        self.inner = inner
        self.precision = inner.precision
        self._strategy = strategy

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with self.inner.forward_context():
            yield

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        engine = self._strategy.engine
        if is_overridden("backward", model):
            model.backward(engine.scale(tensor), *args, **kwargs)
        else:
            backward(engine, tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"optimizer.step() takes a closure only with longshore, not {', '.join(kwargs)}")
        result = closure()
        self._after_closure(model, optimizer)
        self._strategy.step_engine()
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: ClipAlgorithm = ClipAlgorithm.NORM
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == ClipAlgorithm.VALUE:
            raise ValueError(BY_VALUE.format(f"{clip_val:g}"))
        clip(self._strategy.engine, float(clip_val))


class FabricLongshorePrecision(_InnerPlugin, FabricPrecision):
    """The precision plugin of a Fabric; see :class:`LongshorePrecision`."""

    def __init__(self, inner: FabricPrecision) -> None:
        check_precision(inner)
        self.inner = inner
        self.precision = inner.precision

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.inner.forward_context()


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
