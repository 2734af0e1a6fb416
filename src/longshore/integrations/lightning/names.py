"""The names of Lightning that are used here, from whichever of its packages the user has.

``lightning`` has all of them. The older ``pytorch_lightning`` and ``lightning_fabric`` have the same modules with
classes of their own, and each Trainer accepts strategies of its own package only.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOMES = {
    "BaseFinetuning": ("pytorch", "callbacks.finetuning.BaseFinetuning"),
    "BackwardSyncControl": ("fabric", "strategies.strategy._BackwardSyncControl"),
    "ClipAlgorithm": ("pytorch", "utilities.GradClipAlgorithmType"),
    "EmptyInit": ("fabric", "utilities.init._EmptyInit"),
    "FabricLauncher": ("fabric", "strategies.launchers.subprocess_script._SubprocessScriptLauncher"),
    "FabricParallelStrategy": ("fabric", "strategies.parallel.ParallelStrategy"),
    "FabricPrecision": ("fabric", "plugins.precision.precision.Precision"),
    "FabricRegistry": ("fabric", "strategies.STRATEGY_REGISTRY"),
    "LRSchedulerConfig": ("pytorch", "utilities.types.LRSchedulerConfig"),
    "LightningModule": ("pytorch", "core.module.LightningModule"),
    "NoOptimizer": ("pytorch", "core.optimizer._MockOptimizer"),
    "Stateful": ("fabric", "utilities.types._Stateful"),
    "Trainer": ("pytorch", "trainer.trainer.Trainer"),
    "TrainerFn": ("pytorch", "trainer.states.TrainerFn"),
    "TrainerLauncher": ("pytorch", "strategies.launchers.subprocess_script._SubprocessScriptLauncher"),
    "TrainerParallelStrategy": ("pytorch", "strategies.parallel.ParallelStrategy"),
    "TrainerPrecision": ("pytorch", "plugins.precision.precision.Precision"),
    "TrainerRegistry": ("pytorch", "strategies.StrategyRegistry"),
    "backend_for": ("fabric", "utilities.distributed._get_default_process_group_backend_for_device"),
    "connect": ("fabric", "utilities.distributed._init_dist_connection"),
    "is_overridden": ("pytorch", "utilities.model_helpers.is_overridden"),
    "rank_zero_only": ("fabric", "utilities.rank_zero.rank_zero_only"),
    "reduced": ("fabric", "utilities.distributed._sync_ddp_if_available"),
    "reset_seed": ("fabric", "utilities.seed.reset_seed"),
}
"""The package of each name, and its path in the package."""
_PACKAGES = {"fabric": "lightning.fabric", "pytorch": "lightning.pytorch"}
# Use the package that the program has imported, or else the one that is installed.
if "lightning" not in sys.modules and ("pytorch_lightning" in sys.modules or find_spec("lightning") is None):
    if find_spec("pytorch_lightning") is None:
        raise ImportError("longshore.integrations.lightning needs Lightning: pip install 'longshore[lightning]'")
    _PACKAGES = {"fabric": "lightning_fabric", "pytorch": "pytorch_lightning"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package, place = _HOMES[name]
    module, _, attribute = place.rpartition(".")
    return getattr(import_module(f"{_PACKAGES[package]}.{module}"), attribute)
