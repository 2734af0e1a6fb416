"""Rows: batch, precision, gradients, optimizer, schedule and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic.fields import FieldInfo

from longshore.engine.config.keys import Key, accepted, honoured, refused
from longshore.engine.config.model import CPU_SET
from longshore.engine.config.optimizers import OPTIMIZER_TYPE, OPTIMIZERS, kind_of_option, optimizers_with
from longshore.engine.config.schedulers import SCHEDULER_TYPE, SCHEDULERS
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BETAS,
    BOOLEAN,
    DTYPE,
    LOSS_SCALE,
    LOW_DTYPE,
    NOT_NEGATIVE,
    POSITIVE,
    SCALE_POWER,
    SPECULATION_MEMORY,
    STATIC_SCALE,
    TEXT,
    WRAP_POLICY,
    Integer,
    Items,
    OneOf,
    kind_of,
)

# fmt: off
# One row is one key; the formatter would make ten lines of it.

_DERIVED = "The train batch is micro batch x accumulation steps x ranks; one that is left out follows from the others."

BATCH: tuple[Key, ...] = (
    honoured("", "train_batch_size", AT_LEAST_1, f"Samples a step. {_DERIVED}", "train_batch_size",
             absent_when_auto=True),
    honoured("", "train_micro_batch_size_per_gpu", AT_LEAST_1, f"Samples a backward on one rank. {_DERIVED}",
             "micro_batch_size", absent_when_auto=True),
    honoured("", "gradient_accumulation_steps", AT_LEAST_1, f"Backwards a step. {_DERIVED}",
             "gradient_accumulation_steps", absent_when_auto=True),
    refused("", "managed_gradient_accumulation", BOOLEAN, (True,),
            "leave it out and set gradient_accumulation_steps to 1: every step() then applies all backwards before it"),
    honoured("", "dataloader_drop_last", BOOLEAN, "The loader leaves out the last batch if it is not full.",
             "drop_last"),
)

GRADIENTS: tuple[Key, ...] = (
    honoured("", "gradient_clipping", NOT_NEGATIVE,
             "The largest global L2 norm; 0: no clipping. Default: 1.0, as in DeepSpeed, and a note says so. (The "
             "default of `longshore.Config` is no clipping.)",
             null="null could mean none or the default; write 0 for no clipping, or 1.0"),
    honoured("", "prescale_gradients", BOOLEAN, "Divide gradients by the ranks before they are summed, not after.",
             "prescale_gradients"),
    honoured("", "gradient_predivide_factor", POSITIVE,
             "Divide gradients by it before they are summed, and by ranks / factor after.",
             "gradient_predivide_factor"),
    refused("", "gradient_allreduce_op", OneOf(("mean", "sum")), ("mean",),
            "gradients are averaged over ranks; for their sum multiply the loss by the number of ranks"),
    honoured("", "communication_data_type", DTYPE,
             "Dtype in which gradients are sent. Default: their own, summed in float32.", "communication_dtype",
             absent_when_auto=True),
    refused("", "sparse_gradients", BOOLEAN, (False,), "make the embedding with sparse=False; gradients are dense"),
    honoured("", "fp32_allreduce", BOOLEAN, "Old name: true means communication_data_type fp32.",
             renamed="communication_data_type", values=((True, "fp32"), (False, None))),
    honoured("data_types", "grad_accum_dtype", DTYPE,
             "Dtype in which several ranks add backwards on the device before they reduce (stages 0 and 1). The "
             "host always adds in fp32. Default: fp32.", "accumulation_dtype",
             absent_when_auto=True),
    honoured("data_types", "param_dtype",
             DTYPE, "Must agree with fp16 and bf16; it is compared only.", absent_when_auto=True),
    refused("data_types", "buffer_dtype", DTYPE, (),
            "buffers keep the dtype that they have; cast them in the model, and leave this out"),
    accepted("data_types", "keep_in_fp32_modules", Items(TEXT),
             "It keeps buffers from being cast, and longshore never casts buffers."),
)

_SCALED = "Read if fp16 is enabled."

PRECISION: tuple[Key, ...] = (
    honoured("fp16", "enabled", BOOLEAN, "Parameters are cast to fp16; masters are fp32, and the loss is scaled."),
    honoured("fp16", "auto_cast", BOOLEAN, f"Floating inputs of forward are cast to fp16. {_SCALED}"),
    honoured("fp16", "loss_scale", STATIC_SCALE, f"The static loss scale; 0: dynamic. {_SCALED}",
             absent_when_auto=True),
    honoured("fp16", "initial_scale_power", SCALE_POWER, f"The first dynamic scale is two to this power. {_SCALED}",
             absent_when_auto=True),
    honoured("fp16", "loss_scale_window", AT_LEAST_1, f"Good steps before the scale doubles. {_SCALED}",
             absent_when_auto=True),
    honoured("fp16", "hysteresis", AT_LEAST_1, f"Overflows that are borne before the scale halves. {_SCALED}",
             absent_when_auto=True),
    honoured("fp16", "consecutive_hysteresis", BOOLEAN, f"A good step refills the hysteresis. {_SCALED}",
             absent_when_auto=True),
    honoured("fp16", "min_loss_scale", LOSS_SCALE, f"The scale never falls below. {_SCALED}", absent_when_auto=True),
    refused("fp16", "fp16_master_weights_and_grads", BOOLEAN, (False,), "masters are float32 always; leave it out"),
    honoured("bf16", "enabled", BOOLEAN, "Parameters are cast to bf16; masters are fp32."),
    accepted("bf16", "immediate_grad_update", BOOLEAN,
             "It sets when gradients are copied, not their sum."),
    honoured("bf16", "check_grad_overflow", BOOLEAN,
             "true: a step whose gradients are not finite is skipped (a static loss scale of 1). Default: false, "
             "NaN and infinity are applied as torch does; DeepSpeed's default is true, so a note says so."),
    honoured("bf16", "check_overflow", BOOLEAN, "Old name of check_grad_overflow.",
             renamed="bf16.check_grad_overflow"),
    refused("bf16", "bf16_master_weights_and_grads", BOOLEAN, (False,), "masters are float32 always; leave it out"),
    refused("bf16", "bf16_optimizer_states", BOOLEAN, (False,), "moments are float32 always; leave it out"),
    honoured("torch_autocast", "enabled", BOOLEAN, "`torch.autocast` around forward."),
    honoured("torch_autocast", "dtype", LOW_DTYPE,
             "Its dtype; needed when enabled, since torch's own default depends on the device. fp16 is scaled "
             "dynamically, with the window (2000) and hysteresis (1) of torch's scaler."),
    accepted("torch_autocast", "lower_precision_safe_modules", Items(TEXT),
             "It chooses gradients that DeepSpeed rounds when it sends them; longshore rounds none, unless "
             "communication_data_type is set."),
)

_DEFAULT = "Default:"
_ADAM = optimizers_with("bias_correction")
_P = "optimizer.params"
_FLAG = "It chooses an implementation in torch; longshore always runs its own kernel."

_OPTIMIZER: tuple[Key, ...] = (
    honoured("optimizer", "type", OPTIMIZER_TYPE, "In any case. Adam means AdamW unless adam_w_mode is false."),
    accepted("optimizer", "legacy_fusion", BOOLEAN, "It chooses one of DeepSpeed's kernels; longshore has one."),
    honoured(_P, "lr", NOT_NEGATIVE, f"Learning rate. {_DEFAULT} 0.001, for Adagrad 0.01."),
    honoured(_P, "betas", BETAS, f"Decay rates of the moments. {_DEFAULT} 0.9 and 0.999.",
             of=optimizers_with("betas")),
    honoured(_P, "eps", NOT_NEGATIVE, f"Added to the denominator. {_DEFAULT} 1e-8, for Adagrad 1e-10.",
             of=optimizers_with("eps")),
    honoured(_P, "weight_decay", NOT_NEGATIVE,
             f"{_DEFAULT} 0, for AdamW too (DeepSpeed's default; torch's 0.01 with torch_adam)."),
    honoured(_P, "bias_correction", BOOLEAN, f"{_DEFAULT} true.", of=_ADAM),
    honoured(_P, "adam_w_mode",
             BOOLEAN, f"false makes type Adam plain Adam; type AdamW stays AdamW. {_DEFAULT} true.", of=_ADAM),
    honoured(_P, "torch_adam", BOOLEAN,
             "The same numbers by the same kernel; only the default of weight_decay is torch's then.", of=_ADAM),
    honoured(_P, "maximize", BOOLEAN, "Ascend instead."),
    honoured(_P, "lr_decay", NOT_NEGATIVE, f"{_DEFAULT} 0.", of=optimizers_with("lr_decay")),
    honoured(_P, "momentum", NOT_NEGATIVE, f"{_DEFAULT} 0.", of=optimizers_with("momentum")),
    honoured(_P, "dampening", kind_of_option("SGD", "dampening"), f"{_DEFAULT} 0.",
             of=optimizers_with("dampening")),
    honoured(_P, "nesterov", BOOLEAN, f"{_DEFAULT} false.", of=optimizers_with("nesterov")),
    accepted(_P, "fused", BOOLEAN, _FLAG),
    accepted(_P, "foreach", BOOLEAN, _FLAG),
    accepted(_P, "set_grad_none", BOOLEAN, "It sets what zero_grad() leaves in .grad, not the weights.", of=_ADAM),
    refused(_P, "amsgrad", BOOLEAN, (False,), "the maximum of second moments is not kept; leave amsgrad out",
            of=(*_ADAM, "Adagrad")),
    refused(_P, "capturable", BOOLEAN, (False,), "a host step cannot be captured in a CUDA graph; leave it out"),
    refused(_P, "differentiable", BOOLEAN, (False,), "autograd cannot see a host step; leave it out"),
    refused(_P, "fp32_optimizer_states", BOOLEAN, (True,), "moments are float32 always; leave it out"),
    refused(_P, "initial_accumulator_value", NOT_NEGATIVE, (0.0,), "the sum starts at 0; leave it out",
            of=("Adagrad",)),
    refused(_P, "max_grad_norm", NOT_NEGATIVE, (0.0,), "set gradient_clipping, at the top of the file, instead"),
    accepted("", "zero_allow_untested_optimizer", BOOLEAN,
             "longshore refuses, by name, each optimizer that it cannot step exactly."),
    accepted("", "zero_force_ds_cpu_optimizer", BOOLEAN, "offload_optimizer alone says where a step runs."),
)

OPTIMIZER: tuple[Key, ...] = (
    *_OPTIMIZER,
    # Options of rules that brought a name of their own.
    *(honoured(_P, option, kind_of_option(name, option), "An option of the optimizer.",
               of=optimizers_with(option))
      for name, model in OPTIMIZERS.items() for option in model.model_fields
      if option != "type" and not {key.name for key in _OPTIMIZER} & {option}),
)

_S = "scheduler.params"
_WITHOUT = {
    "warmup_max_lr": "the group's own",
    "cycle_second_step_size": "the first",
    "cycle_second_stair_count": "the first",
}
"""Meanings of the default None."""
_NEED_STEPS = ("decay_lr_rate", "decay_mom_rate")
_NO_NULL = {
    "warmup_max_lr": "null means the default in one schedule and the group's own in the other; give a number, or leave "
    "it out"
}


def _schedule_keys() -> Iterator[Key]:
    """The parameters of the schedules, as their classes have them."""
    fields: dict[str, dict[str, FieldInfo]] = {}
    for schedule, model in SCHEDULERS.items():
        for name, field in model.model_fields.items():
            if name != "type":
                fields.setdefault(name, {})[schedule] = field
    for name, by_schedule in fields.items():
        kind = kind_of(next(iter(by_schedule.values())).metadata)
        assert kind is not None, name
        what = _defaults(name, by_schedule)
        if name in _NEED_STEPS:
            what += " Other than 0 it needs decay_step_size."
        yield honoured(_S, name, kind, what, of=tuple(by_schedule), null=_NO_NULL.get(name, ""))


def _defaults(name: str, by_schedule: Mapping[str, FieldInfo]) -> str:
    if any(field.is_required() for field in by_schedule.values()):
        return "Must be given."
    said: dict[str, list[str]] = {}
    for schedule, field in by_schedule.items():
        default = field.default
        number = isinstance(default, float)
        words = _WITHOUT[name] if default is None else f"{default:g}" if number else str(default).lower()
        said.setdefault(words, []).append(schedule)
    if len(said) == 1:
        return f"{_DEFAULT} {next(iter(said))}."
    parts = [f"{words} ({', '.join(of)})" for words, of in said.items()]
    return f"{_DEFAULT} {' or '.join(parts)}."


SCHEDULER: tuple[Key, ...] = (
    honoured("scheduler", "type", SCHEDULER_TYPE, "The schedule, in any case."),
    *_schedule_keys(),
    refused(_S, "last_batch_iteration", Integer(-1), (-1,),
            "a schedule starts at its beginning; load its state to go on from a checkpoint"),
)

_A = "activation_checkpointing"

ACTIVATIONS: tuple[Key, ...] = (
    honoured(_A, "cpu_checkpointing", BOOLEAN, "`longshore.checkpointing` keeps saved activations in host memory.",
             "cpu_checkpointing"),
    accepted(_A, "partition_activations", BOOLEAN,
             "It splits saved activations over model-parallel ranks, which longshore does not have."),
    accepted(_A, "contiguous_memory_optimization", BOOLEAN, "It sets where saved activations lie, not their values."),
    accepted(_A, "number_checkpoints", AT_LEAST_0, "It sets the buffer size of contiguous_memory_optimization."),
    accepted(_A, "synchronize_checkpoint_boundary", BOOLEAN, "Streams are ordered without this wait."),
    refused(_A, "profile", BOOLEAN, (False,), "no times are printed for checkpoints; use torch.profiler"),
)

_L = "longshore"

HOST: tuple[Key, ...] = (
    honoured(_L, "tile_numel", AT_LEAST_1,
             "Elements that are copied and stepped at a time. Default: 4194304, or 16777216 if nothing is copied.",
             "tile_numel"),
    honoured(_L, "threads", AT_LEAST_1,
             "Host threads that step. Default: the ranks of a machine share its usable CPUs, a thread for each.",
             "threads"),
    honoured(_L, "cpu_set", CPU_SET, "Logical CPUs of those threads. Default: any.", "cpu_set"),
    honoured(_L, "speculation_memory", SPECULATION_MEMORY,
             "Host memory for stepping while backward runs; 100% is a spare for every tile (docs/stepping_ahead.md). "
             "Default: auto with super_offload, otherwise 0.", "speculation_memory", takes_auto=True),
    honoured(_L, "wrap_policy", WRAP_POLICY,
             "At stage 3, the modules that are gathered as a whole: auto (the transformer blocks), a list of classes, "
             "or a number: modules with at least so many elements. Default: auto.", "wrap_policy",
             takes_auto=True),
)
