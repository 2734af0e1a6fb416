"""The names of DeepSpeed's package, with their values in longshore; ``absent.py`` has the names that are refused."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from longshore import ConfigError, Engine, add_config_arguments
from longshore import utils as access
from longshore.compat import (
    activation_checkpointing,
    constructors,
    distributed,
    initialize,
    offload_config,
    optimizers,
    utils,
    zero,
)
from longshore.compat.absent import VERSION
from longshore.compat.stage3_names import ZeroParamStatus
from longshore.seam import TiledOptimizer, TrainingLoader, checkpoint, is_configured, reset, schedules

_MAJOR, _MINOR, _PATCH = map(int, VERSION.partition("+")[0].split("."))


_VERSION = {"version": VERSION, "git_hash": None, "git_branch": None, "installed_ops": {}}


def _of(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


_ZERO = {"GatheredParameters": zero.GatheredParameters, "Init": zero.ZeroInit}
_CHECKPOINTING = {
    "checkpoint": checkpoint,
    "configure": activation_checkpointing.configure,
    "is_configured": is_configured,
    "reset": reset,
}
_ACCELERATOR = _of(utils, "DeepSpeedAccelerator get_accelerator")
_COMM = _of(distributed, "get_local_rank get_world_group init_distributed")
_INITIALIZE = {
    "DeepSpeedEngine": Engine,
    "DeepSpeedOptimizer": TiledOptimizer,
    "add_config_arguments": add_config_arguments,
    "initialize": initialize.initialize,
}
_SCHEDULE_PARAMETERS = (
    "lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase edge_value mid_value "
    "cycle_first_step_size cycle_first_stair_count cycle_second_step_size cycle_second_stair_count decay_step_size "
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate warmup_min_lr warmup_max_lr "
    "warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps"
)
_SCHEDULES = "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"

PROVIDED: dict[str, dict[str, Any]] = {
    "": {
        **_INITIALIZE,
        **_of(utils, "get_accelerator log_dist logger"),
        "DeepSpeedConfigError": ConfigError,
        "DeepSpeedDataLoader": TrainingLoader,
        "init_distributed": distributed.init_distributed,
        "__version__": VERSION,
        "__version_major__": _MAJOR,
        "__version_minor__": _MINOR,
        "__version_patch__": _PATCH,
        "__git_hash__": None,
        "__git_branch__": None,
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "checkpoint": {},
    "checkpoint.utils": _of(utils, "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "comm": {
        **_of(
            dist,
            "P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all "
            "all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather "
            "get_global_rank get_rank get_world_size irecv is_available is_initialized isend monitored_barrier "
            "new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send",
        ),
        **_COMM,
        "get_all_ranks_from_group": dist.get_process_group_ranks,
        "inference_all_reduce": dist.all_reduce,
    },
    "comm.comm": _COMM,
    "git_version_info": _VERSION,
    "launcher": {},
    "launcher.runner": _of(distributed, "DEEPSPEED_ENVIRONMENT_NAME"),
    "ops": {},
    "ops.adagrad": _of(optimizers, "DeepSpeedCPUAdagrad"),
    "ops.adam": _of(optimizers, "DeepSpeedCPUAdam FusedAdam"),
    "ops.lion": _of(optimizers, "DeepSpeedCPULion FusedLion"),
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": {"DeepSpeedOptimizer": TiledOptimizer, "ZeROOptimizer": TiledOptimizer},
    "runtime.config": {"DeepSpeedConfigError": ConfigError},
    "runtime.dataloader": {"DeepSpeedDataLoader": TrainingLoader, "RepeatingLoader": utils.RepeatingLoader},
    "runtime.engine": _INITIALIZE,
    "runtime.lr_schedules": {
        **_of(schedules, _SCHEDULES),
        **{name.upper(): name for name in _SCHEDULE_PARAMETERS.split()},
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_LOG_RATE": "log",
        "VALID_LR_SCHEDULES": ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        "LR_RANGE_TEST": "LRRangeTest",
        "LR_SCHEDULE": "lr_schedule",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_LR": "WarmupLR",
    },
    "runtime.utils": _of(utils, "see_memory_usage set_random_seed"),
    "runtime.zero": _ZERO,
    "runtime.zero.offload_config": _of(
        offload_config,
        "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum",
    ),
    "runtime.zero.partition_parameters": {
        **_ZERO,
        **constructors.ORIGINALS,
        **_of(constructors, "zero_wrapper_for_fp_tensor_constructor"),
        "ZeroParamStatus": ZeroParamStatus,
        **_of(utils, "get_accelerator"),
    },
    "utils": {
        **_of(
            access,
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
            "safe_set_full_grad safe_set_full_optimizer_state",
        ),
        **_of(utils, "RepeatingLoader get_accelerator log_dist logger set_log_level_from_string"),
        "safe_update_full_grad_vectorized": utils.safe_update_full_grad_vectorized,
        **_of(
            zero,
            "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
        ),
    },
    "utils.groups": {
        "get_data_parallel_group": distributed.get_world_group,
        "get_data_parallel_rank": dist.get_rank,
        "get_data_parallel_world_size": dist.get_world_size,
        "get_model_parallel_rank": lambda: 0,
        "get_model_parallel_world_size": lambda: 1,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    },
    "utils.logging": _of(utils, "log_dist logger set_log_level_from_string"),
    "utils.zero_to_fp32": _of(
        utils,
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint",
    ),
    "version": {"VERSION": VERSION, **_VERSION},
    "zero": _ZERO,
}
"""The names in each module, by the module's name after ``deepspeed.``; submodules are added to them."""
