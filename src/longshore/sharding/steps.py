"""What is to be done with whole parameters, seen by one rank that owns pieces of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from longshore.host import Forecast, ParameterStep
from longshore.kernels import HostRule, Scale
from longshore.sharding.shards import Shards


class PieceForecast(Forecast):
    """The forecast of whole parameters, by the pieces that this rank owns."""

    def __init__(self, whole: Forecast, shards: Shards) -> None:
        self._whole = whole
        self._shards = shards

    def scale(self) -> Scale:
        return self._whole.scale()

    def rules(self) -> Mapping[int, HostRule]:
        return {
            piece.index: rule
            for parameter, rule in self._whole.rules().items()
            for piece in self._shards.owned(parameter)
        }


def number_of(steps: Mapping[int, ParameterStep], scale: Scale) -> int:
    """The same number for the same verdict: which parameters are stepped, by which rules, at which scale."""
    rules = sorted({repr(rule) for rule in {id(step.rule): step.rule for step in steps.values()}.values()})
    return zlib.crc32(repr((sorted(steps), rules, scale)).encode())
