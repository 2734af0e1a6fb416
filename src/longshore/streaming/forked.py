"""Parameters that rest in pinned memory, in a forked process (a worker of a data loader), which has no such memory.

A fork would copy all of it, or move pages away from where the copy engines look.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from longshore.errors import LongshoreError
from longshore.transfer import copy_on_fork

_HARMLESS = frozenset({"__repr__", "__hash__", "size", "stride", "dim", "numel", "element_size", "is_floating_point"})
_READ: list[Any] = [
    each.__get__  # pyright: ignore[reportAttributeAccessIssue]
    for each in (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.is_leaf)
]
"""Attributes that do not depend on the values."""


class _LeftBehind:
    """Base class of parameters whose values are in another process: every use of them raises LongshoreError."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS or func in _READ:
            return super().__torch_function__(func, types, args, kwargs or {})  # pyright: ignore
        raise LongshoreError(
            "this process was forked from the one that has the parameters, which rest in pinned memory, and has no "
            f"copy of them ({name} asked for one): use the model there, and give workers (of a data loader, say) "
            "copies of what they need (p.detach().clone())"
        )

    def __repr__(self, **_: Any) -> str:
        return "<parameter that rests in the pinned memory of another process>"


@functools.cache
def _left_behind(kind: type[Tensor]) -> type[Tensor]:
    return type("LeftBehind", (_LeftBehind, kind), {"__slots__": ()})


_resting: dict[int, Sequence[Tensor]] = {}
"""Parameters in memory that forked processes do not get, by the ``id`` of who put them there."""


def leave_behind_on_fork(owner: object, parameters: Sequence[Tensor]) -> Callable[[], object]:
    """Let every use of these parameters raise in processes that are forked, until ``owner`` is gone or the returned
    function is called."""
    _resting[id(owner)] = parameters
    done = weakref.finalize(owner, _copy_on_fork, id(owner))
    done.atexit = False
    return done


def _copy_on_fork(key: int) -> None:
    """Let processes that are forked from now on have copies of parameters that are ordinary ones again."""
    parameters = _resting.pop(key)
    gradients = [each.grad for each in parameters if type(each.grad) is Tensor]  # not placeholders, which have none
    copy_on_fork([*map(_local, parameters), *gradients])


def _local(parameter: Tensor) -> Tensor:
    """Return the tensor with the memory: the shard of a DTensor."""
    return getattr(parameter, "_local_tensor", parameter)


def _after_fork() -> None:
    for parameters in _resting.values():
        for tensor in (*parameters, *map(_local, parameters)):  # to_local() returns the latter
            if not isinstance(tensor, _LeftBehind):
                tensor.__class__ = _left_behind(type(tensor))


os.register_at_fork(after_in_child=_after_fork)
