"""Tiles and their state machine, and the tiers in which they rest."""

from longshore.tiles.arrivals import Accumulate
from longshore.tiles.bets import SpeculationMemory, SpeculationRecord, memory_for_speculation
from longshore.tiles.events import NO_RECORDER, Ranges, Recorder, annotating
from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY, LocalExchange, Matrix, MatrixExchange
from longshore.tiles.repeated import RepeatedCommit
from longshore.tiles.snapshot import StateSnapshot
from longshore.tiles.steps import GRADIENT, MASTER, Breakage, FailedThere, Forecast, ParameterStep, broken_state_error
from longshore.tiles.tier import Tier, TierSettings
from longshore.tiles.tile import TileState
from longshore.tiles.tiles import Tiles

__all__ = [
    "GRADIENT",
    "MASTER",
    "MATRICES_UNDER_WAY",
    "NO_RECORDER",
    "Accumulate",
    "Breakage",
    "FailedThere",
    "Forecast",
    "LocalExchange",
    "Matrix",
    "MatrixExchange",
    "ParameterStep",
    "Ranges",
    "Recorder",
    "RepeatedCommit",
    "SpeculationMemory",
    "SpeculationRecord",
    "StateSnapshot",
    "Tier",
    "TierSettings",
    "TileState",
    "Tiles",
    "annotating",
    "broken_state_error",
    "memory_for_speculation",
]
