"""References from and to an engine that make no cycle: its memory is free with the last reference, and not when the
garbage collector runs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class MethodOf(Generic[P, R]):
    """A method of a part that refers to its object, as a method of the object.

    Args:
        part: name of the attribute of the object that makes the part.
        method: the function of the part's class.
    """

    def __init__(self, part: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._part = part
        self._method = method

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[P, R]:
        if instance is None:
            return self._method  # pyright: ignore[reportReturnType]  # as functions of a class are
        return types.MethodType(self._method, getattr(instance, self._part))


def weakly(method: Callable[..., None], **kwargs: Any) -> Callable[..., None]:
    """Return a function that calls a method of an object if the object is alive, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(**kwargs)

    return call
