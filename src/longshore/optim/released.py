"""Placeholders in ``.grad`` of gradients that are on the host, and the hooks that take gradients there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from longshore.errors import LongshoreError
from longshore.optim.parameters import ParameterRecord
from longshore.optim.shards import held_part, like


class ReleaseHooks:
    """Two hooks of one parameter, called before and after autograd accumulates into ``.grad``.

    ``before`` removes the placeholder, so that autograd finds None and does not add to it. It is a hook of the
    accumulation node, and not of the tensor, because ``torch.autograd.grad`` runs tensor hooks without accumulating.
    """

    def __init__(self, parameter: Tensor, leaf: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._before = before
        self._after_handle = leaf.register_post_accumulate_grad_hook(lambda _leaf: after())
        self._node: Node | None = None
        self.follow(leaf)

    def follow(self, leaf: Tensor) -> None:
        """Hook the leaf's present node: converting a model to another dtype and back makes a new node."""
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        if node is self._node:
            return
        before = self._before
        # The tensor refers to its node weakly; the node must live as long as the hook. A node that is given no gradient
        # accumulates nothing.
        self._node = node
        self._before_handle = node.register_prehook(lambda gradients: before() if gradients[0] is not None else None)

    def remove(self, placeholder: Tensor | None) -> None:
        """Remove the hooks, and the placeholder if it is still there."""
        self._after_handle.remove()
        self._before_handle.remove()
        parameter = self._parameter()
        if parameter is not None and placeholder is not None and parameter.grad is placeholder:
            parameter.grad = None


# These operations read no values, and torch calls them before operations that raise the error below.
_HARMLESS = frozenset(
    {"__get__", "__repr__", "__hash__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size",
     "is_floating_point", "is_complex", "is_contiguous", "requires_grad_"}
)  # fmt: skip


class ReleasedGradient(Tensor):
    """Placeholder in ``.grad`` for a gradient that is on the host."""

    parameter_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            result = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(result, ReleasedGradient) and isinstance(args[0], ReleasedGradient):
                result.parameter_name = args[0].parameter_name  # for example, after .data
            return result
        if CompileContext.try_get() is not None:
            # torch.compile describes each parameter that it reads, its .grad too, and computes nothing with them.
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _moved(args, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<gradient of {self.parameter_name}, held on the host by longshore>"


@functools.cache
def _one_nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class ReleasedShard(ReleasedGradient):
    """This process's shard of a placeholder that is a ``DTensor``; a ``DTensor`` calls operations of its shard only."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise _moved(args, func.__name__.partition(".")[0])

    def __iadd__(self, other: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``other``: FSDP2 adds to the shard of a gradient, and a placeholder has no values to add."""
        return other


def _moved(args: Any, asking: str) -> LongshoreError:
    placeholders = (leaf for leaf in tree_leaves(args) if isinstance(leaf, ReleasedGradient))
    name = next((f"parameter {each.parameter_name}" for each in placeholders), "a parameter")
    return LongshoreError(
        f"{name}: release_gradients=True has moved the gradient to the host, and {asking} asked for it. "
        "Use optimizer.clip_grad_norm_() and optimizer.grad_norm() in place of torch's (with an engine: "
        "gradient_clipping in its configuration, and engine.get_global_grad_norm()), "
        "optimizer.zero_grad() or zero_grad(set_to_none=True) to discard gradients, and "
        "release_gradients=False for a GradScaler or to edit gradients"
    )


def is_released(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a placeholder, or a ``DTensor`` whose shard in this process is one."""
    if gradient is None or type(gradient) is Tensor:
        return False
    return isinstance(gradient, ReleasedGradient) or isinstance(held_part(gradient), ReleasedGradient)


def new_placeholder(record: ParameterRecord) -> Tensor:
    """Return a placeholder of a parameter's shape and dtype; it takes no memory."""
    kind = ReleasedShard if record.keeps_shard else ReleasedGradient
    # One element of memory serves all placeholders of a dtype and device.
    placeholder = _one_nan(record.dtype, record.device).expand(record.kept.shape).as_subclass(kind)
    placeholder.parameter_name = record.name
    return like(record.parameter, placeholder) if record.keeps_shard else placeholder
