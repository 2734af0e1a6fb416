"""Tiles and their state machine, and the tiers in which they rest."""

from longshore.tiles.arrivals import Accumulate
from longshore.tiles.events import NO_RECORDER, Ranges, Recorder, annotating
from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY, LocalExchange, Matrix, MatrixExchange
from longshore.tiles.speculation import SpeculationMemory, SpeculationRecord, memory_for_speculation
from longshore.tiles.states import RangeStates, StateSnapshot
from longshore.tiles.tier import Tier, TierSettings
from longshore.tiles.tile import GRADIENT, MASTER, Forecast, ParameterStep, TileState
from longshore.tiles.tiles import RepeatedCommit, Tiles
from longshore.tiles.window import Breakage, Ended, Entry, FailedThere, Fingerprint, Seen, Window

__all__ = [
    "GRADIENT",
    "MASTER",
    "MATRICES_UNDER_WAY",
    "NO_RECORDER",
    "Accumulate",
    "Breakage",
    "Ended",
    "Entry",
    "FailedThere",
    "Fingerprint",
    "Forecast",
    "LocalExchange",
    "Matrix",
    "MatrixExchange",
    "ParameterStep",
    "RangeStates",
    "Ranges",
    "Recorder",
    "RepeatedCommit",
    "Seen",
    "SpeculationMemory",
    "SpeculationRecord",
    "StateSnapshot",
    "Tier",
    "TierSettings",
    "TileState",
    "Tiles",
    "Window",
    "annotating",
    "memory_for_speculation",
]
