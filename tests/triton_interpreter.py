"""Triton's interpreter in half of its time: the functions of Triton's language are replaced once for each launch.

By itself it looks for what there is to replace at each call of a device function, too, through the whole language.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@functools.cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    """The modules of Triton's language that a kernel's file knows: the interpreter replaces functions of those."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(each.__name__ for each in modules if each.__name__.startswith("triton.language"))


@contextlib.contextmanager
def replaced_once() -> Iterator[None]:
    """Context in which launches run in the interpreter, one at a time."""
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang  # pyright: ignore
    replaced = set[str]()

    def once(function: Any) -> Any:
        languages = _languages(function)
        if replaced >= languages:
            return None  # a launch has the answer to its own call alone, which is the first
        first = not replaced
        replaced.update(languages)
        scope = replace(function)
        if first and scope is not None:  # older Tritons leave replaced what is replaced
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    with mock.patch.object(interpreter, "_patch_lang", once):
        yield
