"""What DeepSpeed has and longshore has not: named in the error, with what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HERE = "longshore.compat.deepspeed"
NAME = "deepspeed"

_DATA_PARALLEL = "longshore shards over data-parallel ranks only"
_PIPELINE = f"{_DATA_PARALLEL}, and has no pipelines; give the whole model to initialize()"
_EXPERTS = f"{_DATA_PARALLEL}, and has no expert parallelism; a mixture of experts trains as any other model"
_INFERENCE = "longshore trains; for inference call the model under torch.no_grad(), or use an inference server"
_KERNELS = "use torch.nn and torch.nn.functional; the optimizer's kernels come compiled with longshore"
_OWN_BITS = "longshore does not quantize or compress"
_FIGURES = "write figures with the logger of your choice after engine.step()"
_PROFILING = "use torch.utils.flop_counter, torch.profiler, or longshore.trace(engine)"
_LOCAL = "use the safe_*_full_* functions, which give and take whole tensors at every stage"
_LAMB = "LAMB and 1-bit optimizers look at more than one element at a time; use AdamW"
_TIMERS = "use time.perf_counter(), or longshore.trace(engine), which also says what training waited for"
_STREAMS = "use torch.cuda's in your script; longshore names none outside of its transfers"

INSTEAD = {
    "DeepSpeedConfig": "use longshore.Config, or give the file or the dictionary to initialize()",
    "DeepSpeedHybridEngine": "generate with engine.module",
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "InferenceEngine": _INFERENCE,
    "OnDevice": 'use torch.device("meta") as a context, or zero.Init',
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "autotuning": "choose batch and bucket sizes yourself",
    "checkpoint": "longshore export, inspect and import-deepspeed read checkpoints",
    "comm.configure": _PROFILING,
    "comm.log_summary": _PROFILING,
    "compression": _OWN_BITS,
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "launcher": "start ranks with torchrun: torchrun --nproc-per-node=N -m longshore run-deepspeed SCRIPT",
    "linear": _OWN_BITS,
    "model_implementations": _INFERENCE,
    "module_inject": _INFERENCE,
    "moe": _EXPERTS,
    "monitor": _FIGURES,
    "nebula": "save with engine.save_checkpoint(async_save=True)",
    "ops.adam.ZenFlowCPUAdam": "stale updates change results; use super_offload, which does not",
    "ops.aio": "there is no NVMe offload; use offload_optimizer.device cpu",
    "ops.lamb": _LAMB,
    "ops.op_builder": _KERNELS,
    "ops.sparse_attention": "use torch's flex_attention",
    "ops.transformer": _KERNELS,
    "pipe": _PIPELINE,
    "profiling": _PROFILING,
    "replace_transformer_layer": _INFERENCE,
    "runtime.config.DeepSpeedConfig": "use longshore.Config, or give the file or the dictionary to initialize()",
    "runtime.data_pipeline": "order the samples in your loader",
    "runtime.fp16": f"fp16 belongs in the configuration. {_LAMB}",
    "runtime.hybrid_engine": "generate with engine.module",
    "runtime.pipe": _PIPELINE,
    "runtime.quantize": _OWN_BITS,
    "runtime.swap_tensor": "there is no NVMe offload; use offload_optimizer.device cpu",
    "runtime.zenflow": "stale updates change results; use super_offload, which does not",
    "runtime.zero.stage3": "optimizers are made by initialize()",
    "runtime.zero.stage_1_and_2": "optimizers are made by initialize()",
    "runtime.zero.partition_parameters.ZeroParamStatus": "parameters at stage 3 are DTensors; torch's "
    "isinstance(param, torch.distributed.tensor.DTensor) tells",
    "sequence": f"{_DATA_PARALLEL}; use torch's context parallelism in the model",
    "tp_model_init": f"{_DATA_PARALLEL}; apply torch's parallelize_module and fully_shard before initialize()",
    "utils.OnDevice": 'use torch.device("meta") as a context, or zero.Init',
    "utils.instrument_w_nvtx": "use torch.cuda.nvtx.range",
    "utils.nvtx": "use torch.cuda.nvtx.range",
    "utils.safe_get_local_fp32_param": _LOCAL,
    "utils.safe_get_local_grad": _LOCAL,
    "utils.safe_get_local_optimizer_state": _LOCAL,
    "utils.safe_set_local_fp32_param": _LOCAL,
    "utils.safe_set_local_grad": _LOCAL,
    "utils.safe_set_local_optimizer_state": _LOCAL,
    "utils.timer": _TIMERS,
    "zero.TiledLinear": "split the layer in the model",
    "zero.register_external_parameter": "leave it out where the parameter's module runs in the same block; else name "
    "the module that holds both in longshore.wrap_policy of the file",
    "zero.unwrap_model_for_generation": "use zero.GatheredParameters(model.parameters())",
    "accelerator.Stream": _STREAMS,
    "accelerator.Event": _STREAMS,
    "accelerator.stream": _STREAMS,
    "accelerator.current_stream": _STREAMS,
    "accelerator.default_stream": _STREAMS,
}
"""By the name after ``deepspeed.``; what begins with a name and a dot is meant as well."""
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
            found = INSTEAD.get(".".join(parts[:count]))
            if found is not None:
                return found
    return _ELSE


def their_name(module: str) -> str:
    """``longshore.compat.deepspeed.comm`` -> ``deepspeed.comm``."""
    return NAME + module.removeprefix(HERE)


def attribute_error(module: str, name: str) -> AttributeError:
    """For a name that a module of ours has not: ``hasattr`` is false, and ``import`` says the same words."""
    theirs = their_name(module)
    what = f"{theirs}.{name}".removeprefix(f"{NAME}.")
    return AttributeError(f"longshore has no {theirs}.{name}: {advice(what)}", name=name)


def getter(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``."""

    def missing(name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        raise attribute_error(module, name)

    return missing
