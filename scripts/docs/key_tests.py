"""The test that shows each honoured key of a DeepSpeed file."""

from __future__ import annotations

_KEYS = {
    "tests/engine/test_windows.py::test_batch_numbers": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    "tests/engine/test_windows.py::test_gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "tests/engine/test_windows.py::test_every_step_applies_without_managed_accumulation": (
        "managed_gradient_accumulation",
    ),
    "tests/engine/test_initialize.py::test_drop_last": ("dataloader_drop_last",),
    "tests/engine/test_clipping.py::test_coefficient": ("gradient_clipping",),
    "tests/engine/test_reduction.py::test_prescale_gradients": ("prescale_gradients",),
    "tests/engine/test_reduction.py::test_gradient_predivide_factor": ("gradient_predivide_factor",),
    "tests/engine/test_reduction.py::test_communication_dtype": ("communication_data_type",),
    "tests/compat/config/test_translate.py::test_old_names": (
        "fp32_allreduce",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "allgather_size",
        "bf16.check_overflow",
    ),
    "tests/engine/test_reduction.py::test_accumulation_dtype": ("data_types.grad_accum_dtype",),
    "tests/compat/config/test_translate.py::test_param_dtype_agrees": ("data_types.param_dtype",),
    "tests/engine/test_reduction.py::test_stages": ("zero_optimization.stage",),
    "tests/engine/test_reduction.py::test_bucket_sizes": (
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
    ),
    "tests/engine/test_reduction.py::test_overlap_comm": ("zero_optimization.overlap_comm",),
    "tests/engine/test_reduction.py::test_offload": ("zero_optimization.offload_optimizer.device",),
    "tests/engine/test_on_device.py::test_one_rank_with_parameters_on_the_host": (
        "zero_optimization.offload_param.device",
    ),
    "tests/engine/test_split.py::test_ratio": ("zero_optimization.offload_optimizer.ratio",),
    "tests/engine/test_states_settings.py::test_formats_and_seeds_of_the_file": (
        "zero_optimization.offload_optimizer.states",
        "zero_optimization.offload_optimizer.states_seed",
    ),
    "tests/engine/test_states_settings.py::test_deepspeeds_keys_of_the_file": (
        "bf16.bf16_optimizer_states",
        "optimizer.params.fp32_optimizer_states",
    ),
    "tests/engine/test_speculation.py::test_super_offload": ("zero_optimization.offload_optimizer.super_offload",),
    "tests/engine/test_speculation.py::test_the_share_of_the_cpus": (
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    ),
    "tests/engine/test_precision.py::test_fp16": ("fp16.enabled",),
    "tests/engine/test_precision.py::test_cast_inputs": ("fp16.auto_cast",),
    "tests/engine/test_precision.py::test_static_loss_scale": ("fp16.loss_scale",),
    "tests/engine/test_precision.py::test_dynamic_loss_scale": (
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.consecutive_hysteresis",
        "fp16.min_loss_scale",
    ),
    "tests/engine/test_precision.py::test_bf16": ("bf16.enabled",),
    "tests/engine/test_precision.py::test_bf16_overflow_check": ("bf16.check_grad_overflow",),
    "tests/engine/test_precision.py::test_autocast": (
        "torch_autocast.enabled",
        "torch_autocast.dtype",
    ),
    "tests/engine/test_optimizers_by_name.py::test_types": ("optimizer.type",),
    "tests/engine/test_optimizers_by_name.py::test_params": (
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "optimizer.params.maximize",
        "optimizer.params.lr_decay",
        "optimizer.params.momentum",
        "optimizer.params.dampening",
        "optimizer.params.nesterov",
    ),
    "tests/engine/test_optimizers_by_name.py::test_bias_correction": ("optimizer.params.bias_correction",),
    "tests/engine/test_muon_config.py::test_options_are_those_of_the_optimizer": (
        "optimizer.params.ns_coefficients",
        "optimizer.params.ns_eps",
        "optimizer.params.ns_steps",
        "optimizer.params.adjust_lr_fn",
    ),
    "tests/engine/test_muon_config.py::test_rates_and_decays_of_both_kinds": (
        "optimizer.params.muon_lr",
        "optimizer.params.adam_lr",
        "optimizer.params.adam_weight_decay",
    ),
    "tests/engine/test_muon_config.py::test_as_muon_groups_divides": (
        "optimizer.params.split",
        "optimizer.params.others",
    ),
    "tests/engine/test_muon_config.py::test_the_default_method_of_deepspeed_is_worth_a_note": (
        "optimizer.params.ns_method",
    ),
    "tests/compat/config/test_translate.py::test_adam_w_mode": ("optimizer.params.adam_w_mode",),
    "tests/compat/config/test_translate.py::test_torch_adam": ("optimizer.params.torch_adam",),
    "tests/engine/test_schedules_by_name.py::test_types": ("scheduler.type",),
    "tests/engine/test_schedules_by_name.py::test_warmup": (
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warmup_type",
    ),
    "tests/engine/test_schedules_by_name.py::test_warmup_and_decay": ("scheduler.params.total_num_steps",),
    "tests/engine/test_schedules_by_name.py::test_cosine": (
        "scheduler.params.warmup_min_ratio",
        "scheduler.params.cos_min_ratio",
    ),
    "tests/engine/test_schedules_by_name.py::test_one_cycle": (
        "scheduler.params.cycle_min_lr",
        "scheduler.params.cycle_max_lr",
        "scheduler.params.decay_lr_rate",
        "scheduler.params.cycle_first_step_size",
        "scheduler.params.cycle_second_step_size",
        "scheduler.params.decay_step_size",
        "scheduler.params.cycle_min_mom",
        "scheduler.params.cycle_max_mom",
        "scheduler.params.decay_mom_rate",
    ),
    "tests/engine/test_schedules_by_name.py::test_one_cycle_in_stairs": (
        "scheduler.params.cycle_first_stair_count",
        "scheduler.params.cycle_second_stair_count",
        "scheduler.params.cycle_momentum",
    ),
    "tests/engine/test_schedules_by_name.py::test_range_test": (
        "scheduler.params.lr_range_test_min_lr",
        "scheduler.params.lr_range_test_step_size",
        "scheduler.params.lr_range_test_step_rate",
        "scheduler.params.lr_range_test_staircase",
    ),
    "tests/engine/test_initialize.py::test_cpu_checkpointing": ("activation_checkpointing.cpu_checkpointing",),
    "tests/compat/test_engine_calls.py::test_longshores_own_initialize_measures_it_where_it_is_asked_to": (
        "zero_optimization.compute_grad_norm",
    ),
    "tests/compat/test_integration_names.py::test_whether_weights_are_gathered_for_saving": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    ),
    "tests/engine/test_logging.py::test_steps_per_print": ("steps_per_print",),
    "tests/engine/test_logging.py::test_wall_clock_breakdown": ("wall_clock_breakdown",),
    "tests/engine/test_logging.py::test_dump_state": ("dump_state",),
    "tests/engine/test_monitoring.py::test_tensorboard": (
        "tensorboard.enabled",
        "tensorboard.output_path",
        "tensorboard.job_name",
    ),
    "tests/engine/test_monitoring.py::test_wandb": (
        "wandb.enabled",
        "wandb.project",
        "wandb.team",
        "wandb.group",
    ),
    "tests/engine/test_monitoring.py::test_csv_monitor": (
        "csv_monitor.enabled",
        "csv_monitor.output_path",
        "csv_monitor.job_name",
    ),
    "tests/engine/test_flops.py::test_what_is_listed": (
        "flops_profiler.enabled",
        "flops_profiler.profile_step",
        "flops_profiler.top_modules",
        "flops_profiler.module_depth",
        "flops_profiler.detailed",
        "flops_profiler.output_file",
    ),
    "tests/engine/test_initialize.py::test_host_settings": (
        "longshore.tile_numel",
        "longshore.threads",
        "longshore.cpu_set",
    ),
    "tests/engine/test_speculation.py::test_the_setting_of_the_file": ("longshore.speculation_memory",),
    "tests/engine/test_device_sums.py::test_the_setting_of_the_file": ("longshore.accumulate",),
    "tests/engine/test_fully_sharded.py::test_wrap_policy": ("longshore.wrap_policy",),
    "tests/compat/test_surface.py::test_leaves_are_gathered_as_a_whole": (
        "zero_optimization.leaf_module.classes",
        "zero_optimization.leaf_module.names",
        "zero_optimization.leaf_module.name_suffixes",
    ),
    "tests/engine/test_hostile.py::test_an_unseen_write_in_one_ranks_shard_stops_all": ("longshore.detect_writes",),
}
"""By test, the dotted paths of the keys that it shows."""

TESTS = {path: test for test, paths in _KEYS.items() for path in paths}
"""By dotted path."""
