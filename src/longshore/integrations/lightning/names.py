"""The names of Lightning that are used here, from whichever of its packages the user has.

``lightning`` has all of it. The older ``pytorch_lightning`` and ``lightning_fabric`` have the same modules with classes
of their own, and each Trainer accepts strategies of its own package only.
"""

# ruff: noqa: F401

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING


def _together() -> bool:
    """Whether to use ``lightning``: the program has imported it, or else it is installed."""
    if "lightning" not in sys.modules and ("pytorch_lightning" in sys.modules or find_spec("lightning") is None):
        if find_spec("pytorch_lightning") is None:
            raise ImportError("longshore.integrations.lightning needs Lightning: pip install 'longshore[lightning]'")
        return False
    return True


if TYPE_CHECKING or _together():
    from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as backend_for
    from lightning.fabric.utilities.distributed import _init_dist_connection as connect
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduced
    from lightning.fabric.utilities.init import _EmptyInit as EmptyInit
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import _Stateful as Stateful
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
    from lightning.pytorch.plugins.precision.precision import Precision as TrainerPrecision
    from lightning.pytorch.strategies import StrategyRegistry as TrainerRegistry
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as TrainerLauncher
    from lightning.pytorch.strategies.parallel import ParallelStrategy as TrainerParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType as ClipAlgorithm
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.types import LRSchedulerConfig
else:
    from lightning_fabric.plugins.precision.precision import Precision as FabricPrecision
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
    from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning_fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning_fabric.utilities.distributed import _get_default_process_group_backend_for_device as backend_for
    from lightning_fabric.utilities.distributed import _init_dist_connection as connect
    from lightning_fabric.utilities.distributed import _sync_ddp_if_available as reduced
    from lightning_fabric.utilities.init import _EmptyInit as EmptyInit
    from lightning_fabric.utilities.rank_zero import rank_zero_only
    from lightning_fabric.utilities.seed import reset_seed
    from lightning_fabric.utilities.types import _Stateful as Stateful
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.core.optimizer import _MockOptimizer as NoOptimizer
    from pytorch_lightning.plugins.precision.precision import Precision as TrainerPrecision
    from pytorch_lightning.strategies import StrategyRegistry as TrainerRegistry
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as TrainerLauncher
    from pytorch_lightning.strategies.parallel import ParallelStrategy as TrainerParallelStrategy
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import GradClipAlgorithmType as ClipAlgorithm
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.types import LRSchedulerConfig
