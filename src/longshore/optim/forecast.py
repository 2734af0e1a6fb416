"""What an optimizer will give the next commit, told during backward to a store that steps ahead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

from longshore.host import Forecast
from longshore.kernels import HostRule, Scale
from longshore.optim.clipping import Clipping


class OptimizerForecast(Forecast):
    """Groups as they are now, and no clipping.

    Args:
        clipping: of the optimizer's window.
        rules: a method of the optimizer, which this does not keep alive.
    """

    def __init__(self, clipping: Clipping, rules: Callable[[], Mapping[int, HostRule]]) -> None:
        self._clipping = clipping
        self._rules = weakref.WeakMethod(rules)

    def scale(self) -> Scale:
        return self._clipping.unclipped()

    def rules(self) -> Mapping[int, HostRule]:
        rules = self._rules()
        return {} if rules is None else rules()


def checked_backwards(backwards: int) -> int:
    """What a user expects of the window.

    Raises:
        ValueError: no integer of at least 1.
    """
    if isinstance(backwards, bool) or not isinstance(backwards, int) or backwards < 1:
        raise ValueError(f"expect_backwards takes a number of backwards, at least 1, not {backwards!r}")
    return backwards
