"""Tiles and their pages, the tile state machine, and the worker that adds and steps on the host."""

from longshore.host.backend import Backend, BackendSettings, OnDevice
from longshore.host.events import NO_RECORDER, Recorder, debugging
from longshore.host.parameter_store import MASTER, OwnedRun, ParameterStore, broken_state_error
from longshore.host.ranges import Ranges, annotating
from longshore.host.snapshot import PageSnapshot, Read
from longshore.host.speculation import SpeculationMemory, memory_for_speculation
from longshore.host.stepping import Forecast, ParameterStep
from longshore.host.stepping import Record as SpeculationRecord
from longshore.host.store import HostStore
from longshore.host.tile import Tile, TileEvent, TileState
from longshore.host.worker import Worker

__all__ = [
    "MASTER",
    "NO_RECORDER",
    "Backend",
    "BackendSettings",
    "Forecast",
    "HostStore",
    "OnDevice",
    "OwnedRun",
    "PageSnapshot",
    "ParameterStep",
    "ParameterStore",
    "Ranges",
    "Read",
    "Recorder",
    "SpeculationMemory",
    "SpeculationRecord",
    "Tile",
    "TileEvent",
    "TileState",
    "Worker",
    "annotating",
    "broken_state_error",
    "debugging",
    "memory_for_speculation",
]
