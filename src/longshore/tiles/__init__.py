"""Tiles and their state machine, and the tiers in which they rest."""

from longshore.tiles.arrivals import Accumulate
from longshore.tiles.events import NO_RECORDER, Ranges, Recorder, annotating
from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY, LocalExchange, Matrix, MatrixExchange
from longshore.tiles.snapshot import StateSnapshot
from longshore.tiles.speculation import SpeculationMemory, SpeculationRecord, memory_for_speculation
from longshore.tiles.tier import Tier, TierSettings
from longshore.tiles.tile import GRADIENT, MASTER, Forecast, ParameterStep, TileState
from longshore.tiles.tiles import RepeatedCommit, Tiles
from longshore.tiles.window import Breakage, Ended, Entry, FailedThere, Fingerprint, Seen, Window, broken_state_error

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
    "broken_state_error",
    "memory_for_speculation",
]
