"""Tiles and their state machine, the backends that keep and step them, and the store of one process."""

from longshore.host.backend import Backend, BackendSettings, OnDevice
from longshore.host.events import NO_RECORDER, Ranges, Recorder, annotating, debugging
from longshore.host.parameter_store import (
    GRADIENT,
    MASTER,
    Forecast,
    OwnedRun,
    ParameterStep,
    ParameterStore,
    broken_state_error,
)
from longshore.host.snapshot import PageSnapshot, Read
from longshore.host.speculation import SpeculationMemory, SpeculationRecord, memory_for_speculation
from longshore.host.store import HostStore
from longshore.host.tile import Tile, TileEvent, TileState
from longshore.host.worker import Worker

__all__ = [
    "GRADIENT",
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
