"""Rows: batch, precision, gradients, optimizer, schedule and activation checkpointing."""

from __future__ import annotations

from longshore.engine.config.keys import Key, accepted, honoured, refused
from longshore.engine.config.model import CPU_SET
from longshore.engine.config.optimizers import OPTIMIZER_TYPE, OPTIMIZERS, kind_of_option, optimizers_with
from longshore.engine.config.schedulers import MOMENTUM, SCHEDULER_TYPE, WARMUP_TYPE
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BETAS,
    BOOLEAN,
    DTYPE,
    LOW_DTYPE,
    NOT_NEGATIVE,
    PER_GROUP,
    POSITIVE,
    SCALE_POWER,
    SPECULATION_MEMORY,
    TEXT,
    WRAP_POLICY,
    Choice,
    Integer,
    Items,
)

TRANSLATION = "tests/engine/config/test_translate.py::"
_BATCH = "tests/engine/test_windows.py::"
_PRECISION = "tests/engine/test_precision.py::"
_BY_NAME = "tests/engine/test_optimizers_by_name.py::"
_REDUCTION = "tests/engine/test_reduction.py::"
_SCHEDULES = "tests/engine/test_schedules_by_name.py::"

# fmt: off
# One row is one key; the formatter would make ten lines of it.

_DERIVED = "The train batch is micro batch x accumulation steps x ranks; whichever is left out follows from the others."

BATCH: tuple[Key, ...] = (
    honoured("", "train_batch_size", AT_LEAST_1, f"Samples a step. {_DERIVED}",
             f"{_BATCH}test_batch_numbers", "train_batch_size", absent_when_auto=True),
    honoured("", "train_micro_batch_size_per_gpu", AT_LEAST_1, f"Samples a backward on one rank. {_DERIVED}",
             f"{_BATCH}test_batch_numbers", "micro_batch_size", absent_when_auto=True),
    honoured("", "gradient_accumulation_steps", AT_LEAST_1, f"Backwards a step. {_DERIVED}",
             f"{_BATCH}test_gradient_accumulation_steps", "gradient_accumulation_steps", absent_when_auto=True),
    refused("", "managed_gradient_accumulation", BOOLEAN, (True,),
            "leave it out and set gradient_accumulation_steps to 1: every step() then applies all backwards before it"),
    honoured("", "dataloader_drop_last", BOOLEAN, "The loader leaves out the last batch if it is not full.",
             "tests/engine/test_initialize.py::test_drop_last", "drop_last"),
)

GRADIENTS: tuple[Key, ...] = (
    honoured("", "gradient_clipping", NOT_NEGATIVE,
             "The largest global L2 norm; 0 for none. Left out it means 1.0, as it does in DeepSpeed, and a note says "
             "so. (In `longshore.Config` absent means none.)", "tests/engine/test_clipping.py::test_coefficient",
             null="null could mean none or the default; write 0 for no clipping, or 1.0"),
    honoured("", "prescale_gradients", BOOLEAN, "Divide gradients by the ranks before they are summed, not after.",
             f"{_REDUCTION}test_prescale_gradients", "prescale_gradients"),
    honoured("", "gradient_predivide_factor", POSITIVE,
             "Divide gradients by it before they are summed, and by ranks / factor after.",
             f"{_REDUCTION}test_gradient_predivide_factor", "gradient_predivide_factor"),
    refused("", "gradient_allreduce_op", Choice(("mean", "sum")), ("mean",),
            "gradients are averaged over ranks; for their sum multiply the loss by the number of ranks"),
    honoured("", "communication_data_type", DTYPE,
             "Dtype of gradients on the wire. Left out: their own, summed in float32.",
             f"{_REDUCTION}test_communication_dtype", "communication_dtype", absent_when_auto=True),
    refused("", "sparse_gradients", BOOLEAN, (False,), "make the embedding with sparse=False; gradients are dense"),
    honoured("", "fp32_allreduce", BOOLEAN, "An old name: true is communication_data_type fp32.",
             f"{TRANSLATION}test_old_names", renamed="communication_data_type", values=((True, "fp32"), (False, None))),
    honoured("data_types", "grad_accum_dtype", DTYPE,
             "Dtype in which several ranks add backwards on the device before they reduce (stages 0 and 1). What is "
             "added on the host is added in fp32. Left out: fp32, which is safe.",
             f"{_REDUCTION}test_accumulation_dtype", "accumulation_dtype", absent_when_auto=True),
    honoured("data_types", "param_dtype", DTYPE, "Must agree with fp16 and bf16; it is compared, and changes nothing.",
             f"{TRANSLATION}test_param_dtype_agrees", absent_when_auto=True),
    refused("data_types", "buffer_dtype", DTYPE, (),
            "buffers keep the dtype that they have; cast them in the model, and leave this out"),
    accepted("data_types", "keep_in_fp32_modules", Items(TEXT),
             "It protects buffers from being cast, and longshore casts no buffer."),
)

_SCALED = "Read when fp16 is enabled."

PRECISION: tuple[Key, ...] = (
    honoured("fp16", "enabled", BOOLEAN, "Parameters are cast to fp16; masters are fp32, and the loss is scaled.",
             f"{_PRECISION}test_fp16"),
    honoured("fp16", "auto_cast", BOOLEAN, f"Floating inputs of forward are cast to fp16. {_SCALED}",
             f"{_PRECISION}test_cast_inputs"),
    honoured("fp16", "loss_scale", NOT_NEGATIVE, f"The static loss scale; 0: dynamic. {_SCALED}",
             f"{_PRECISION}test_static_loss_scale", absent_when_auto=True),
    honoured("fp16", "initial_scale_power", SCALE_POWER, f"The first dynamic scale is two to this power. {_SCALED}",
             f"{_PRECISION}test_dynamic_loss_scale", absent_when_auto=True),
    honoured("fp16", "loss_scale_window", AT_LEAST_1, f"Good steps before the scale doubles. {_SCALED}",
             f"{_PRECISION}test_dynamic_loss_scale", absent_when_auto=True),
    honoured("fp16", "hysteresis", AT_LEAST_1, f"Overflows that are borne before the scale halves. {_SCALED}",
             f"{_PRECISION}test_dynamic_loss_scale", absent_when_auto=True),
    honoured("fp16", "consecutive_hysteresis", BOOLEAN, f"A good step refills the hysteresis. {_SCALED}",
             f"{_PRECISION}test_dynamic_loss_scale", absent_when_auto=True),
    honoured("fp16", "min_loss_scale", POSITIVE, f"The scale never falls below. {_SCALED}",
             f"{_PRECISION}test_dynamic_loss_scale", absent_when_auto=True),
    refused("fp16", "fp16_master_weights_and_grads", BOOLEAN, (False,), "masters are float32 always; leave it out"),
    honoured("bf16", "enabled", BOOLEAN, "Parameters are cast to bf16; masters are fp32.", f"{_PRECISION}test_bf16"),
    accepted("bf16", "immediate_grad_update", BOOLEAN,
             "It says when gradients are copied, not what is added; every arrival is added as it comes."),
    honoured("bf16", "check_grad_overflow", BOOLEAN,
             "true: a step whose gradients are not finite is skipped (a static loss scale of 1). Left out or false: "
             "NaN and infinity are applied as torch applies them; DeepSpeed's default is true, so a note says so.",
             f"{_PRECISION}test_bf16_overflow_check"),
    honoured("bf16", "check_overflow", BOOLEAN, "An old name of check_grad_overflow.", f"{TRANSLATION}test_old_names",
             renamed="bf16.check_grad_overflow"),
    refused("bf16", "bf16_master_weights_and_grads", BOOLEAN, (False,), "masters are float32 always; leave it out"),
    refused("bf16", "bf16_optimizer_states", BOOLEAN, (False,), "moments are float32 always; leave it out"),
    honoured("torch_autocast", "enabled", BOOLEAN, "`torch.autocast` around forward.", f"{_PRECISION}test_autocast"),
    honoured("torch_autocast", "dtype", LOW_DTYPE,
             "Its dtype; needed when enabled, since torch's own default depends on the device. fp16 is scaled "
             "dynamically, with the window (2000) and hysteresis (1) of torch's scaler.", f"{_PRECISION}test_autocast"),
    accepted("torch_autocast", "lower_precision_safe_modules", Items(TEXT),
             "It picks gradients that DeepSpeed rounds on the wire; here none is, unless communication_data_type says "
             "so."),
)

_DEFAULT = "Left out it is"
_ADAM = optimizers_with("bias_correction")
_P = "optimizer.params"
_PARAMS = f"{_BY_NAME}test_params"
_FLAG = "How torch computes a step, not what; longshore always runs its own kernel."

_OPTIMIZER: tuple[Key, ...] = (
    honoured("optimizer", "type", OPTIMIZER_TYPE, "In any case. Adam means AdamW unless adam_w_mode is false.",
             f"{_BY_NAME}test_types"),
    accepted("optimizer", "legacy_fusion", BOOLEAN, "How DeepSpeed fuses fp16 steps; longshore has one kernel."),
    honoured(_P, "lr", NOT_NEGATIVE, f"Learning rate. {_DEFAULT} 0.001, for Adagrad 0.01.", _PARAMS),
    honoured(_P, "betas", BETAS, f"Decay rates of the moments. {_DEFAULT} 0.9 and 0.999.", _PARAMS,
             of=optimizers_with("betas")),
    honoured(_P, "eps", NOT_NEGATIVE, f"Added to the denominator. {_DEFAULT} 1e-8, for Adagrad 1e-10.", _PARAMS,
             of=optimizers_with("eps")),
    honoured(_P, "weight_decay", NOT_NEGATIVE,
             f"{_DEFAULT} 0, for AdamW too (DeepSpeed's default; torch's 0.01 with torch_adam).", _PARAMS),
    honoured(_P, "bias_correction", BOOLEAN, f"{_DEFAULT} true.", f"{_BY_NAME}test_bias_correction", of=_ADAM),
    honoured(_P, "adam_w_mode", BOOLEAN, f"false makes type Adam plain Adam; type AdamW stays AdamW. {_DEFAULT} true.",
             f"{TRANSLATION}test_adam_w_mode", of=_ADAM),
    honoured(_P, "torch_adam", BOOLEAN,
             "The same numbers by the same kernel; only the default of weight_decay is torch's then.",
             f"{TRANSLATION}test_torch_adam", of=_ADAM),
    honoured(_P, "maximize", BOOLEAN, "Ascend instead.", _PARAMS),
    honoured(_P, "lr_decay", NOT_NEGATIVE, f"{_DEFAULT} 0.", _PARAMS, of=optimizers_with("lr_decay")),
    honoured(_P, "momentum", NOT_NEGATIVE, f"{_DEFAULT} 0.", _PARAMS, of=optimizers_with("momentum")),
    honoured(_P, "dampening", kind_of_option("SGD", "dampening"), f"{_DEFAULT} 0.", _PARAMS,
             of=optimizers_with("dampening")),
    honoured(_P, "nesterov", BOOLEAN, f"{_DEFAULT} false.", _PARAMS, of=optimizers_with("nesterov")),
    accepted(_P, "fused", BOOLEAN, _FLAG),
    accepted(_P, "foreach", BOOLEAN, _FLAG),
    accepted(_P, "set_grad_none", BOOLEAN, "What zero_grad() leaves in .grad; the weights are the same.", of=_ADAM),
    refused(_P, "amsgrad", BOOLEAN, (False,), "the maximum of second moments is not kept; leave amsgrad out",
            of=(*_ADAM, "Adagrad")),
    refused(_P, "capturable", BOOLEAN, (False,), "a host step cannot be captured in a CUDA graph; leave it out"),
    refused(_P, "differentiable", BOOLEAN, (False,), "autograd cannot see a host step; leave it out"),
    refused(_P, "fp32_optimizer_states", BOOLEAN, (True,), "moments are float32 always; leave it out"),
    refused(_P, "initial_accumulator_value", NOT_NEGATIVE, (0.0,), "the sum starts at 0; leave it out",
            of=("Adagrad",)),
    refused(_P, "max_grad_norm", NOT_NEGATIVE, (0.0,), "set gradient_clipping, at the top of the file, instead"),
    accepted("", "zero_allow_untested_optimizer", BOOLEAN,
             "longshore decides by the optimizer: what it cannot step exactly it refuses by name."),
    accepted("", "zero_force_ds_cpu_optimizer", BOOLEAN, "offload_optimizer alone says where a step runs."),
)

OPTIMIZER: tuple[Key, ...] = (
    *_OPTIMIZER,
    # Options of rules that brought a name of their own.
    *(honoured(_P, option, kind_of_option(name, option), "An option of the optimizer.", _PARAMS,
               of=optimizers_with(option))
      for name, model in OPTIMIZERS.items() for option in model.model_fields
      if option != "type" and not {key.name for key in _OPTIMIZER} & {option}),
)

_S = "scheduler.params"
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_LINEAR = ("WarmupLR", "WarmupDecayLR")
_CYCLE = ("OneCycle",)
_RANGE = ("LRRangeTest",)

SCHEDULER: tuple[Key, ...] = (
    honoured("scheduler", "type", SCHEDULER_TYPE, "The schedule, in any case.", f"{_SCHEDULES}test_types"),
    honoured(_S, "warmup_min_lr", PER_GROUP, f"{_DEFAULT} 0.", f"{_SCHEDULES}test_warmup", of=_LINEAR),
    honoured(_S, "warmup_max_lr", PER_GROUP, f"{_DEFAULT} the group's own (WarmupLR) or 0.001 (WarmupDecayLR).",
             f"{_SCHEDULES}test_warmup", of=_LINEAR,
             null="null means the default in one schedule and the group's own in the other; give a number, or leave it "
             "out"),
    honoured(_S, "warmup_num_steps", AT_LEAST_1, f"{_DEFAULT} 1000.", f"{_SCHEDULES}test_warmup", of=_WARMUPS),
    honoured(_S, "warmup_type", WARMUP_TYPE, f"{_DEFAULT} log.", f"{_SCHEDULES}test_warmup", of=_WARMUPS),
    honoured(_S, "total_num_steps", AT_LEAST_1, "Must be given.", f"{_SCHEDULES}test_warmup_and_decay",
             of=_WARMUPS[1:]),
    honoured(_S, "warmup_min_ratio", NOT_NEGATIVE, f"{_DEFAULT} 0.", f"{_SCHEDULES}test_cosine", of=_WARMUPS[2:]),
    honoured(_S, "cos_min_ratio", NOT_NEGATIVE, f"{_DEFAULT} 0.0001.", f"{_SCHEDULES}test_cosine", of=_WARMUPS[2:]),
    *(
        honoured(_S, name, kind, what, f"{_SCHEDULES}{test}", of=_CYCLE)
        for test, keys in (
            ("test_one_cycle", (
                ("cycle_min_lr", PER_GROUP, "Must be given."),
                ("cycle_max_lr", PER_GROUP, "Must be given."),
                ("decay_lr_rate", NOT_NEGATIVE, f"{_DEFAULT} 0. Above 0 it needs decay_step_size."),
                ("cycle_first_step_size", AT_LEAST_1, f"{_DEFAULT} 2000."),
                ("cycle_second_step_size", AT_LEAST_0, f"{_DEFAULT} the first."),
                ("decay_step_size", AT_LEAST_0, f"{_DEFAULT} 0."),
                ("cycle_min_mom", MOMENTUM, f"{_DEFAULT} 0.8."),
                ("cycle_max_mom", MOMENTUM, f"{_DEFAULT} 0.9."),
                ("decay_mom_rate", NOT_NEGATIVE, f"{_DEFAULT} 0. Above 0 it needs decay_step_size."),
            )),
            ("test_one_cycle_in_stairs", (
                ("cycle_first_stair_count", AT_LEAST_0, f"{_DEFAULT} 0."),
                ("cycle_second_stair_count", AT_LEAST_0, f"{_DEFAULT} the first."),
                ("cycle_momentum", BOOLEAN, f"{_DEFAULT} true."),
            )),
        )
        for name, kind, what in keys
    ),
    *(
        honoured(_S, name, kind, f"{_DEFAULT} {default}.", f"{_SCHEDULES}test_range_test", of=_RANGE)
        for name, kind, default in (
            ("lr_range_test_min_lr", PER_GROUP, "0.001"),
            ("lr_range_test_step_size", AT_LEAST_1, "2000"),
            ("lr_range_test_step_rate", POSITIVE, "1"),
            ("lr_range_test_staircase", BOOLEAN, "false"),
        )
    ),
    refused(_S, "last_batch_iteration", Integer(-1), (-1,),
            "a schedule starts at its beginning; load its state to go on from a checkpoint"),
)

_A = "activation_checkpointing"

ACTIVATIONS: tuple[Key, ...] = (
    honoured(_A, "cpu_checkpointing", BOOLEAN, "`longshore.checkpointing` keeps saved activations in host memory.",
             "tests/engine/test_initialize.py::test_cpu_checkpointing", "cpu_checkpointing"),
    accepted(_A, "partition_activations", BOOLEAN,
             "It splits saved activations over model-parallel ranks; there is no model parallelism, so one part."),
    accepted(_A, "contiguous_memory_optimization", BOOLEAN, "Where saved activations lie, not what they are."),
    accepted(_A, "number_checkpoints", AT_LEAST_0, "Sizes the buffer of contiguous_memory_optimization."),
    accepted(_A, "synchronize_checkpoint_boundary", BOOLEAN, "A wait for the device; streams are ordered without it."),
    refused(_A, "profile", BOOLEAN, (False,), "no times are printed for checkpoints; use torch.profiler"),
)

_L = "longshore"
_HOST = "tests/engine/test_initialize.py::test_host_settings"

HOST: tuple[Key, ...] = (
    honoured(_L, "tile_numel", AT_LEAST_1,
             "Elements that are copied and stepped at a time. Left out it is 4194304, or 16777216 where nothing moves.",
             _HOST, "tile_numel"),
    honoured(_L, "threads", AT_LEAST_1,
             "Host threads that step. Left out the ranks of a machine share its usable CPUs, a thread for each.",
             _HOST, "threads"),
    honoured(_L, "cpu_set", CPU_SET, "Logical CPUs of those threads. Left out it is any.", _HOST, "cpu_set"),
    honoured(_L, "speculation_memory", SPECULATION_MEMORY,
             "Host memory for stepping while backward runs; as a share, 1 is a spare for every tile "
             "(docs/stepping_ahead.md). Left out it is auto with super_offload and 0, none, without.",
             "tests/engine/test_speculation.py::test_the_setting_of_the_file", "speculation_memory", takes_auto=True),
    honoured(_L, "wrap_policy", WRAP_POLICY,
             "At stage 3, the modules that are gathered as a whole: auto (the transformer blocks), a list of classes, "
             "or a number: modules with at least so many elements. Left out it is auto.",
             "tests/engine/test_fully_sharded.py::test_wrap_policy", "wrap_policy", takes_auto=True),
)
