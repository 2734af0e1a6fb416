"""Names of DeepSpeed that longshore does not have, with their replacements; and the version it stands in for.

This module loads neither torch nor the engine: a program may only ask whether there is a package named deepspeed.
"""

from __future__ import annotations

from typing import Any

from longshore import LongshoreError

NAME = "deepspeed"
VERSION = "0.19.0+longshore"
"""The version of DeepSpeed that scripts may compare with; the part after the plus says that it is longshore."""

_DATA_PARALLEL = "longshore shards over data-parallel ranks only"
_LAMB = "LAMB and 1-bit optimizers look at more than one element at a time; use AdamW"


def _for(advice: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


REFUSED = {
    **_for(
        _DATA_PARALLEL + "; use torch's context parallelism in the model",
        "sequence runtime.sequence_parallel utils.groups._get_sequence_parallel_group "
        "utils.groups._get_sequence_parallel_rank utils.groups._get_sequence_parallel_world_size",
    ),
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
    **_for(
        "longshore export, inspect and import-deepspeed read checkpoints",
        "checkpoint.DeepSpeedCheckpoint checkpoint.ZeROCheckpoint checkpoint.constants "
        "checkpoint.ds_to_universal checkpoint.universal_checkpoint checkpoint.zero_checkpoint",
    ),
    **_for("longshore does not quantize or compress; leave it out", "compression linear runtime.quantize"),
    **_for(
        "longshore plan counts the memory of a run, at every stage",
        "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold "
        "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live "
        "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold "
        "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live",
    ),
    **_for(
        "use flops_profiler of the file, torch.utils.flop_counter, torch.profiler, or longshore.trace(engine)",
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
    **_for(
        "start ranks with torchrun: torchrun --nproc-per-node=N -m longshore run-deepspeed SCRIPT",
        "launcher.constants launcher.launch launcher.launcher_helper launcher.multinode_runner "
        "launcher.runner.fetch_hostfile launcher.runner.main launcher.runner.parse_args",
    ),
    "autotuning": "choose batch and bucket sizes yourself",
    "elasticity": "set the batch numbers yourself",
    "monitor": "write figures with the logger of your choice after engine.step()",
    "nebula": "save with engine.save_checkpoint(async_save=True)",
    "ops.lamb": _LAMB,
    "ops.sparse_attention": "use torch's flex_attention",
    "runtime.data_pipeline": "order the samples in your loader",
    "runtime.fp16": f"fp16 belongs in the configuration. {_LAMB}",
    **_for(
        "give the schedule's parameters in the file, or call its class (runtime.lr_schedules.WarmupLR) yourself",
        "runtime.lr_schedules.add_tuning_arguments runtime.lr_schedules.parse_arguments "
        "runtime.lr_schedules.get_config_from_args runtime.lr_schedules.get_lr_from_config "
        "runtime.lr_schedules.get_torch_optimizer runtime.lr_schedules.update_lr",
    ),
    "runtime.sequence_parallel.ulysses_sp.TiledMLP": "split the layer in the model, or its input over tokens",
    "runtime.utils.move_to_device": "call .to(device) on each tensor of the batch",
    "utils.is_initialized": "call deepspeed.comm.is_initialized(); DeepSpeed 0.19 does not have this name either",
    **_for(
        "longshore export reads longshore's checkpoints, and longshore import-deepspeed DeepSpeed's",
        "utils.zero_to_fp32.get_model_state_file utils.zero_to_fp32.get_optim_files",
    ),
    "utils.timer": "use time.perf_counter(), or longshore.trace(engine), which also says what training waited for",
    "zero.TiledLinear": "split the layer in the model",
    "zero.register_external_parameter": "leave it out where the parameter's module runs in the same block; else name "
    "the module that holds both in longshore.wrap_policy of the file",
    "zero.unwrap_model_for_generation": "use zero.GatheredParameters(model.parameters())",
}
"""What to use instead, by the name after ``deepspeed.``; an entry also covers the names below it."""
UNUSABLE = {
    "compression": "",
    "compression.compress": "init_compression redundancy_clean",
    "moe": "",
    "moe.layer": "MoE",
    "moe.utils": "has_moe_layers is_moe_param is_moe_param_group split_params_grads_into_shared_and_expert_params "
    "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params",
    "ops.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    "pipe": "LayerSpec PipelineModule TiedLayerSpec",
    "profiling": "",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "runtime.data_pipeline": "",
    "runtime.data_pipeline.data_routing": "",
    "runtime.data_pipeline.data_routing.helper": "convert_to_random_ltd remove_random_ltd_state_dict "
    "save_without_random_ltd",
    "runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_cold "
    "estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_cold "
    "estimate_zero2_model_states_mem_needs_all_live",
}
"""Modules that scripts import at their beginning, whether they use them or not, such as DeepSpeed's examples with
options. They can be imported, with these names, and using one of the names is an error with what to use instead."""
_SAME = {"runtime.zero.": "zero.", "runtime.zero.partition_parameters.": "zero."}
_ELSE = (
    "longshore does not stand in for it (docs/from_deepspeed.md lists what there is); leave it out, or run the script "
    "with DeepSpeed itself"
)


def advice(name: str) -> str:
    """Return advice on a replacement of ``deepspeed.<name>``."""
    names = [name, *(name.replace(prefix, same, 1) for prefix, same in _SAME.items() if name.startswith(prefix))]
    for each in names:
        parts = each.split(".")
        for count in range(len(parts), 0, -1):
            found = REFUSED.get(".".join(parts[:count]))
            if found is not None:
                return found
    return _ELSE


def attribute_error(path: str, name: str) -> AttributeError:
    """Return the error for a name that ``deepspeed.<path>`` does not have here; ``hasattr`` is then false."""
    return AttributeError(message(f"{path}.{name}" if path else name), name=name)


def message(name: str) -> str:
    """Return the error's text for ``deepspeed.<name>``, with its replacement."""
    return f"longshore has no {NAME}.{name}: {advice(name)}"


class _Unusable(type):
    """The class of the names in :data:`UNUSABLE`. Nothing is an instance of them, which is what ``isinstance`` says."""

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> _Unusable:
        if bases:
            raise _refused(bases[0])
        return super().__new__(cls, name, bases, content)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise _refused(cls)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise attribute_error(f"{cls.__module__.removeprefix(f'{NAME}.')}.{cls.__name__}", name)


def _refused(kind: type) -> LongshoreError:
    return LongshoreError(message(f"{kind.__module__.removeprefix(f'{NAME}.')}.{kind.__name__}"))


def unusable(module: str) -> dict[str, Any]:
    """Return the names in the ``module`` of :data:`UNUSABLE`."""
    return {name: _Unusable(name, (), {"__module__": f"{NAME}.{module}"}) for name in UNUSABLE[module].split()}
