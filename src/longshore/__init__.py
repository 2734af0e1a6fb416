"""ZeRO-style sharded, CPU-offloaded training for PyTorch, bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from longshore.lazily import lazily

if TYPE_CHECKING:
    from longshore import checkpointing as checkpointing
    from longshore import utils as utils
    from longshore.checkpoint.one_line import load as load
    from longshore.checkpoint.one_line import save as save
    from longshore.checkpoint.one_line import wait_for_checkpoint as wait_for_checkpoint
    from longshore.compat.engine import Engine as Engine
    from longshore.compat.engine import add_config_arguments as add_config_arguments
    from longshore.compat.engine import initialize as initialize
    from longshore.engine import Config as Config
    from longshore.engine import ConfigError as ConfigError
    from longshore.engine import Init as Init
    from longshore.engine import init_distributed as init_distributed
    from longshore.engine.access import gather as gather
    from longshore.engine.optimizers import from_client as from_client
    from longshore.engine.precision import LossScaleError as LossScaleError
    from longshore.engine.ranks import RendezvousError as RendezvousError
    from longshore.errors import BrokenStateError as BrokenStateError
    from longshore.errors import CheckpointError as CheckpointError
    from longshore.errors import GradientError as GradientError
    from longshore.errors import HostMemoryError as HostMemoryError
    from longshore.errors import LongshoreError as LongshoreError
    from longshore.errors import NoCheckpointError as NoCheckpointError
    from longshore.errors import ParameterError as ParameterError
    from longshore.errors import RankError as RankError
    from longshore.optim import SGD as SGD
    from longshore.optim import Adagrad as Adagrad
    from longshore.optim import Adam as Adam
    from longshore.optim import AdamW as AdamW
    from longshore.optim import Lion as Lion
    from longshore.optim import Muon as Muon
    from longshore.optim import Offload as Offload
    from longshore.optim import muon_groups as muon_groups
    from longshore.streaming import Stream as Stream
    from longshore.streaming import stream as stream
    from longshore.tracing import annotate as annotate
    from longshore.tracing import trace as trace
    from longshore.transfer import SimulatedTransfer as SimulatedTransfer

__version__ = "0.1.0"
# Names are imported at their first use: torch takes seconds to import, and the command line, which imports this
# package first, should show its --help and end on Ctrl-C without waiting for that.
_HOMES = {
    "longshore.checkpoint.one_line": "load save wait_for_checkpoint",
    "longshore.compat.engine": "Engine add_config_arguments initialize",
    "longshore.engine": "Config ConfigError Init init_distributed",
    "longshore.engine.optimizers": "from_client",
    "longshore.engine.access": "gather",
    "longshore.engine.precision": "LossScaleError",
    "longshore.engine.ranks": "RendezvousError",
    "longshore.errors": "BrokenStateError CheckpointError GradientError HostMemoryError LongshoreError "
    "NoCheckpointError ParameterError RankError",
    "longshore.optim": "SGD Adagrad Adam AdamW Lion Muon Offload muon_groups",
    "longshore.streaming": "Stream stream",
    "longshore.tracing": "annotate trace",
    "longshore.transfer": "SimulatedTransfer",
}
_MODULES = ("checkpointing", "utils")  # used as longshore.checkpointing, without importing it
_INSTEAD = {  # advice for names that a DeepSpeed script uses
    "zero": "deepspeed.zero.Init is longshore.Init, and deepspeed.zero.GatheredParameters is longshore.gather",
    "DeepSpeedEngine": "the engine's class is longshore.Engine",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]

_find = lazily(globals(), _HOMES)

if not TYPE_CHECKING:  # or every misspelled name would be Any to a type checker

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOME_OF:
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
        if _HOME_OF[name] != "longshore.errors":  # which does without torch
            from longshore.torch_versions import FEATURES

            if (error := FEATURES["longshore"].refusal()) is not None:
                raise ImportError(str(error))
        if _HOME_OF[name] == "longshore.optim":
            importlib.import_module("longshore.ranks.presence")  # which learns of optimizers that are made
        return _find(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
