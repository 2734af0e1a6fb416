"""Tiles and their state machine, the backends that keep and step them, and the store of one process."""

from longshore.host.backend import Backend, BackendSettings
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
from longshore.host.snapshot import PageSnapshot
from longshore.host.speculation import SpeculationMemory, SpeculationRecord, memory_for_speculation
from longshore.host.store import HostStore
from longshore.host.tile import TileState
from longshore.host.worker import Worker

__all__ = [
    "GRADIENT",
    "MASTER",
    "NO_RECORDER",
    "Backend",
    "BackendSettings",
    "Forecast",
    "HostStore",
    "OwnedRun",
    "PageSnapshot",
    "ParameterStep",
    "ParameterStore",
    "Ranges",
    "Recorder",
    "SpeculationMemory",
    "SpeculationRecord",
    "TileState",
    "Worker",
    "annotating",
    "broken_state_error",
    "debugging",
    "memory_for_speculation",
]
