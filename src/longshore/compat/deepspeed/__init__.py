"""``deepspeed``, by longshore: ``import longshore.compat.deepspeed as deepspeed``, or ``longshore run-deepspeed``.

The names of DeepSpeed's package that training scripts use. What is not here
raises an error that names it and says what to use; ``hasattr`` is then false.
"""

from longshore.compat.absent import getter
from longshore.compat.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from longshore.compat.deepspeed.accelerator import get_accelerator
from longshore.compat.deepspeed.comm import init_distributed
from longshore.compat.deepspeed.runtime.config import DeepSpeedConfigError
from longshore.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from longshore.compat.deepspeed.runtime.engine import DeepSpeedEngine, DeepSpeedOptimizer, add_config_arguments
from longshore.compat.deepspeed.runtime.engine import initialize as initialize
from longshore.compat.deepspeed.utils import log_dist, logger
from longshore.compat.deepspeed.version import VERSION
from longshore.compat.finder import advise

dist = comm
__version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = None

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = getter(__name__)
advise()
