"""What is to be done with whole parameters, seen by one rank that owns pieces of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from torch import Tensor

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


def steps_of_pieces(steps: Mapping[int, ParameterStep], shards: Shards) -> dict[int, ParameterStep]:
    """The steps of what this rank owns of these parameters, by piece."""
    place = shards.ownership.place
    return {
        piece.index: ParameterStep(step.rule, step.target[place(piece)], None)
        for parameter, step in steps.items()
        for piece in shards.owned(parameter)
    }


def once_and_more(parameters: Iterable[int], shards: Shards) -> tuple[dict[int, Tensor | None], ...]:
    """The pieces that this rank owns of these parameters: those that count where all ranks are added up, and those of
    which another one that counts has the same."""
    pieces: dict[bool, dict[int, Tensor | None]] = {True: {}, False: {}}
    for parameter in parameters:
        own = pieces[shards.ownership.tells(parameter, shards.ownership.lane.rank)]
        own.update((piece.index, None) for piece in shards.owned(parameter))
    return pieces[True], pieces[False]
