"""Old names of arguments and functions that go on working for a while: docs/stability.md says how long.

The warning is a :class:`FutureWarning`: Python hides a ``DeprecationWarning`` unless the code is in ``__main__``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]
_warned: set[tuple[str, int, str]] = set()
"""File, line and text of each warning: without it a loop that changes warning filters would show it at every step."""


def deprecated_argument(
    old: str, new: str, *, since: str, removed_in: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose argument ``old`` is called ``new`` now: it takes both, and warns of the old name.

    All four are literals: ``tests/test_deprecation.py`` finds them in the source, and fails once longshore has the
    version ``removed_in``. It is the outermost decorator, so that the warning names the line of the caller. Code that
    looks at the arguments before the function is called (:mod:`longshore.optim.other_optimizers`) has to know the old
    name.

    Args:
        old: the old name, which may be given by keyword only.
        new: a parameter of the function.
        since: the version that first warns.
        removed_in: the version in which the old name is an error, two minor versions later or more.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)
        assert new in names and old not in names, f"{function.__qualname__} has to have {new!r} in place of {old!r}"
        place, name = names.index(new), function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs or len(args) > place:
                    raise TypeError(f"{name}() got {new!r} and {old!r}, which is its old name; give {new!r} only")
                _warn(f"{name}({old}=...) is deprecated since longshore {since}: use {new}=; {removed_in} removes it")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return _marked(renamed, old, f"{new} until {removed_in}")

    return decorate


def deprecated_function(instead: str, *, since: str, removed_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function or method that another one replaces: it warns, and works as before.

    Args:
        instead: its replacement, as one writes it: ``"longshore.gather()"``.
        since, removed_in: as for :func:`deprecated_argument`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__

        @functools.wraps(function)
        def replaced(*args: P.args, **kwargs: P.kwargs) -> R:
            _warn(f"{name}() is deprecated since longshore {since}: use {instead}; {removed_in} removes it")
            return function(*args, **kwargs)

        return _marked(replaced, function.__name__, f"{instead} until {removed_in}")

    return decorate


def _marked(function: Callable[P, R], name: str, note: str) -> Callable[P, R]:
    """Note a deprecated name on the function, for the list of public names (``scripts/docs/public_api.py``)."""
    marked: Any = function
    marked.deprecated_names = {**getattr(function, "deprecated_names", {}), name: note}
    return function


def _warn(text: str) -> None:
    """Warn once for each line of the program that calls longshore, wherever in longshore the name is looked at."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    here = frame.f_code.co_filename, frame.f_lineno, text
    if here not in _warned:
        warnings.warn(text, FutureWarning, stacklevel=level)
        _warned.add(here)  # not where the warning was raised as an error: the next call raises it, too
