"""Gradients that leave during backward.

While the host holds a parameter's gradient, its ``.grad`` is a
:class:`ReleasedGradient`: the right shape and dtype, no memory, and an error
for whoever computes with it. Whether the host's gradient still counts is then
read from ``.grad`` itself, as it is in torch: the placeholder says that nothing
happened to it, None that it was discarded (``model.zero_grad()``), and any
other tensor that the user put something in its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from longshore.errors import LongshoreError
from longshore.optim.shards import held_part

# Reading these says nothing about values, and torch does it on the way to
# operations that get the error below.
_HARMLESS = frozenset(
    {"__get__", "__repr__", "__hash__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size",
     "is_floating_point", "is_complex", "is_contiguous", "requires_grad_"}
)  # fmt: skip


class ReleasedGradient(Tensor):
    """Stands in ``.grad`` for a gradient that is on the host."""

    parameter_name: str

    @classmethod
    def for_parameter(cls, parameter: Tensor, name: str) -> ReleasedGradient:
        """A placeholder of the parameter's shape, dtype and device that takes no memory."""
        placeholder = _nothing(parameter.dtype, parameter.device).expand(parameter.shape).as_subclass(cls)
        placeholder.parameter_name = name
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            result = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(result, ReleasedGradient) and isinstance(args[0], ReleasedGradient):
                result.parameter_name = args[0].parameter_name  # .data, say, whose reader is to hear whose it is
            return result
        raise _moved(args, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<gradient of {self.parameter_name}, held on the host by longshore>"


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class ReleasedShard(ReleasedGradient):
    """This process's part of a placeholder that is a ``DTensor``, which asks it for nothing but by its operations."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise _moved(args, func.__name__.partition(".")[0])

    def __iadd__(self, other: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """FSDP2 adds to the shard of a gradient. None is here, so that the sum is what arrived."""
        return other


def _moved(args: Any, asking: str) -> LongshoreError:
    return LongshoreError(
        f"{_names(args)}: release_gradients=True has moved the gradient to the host, and {asking} asked for it. "
        "Use optimizer.clip_grad_norm_() and optimizer.grad_norm() in place of torch's (with an engine: "
        "gradient_clipping in its configuration, and engine.get_global_grad_norm()), "
        "optimizer.zero_grad() or zero_grad(set_to_none=True) to discard gradients, and "
        "release_gradients=False for a GradScaler or to edit gradients"
    )


def is_released(gradient: Tensor | None) -> bool:
    """Whether it is a placeholder, or a ``DTensor`` of which this process has one."""
    if gradient is None or type(gradient) is Tensor:
        return False
    return isinstance(gradient, ReleasedGradient) or isinstance(held_part(gradient), ReleasedGradient)


def _names(args: Any) -> str:
    """The first placeholder's parameter, however deep in lists torch passes it."""
    for arg in args if isinstance(args, (tuple, list)) else (args,):
        if isinstance(arg, ReleasedGradient):
            return f"parameter {arg.parameter_name}"
        if isinstance(arg, (tuple, list)) and arg:
            return _names(arg)
    return "a parameter"


class ReleaseHooks:
    """The two hooks of one parameter: before and after autograd accumulates into ``.grad``.

    ``before`` takes the placeholder away, so that autograd finds None and does
    not add to it. It sits on the accumulation node, and not on the tensor,
    because ``torch.autograd.grad`` runs tensor hooks without accumulating.
    """

    def __init__(self, parameter: Tensor, leaf: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._before = before
        self._after_handle = leaf.register_post_accumulate_grad_hook(lambda _leaf: after())
        self._node: Node | None = None
        self.follow(leaf)

    def follow(self, leaf: Tensor) -> None:
        """Hook the leaf's present node: converting a model there and back makes a new one."""
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        if node is self._node:
            return
        before = self._before
        # The tensor refers to its node weakly; the node must live as long as the
        # hook. A node that is handed no gradient accumulates nothing.
        self._node = node
        self._before_handle = node.register_prehook(lambda gradients: before() if gradients[0] is not None else None)

    def remove(self, placeholder: Tensor | None) -> None:
        """Take the hooks away, and the placeholder if it is still there."""
        self._after_handle.remove()
        self._before_handle.remove()
        parameter = self._parameter()
        if parameter is not None and placeholder is not None and parameter.grad is placeholder:
            parameter.grad = None
