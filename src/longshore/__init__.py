"""ZeRO-style sharded, CPU-offloaded training for PyTorch, bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longshore.checkpoint.one_line import load as load
    from longshore.checkpoint.one_line import save as save
    from longshore.checkpoint.one_line import wait_for_checkpoint as wait_for_checkpoint
    from longshore.engine import Config, ConfigError, Engine, Init, add_config_arguments, init_distributed, initialize
    from longshore.engine.loss_scale import LossScaleError
    from longshore.engine.ranks import RendezvousError
    from longshore.errors import (
        BrokenStateError,
        CheckpointError,
        GradientError,
        LongshoreError,
        ParameterError,
        RankError,
    )
    from longshore.optim import SGD, Adagrad, Adam, AdamW, Lion, Offload
    from longshore.optim.client import from_client as from_client
    from longshore.sharding import gather as gather
    from longshore.tracing import annotate, trace
    from longshore.transfer import SimulatedTransfer

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BrokenStateError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "GradientError",
    "Init",
    "Lion",
    "LongshoreError",
    "LossScaleError",
    "Offload",
    "ParameterError",
    "RankError",
    "RendezvousError",
    "SimulatedTransfer",
    "add_config_arguments",
    "annotate",
    "from_client",
    "gather",
    "init_distributed",
    "initialize",
    "load",
    "save",
    "trace",
    "wait_for_checkpoint",
]

# Names are imported at their first use: torch takes seconds to import, and the command line, which imports this
# package first, should show its --help and end on Ctrl-C without waiting for that.
_HOMES = {
    "longshore.checkpoint.one_line": "load save wait_for_checkpoint",
    "longshore.engine": "Config ConfigError Engine Init add_config_arguments init_distributed initialize",
    "longshore.engine.loss_scale": "LossScaleError",
    "longshore.engine.ranks": "RendezvousError",
    "longshore.errors": "BrokenStateError CheckpointError GradientError LongshoreError ParameterError RankError",
    "longshore.optim": "SGD Adagrad Adam AdamW Lion Offload",
    "longshore.optim.client": "from_client",
    "longshore.sharding": "gather",
    "longshore.tracing": "annotate trace",
    "longshore.transfer": "SimulatedTransfer",
}
_MODULES = ("checkpointing", "utils")  # used as longshore.checkpointing, without importing it
_INSTEAD = {  # advice for names that a DeepSpeed script uses
    "zero": "deepspeed.zero.Init is longshore.Init, and deepspeed.zero.GatheredParameters is longshore.gather",
    "DeepSpeedEngine": "the engine's class is longshore.Engine",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
