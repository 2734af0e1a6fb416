"""``deepspeed.zero``: models that no rank needs to hold as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.compat.absent import getter
from longshore.engine import Init as _Init
from longshore.sharding import gather

_HERE = ("none", "cpu")


class Init:
    """:class:`longshore.Init` with DeepSpeed's arguments: parameters are made on rank 0, and ``initialize()`` gives
    each rank its part. One inside another adds nothing.

    Args:
        module: refused; build the model inside.
        data_parallel_group: all ranks, or None.
        mem_efficient_linear, pin_memory: accepted; they change no result.
        remote_device: None, ``"none"`` or ``"cpu"``.
        config_dict_or_path, config: accepted; ``initialize()`` reads the configuration.
        enabled: False does nothing.
        dtype: of what is made inside, as by ``torch.set_default_dtype``; ``initialize()`` casts to the configuration's.
        mpu, zero_param_parallel_group, sequence_data_parallel_group, param_swapper: refused.
        zero_quantized_weights, zero_quantized_nontrainable_weights: True is refused.

    Raises:
        ValueError: an argument that cannot be honoured, by name.
        RankError: at the end, where another rank failed inside.
    """

    _depth = 0

    def __init__(
        self,
        module: Any = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        refused = {
            "module": module,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        for name, value in refused.items():
            if enabled and value is not None:
                what = "build the model inside the with" if name == "module" else "leave it out"
                raise ValueError(f"zero.Init(): longshore does not do {name}; {what}")
        if enabled and str(remote_device or "none") not in _HERE:
            raise ValueError(
                f"zero.Init(): remote_device is None or 'cpu', not {remote_device!r}; parameters have no other memory "
                "than the device's"
            )
        if enabled and data_parallel_group is not None:
            _check_all(data_parallel_group)
        self._enabled = enabled
        self._dtype = dtype
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Init:
        with contextlib.ExitStack() as stack:
            if self._enabled:
                if Init._depth == 0:
                    stack.enter_context(_Init())
                Init._depth += 1
                stack.callback(_leave)
                if self._dtype is not None:
                    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def _leave() -> None:
    Init._depth -= 1


def _check_all(group: Any) -> None:
    if dist.is_initialized() and dist.get_world_size(group) != dist.get_world_size():
        raise ValueError(
            f"zero.Init(): data_parallel_group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks; "
            "longshore shards over all of them"
        )


class GatheredParameters:
    """:func:`longshore.gather` with DeepSpeed's arguments, also for parameters that ``zero.Init`` left on rank 0 alone.

    Those are where ``initialize()`` will look: rank 0 may write to them, and others have shapes without values.

    Args:
        params: a parameter, or several.
        modifier_rank: what this rank wrote holds on all ranks afterwards; None: nobody writes.
        fwd_module: refused; it registers external parameters.
        enabled: False does nothing.

    Raises:
        ValueError: an argument that cannot be honoured, or a writer other than rank 0 before ``initialize()``.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Tensor,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if fwd_module is not None and enabled:
            raise ValueError(
                "GatheredParameters(): longshore does not register external parameters; leave fwd_module out"
            )
        self._params = [params] if isinstance(params, Tensor) else list(params)
        self._writer = modifier_rank
        self._enabled = enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not self._enabled or self._before_initialize():
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(gather(self._params, self._writer))
            self._stack = stack.pop_all()

    def _before_initialize(self) -> bool:
        if self._writer is None or not dist.is_initialized() or dist.get_world_size() == 1:
            return any(each.is_meta for each in self._params)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, any(each.is_meta for each in self._params))
        if any(said) and self._writer != 0:
            raise ValueError(
                f"GatheredParameters(modifier_rank={self._writer}): before initialize() rank 0 has the weights of "
                "a model that was made in zero.Init; write on rank 0"
            )
        return any(said)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


__all__ = ["GatheredParameters", "Init"]

__getattr__ = getter(__name__)
