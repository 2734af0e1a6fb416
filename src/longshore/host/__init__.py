"""Pages, the tile state machine, and the worker that adds and steps on the host."""

from longshore.host.parameter_store import MASTER, OwnedRun, ParameterStore, check_not_broken, debugging
from longshore.host.ranges import Ranges, annotating
from longshore.host.recorder import NO_RECORDER, Recorder
from longshore.host.snapshot import Read, Snapshot
from longshore.host.speculation import SpeculationMemory, memory_for_speculation
from longshore.host.speculator import Forecast
from longshore.host.speculator import Record as SpeculationRecord
from longshore.host.split import SplitStore
from longshore.host.stepping import ParameterStep
from longshore.host.store import HostStore
from longshore.host.tile import Tile
from longshore.host.tile_state import TileEvent, TileState
from longshore.host.worker import Worker

__all__ = [
    "MASTER",
    "NO_RECORDER",
    "Forecast",
    "HostStore",
    "OwnedRun",
    "ParameterStep",
    "ParameterStore",
    "Ranges",
    "Read",
    "Recorder",
    "Snapshot",
    "SpeculationMemory",
    "SpeculationRecord",
    "SplitStore",
    "Tile",
    "TileEvent",
    "TileState",
    "Worker",
    "annotating",
    "check_not_broken",
    "debugging",
    "memory_for_speculation",
]
