"""The names of DeepSpeed's package: what each is in longshore, and why others are refused."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from longshore import checkpointing
from longshore import utils as access
from longshore.compat import initialize, optimizers, utils, zero
from longshore.engine import ConfigError, Engine, add_config_arguments, schedules
from longshore.engine.data import TrainingLoader
from longshore.optim.tiled_optimizer import TiledOptimizer

VERSION = "0.19.0+longshore"
"""The version of DeepSpeed that scripts may compare with; the part after the plus says that it is longshore."""
_MAJOR, _MINOR, _PATCH = map(int, VERSION.partition("+")[0].split("."))


def _of(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


_ZERO = {"GatheredParameters": zero.gathered_parameters, "Init": zero.zero_init}
_CHECKPOINTING = _of(checkpointing, "checkpoint configure is_configured reset")
_ACCELERATOR = _of(utils, "DeepSpeedAccelerator get_accelerator")
_COMM = _of(initialize, "get_local_rank get_world_group init_distributed")
_INITIALIZE = {
    "DeepSpeedEngine": Engine,
    "DeepSpeedOptimizer": TiledOptimizer,
    "add_config_arguments": add_config_arguments,
    "initialize": initialize.initialize,
}
_SCHEDULES = "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"

PROVIDED: dict[str, dict[str, Any]] = {
    "": {
        **_INITIALIZE,
        **_of(utils, "get_accelerator log_dist logger"),
        "DeepSpeedConfigError": ConfigError,
        "DeepSpeedDataLoader": TrainingLoader,
        "init_distributed": initialize.init_distributed,
        "__version__": VERSION,
        "__version_major__": _MAJOR,
        "__version_minor__": _MINOR,
        "__version_patch__": _PATCH,
        "__git_hash__": None,
        "__git_branch__": None,
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
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
    "ops": {},
    "ops.adagrad": _of(optimizers, "DeepSpeedCPUAdagrad"),
    "ops.adam": _of(optimizers, "DeepSpeedCPUAdam FusedAdam"),
    "ops.lion": _of(optimizers, "DeepSpeedCPULion FusedLion"),
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config": {"DeepSpeedConfigError": ConfigError},
    "runtime.dataloader": {"DeepSpeedDataLoader": TrainingLoader, "RepeatingLoader": utils.RepeatingLoader},
    "runtime.engine": _INITIALIZE,
    "runtime.lr_schedules": {
        **_of(schedules, _SCHEDULES),
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
    "runtime.zero.partition_parameters": _ZERO,
    "utils": {
        **_of(
            access,
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
            "safe_set_full_grad safe_set_full_optimizer_state",
        ),
        **_of(utils, "RepeatingLoader get_accelerator log_dist logger set_log_level_from_string"),
        "safe_update_full_grad_vectorized": utils.safe_update_full_grad_vectorized,
        **_of(zero, "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module"),
    },
    "utils.groups": {
        "get_data_parallel_group": initialize.get_world_group,
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
    "version": {"VERSION": VERSION, "version": VERSION, "git_hash": None, "git_branch": None, "installed_ops": {}},
    "zero": _ZERO,
}
"""Modules by their name after ``deepspeed.``, with the names in them; submodules are added to them."""

_DATA_PARALLEL = "longshore shards over data-parallel ranks only"
_LAMB = "LAMB and 1-bit optimizers look at more than one element at a time; use AdamW"


def _for(advice: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


REFUSED = {
    **_for(_DATA_PARALLEL + "; use torch's context parallelism in the model", "sequence"),
    **_for(f"{_DATA_PARALLEL}; apply torch's parallelize_module and fully_shard before initialize()", "tp_model_init"),
    **_for(
        f"{_DATA_PARALLEL}, and has no pipelines; give the whole model to initialize()",
        "PipelineEngine PipelineModule pipe runtime.pipe",
    ),
    **_for(f"{_DATA_PARALLEL}, and has no expert parallelism; a mixture of experts trains as any other model", "moe"),
    **_for(
        "longshore trains; for inference call the model under torch.no_grad(), or use an inference server",
        "InferenceEngine default_inference_config inference init_inference model_implementations module_inject "
        "replace_transformer_layer",
    ),
    **_for(
        "use torch.nn and torch.nn.functional; the optimizer's kernels come compiled with longshore",
        "DeepSpeedTransformerConfig DeepSpeedTransformerLayer ops.op_builder ops.transformer",
    ),
    **_for("longshore does not quantize or compress; leave it out", "compression linear runtime.quantize"),
    **_for(
        "use torch.utils.flop_counter, torch.profiler, or longshore.trace(engine)",
        "comm.configure comm.log_summary profiling",
    ),
    **_for(
        "use the safe_*_full_* functions, which give and take whole tensors at every stage",
        "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state "
        "utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state",
    ),
    **_for(
        "use torch.cuda's streams and events in your script; longshore does not expose its own",
        "accelerator.Event accelerator.Stream accelerator.current_stream accelerator.default_stream accelerator.stream",
    ),
    **_for(
        "use longshore.Config, or give the file or the dictionary to initialize()",
        "DeepSpeedConfig runtime.config.DeepSpeedConfig",
    ),
    **_for("generate with engine.module", "DeepSpeedHybridEngine runtime.hybrid_engine"),
    **_for('use torch.device("meta") as a context, or zero.Init', "OnDevice utils.OnDevice"),
    **_for(
        "stale updates change results; use super_offload, which does not",
        "ops.adam.ZenFlowCPUAdam runtime.zenflow",
    ),
    **_for("there is no NVMe offload; use offload_optimizer.device cpu", "ops.aio runtime.swap_tensor"),
    **_for("optimizers are made by initialize()", "runtime.zero.stage3 runtime.zero.stage_1_and_2"),
    **_for("use torch.cuda.nvtx.range", "utils.instrument_w_nvtx utils.nvtx"),
    "autotuning": "choose batch and bucket sizes yourself",
    "checkpoint": "longshore export, inspect and import-deepspeed read checkpoints",
    "launcher": "start ranks with torchrun: torchrun --nproc-per-node=N -m longshore run --as-deepspeed SCRIPT",
    "monitor": "write figures with the logger of your choice after engine.step()",
    "nebula": "save with engine.save_checkpoint(async_save=True)",
    "ops.lamb": _LAMB,
    "ops.sparse_attention": "use torch's flex_attention",
    "runtime.data_pipeline": "order the samples in your loader",
    "runtime.fp16": f"fp16 belongs in the configuration. {_LAMB}",
    "runtime.zero.partition_parameters.ZeroParamStatus": "parameters at stage 3 are DTensors; test with torch's "
    "isinstance(param, torch.distributed.tensor.DTensor)",
    "utils.timer": "use time.perf_counter(), or longshore.trace(engine), which also says what training waited for",
    "zero.TiledLinear": "split the layer in the model",
    "zero.register_external_parameter": "leave it out where the parameter's module runs in the same block; else name "
    "the module that holds both in longshore.wrap_policy of the file",
    "zero.unwrap_model_for_generation": "use zero.GatheredParameters(model.parameters())",
}
"""What to use instead, by the name after ``deepspeed.``; an entry also covers the names below it."""
_SAME = {"runtime.zero.": "zero.", "runtime.zero.partition_parameters.": "zero."}
_ELSE = (
    "longshore does not stand in for it (docs/from_deepspeed.md lists what there is); leave it out, or run the script "
    "with DeepSpeed itself"
)


def advice(name: str) -> str:
    """What to use in place of ``deepspeed.<name>``."""
    names = [name, *(name.replace(prefix, same, 1) for prefix, same in _SAME.items() if name.startswith(prefix))]
    for each in names:
        parts = each.split(".")
        for count in range(len(parts), 0, -1):
            found = REFUSED.get(".".join(parts[:count]))
            if found is not None:
                return found
    return _ELSE
