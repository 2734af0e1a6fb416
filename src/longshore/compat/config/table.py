"""The table of all keys of a DeepSpeed configuration file, by section. Each row is longshore's use of a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from longshore.compat.config.keys import Auto, Key, accepted, honoured, joined, old_name, refused, setting, switch
from longshore.compat.config.kinds import SECTION, Block
from longshore.seam import (
    AT_LEAST_0,
    AT_LEAST_1,
    BOOLEAN,
    DTYPE,
    FRACTION,
    LARGEST_SCALE,
    LOW_DTYPE,
    MONITORS,
    NOT_NEGATIVE,
    OPTIMIZER_CONFIGS,
    OPTIMIZER_TYPE,
    SCHEDULER_CONFIGS,
    SCHEDULER_TYPE,
    TEXT,
    Either,
    Infinite,
    Items,
    NamedModel,
    Number,
    OneOf,
    kind_in,
    optimizers_with,
)

_DATA_PARALLEL = "longshore shards data-parallel ranks only"
_MASTERS = "masters are float32 always; leave it out"
_BF16 = "states bf16 of offload_optimizer, rounded stochastically. The two keys must agree."
_SCALED = "Read if fp16 is enabled."
_GATHERED = (
    "It chooses what stage 3 gathers and when, and no weight depends on it. See wrap_policy in the section longshore."
)
_LEAVES = "Read at stage 3."
_NVME = "DeepSpeed reads it with NVMe only, which longshore refuses."
_COLLECTIVE = "It chooses the collective, not the numbers; longshore uses reduce-scatter and all-gather."
_LAYOUT = "It chooses where gradients lie in memory, not their values."
_SPEED = "It changes how fast bytes are copied, not their values."
_QUANTIZED = "quantized communication cannot give the weights of plain torch"
_ALL_RANKS = "longshore shards over all ranks; leave it out"
_FLAG = "It chooses an implementation in torch; longshore always runs its own kernel."
_OFF = "DeepSpeed reads it when the section is enabled, which longshore refuses."
_CHECKPOINTS = "longshore does not save this way; leave it out"
_ADAM = optimizers_with("bias_correction")
_FROM_MINUS_1 = Number(-1, whole=True)


def _parameters(models: Mapping[str, type[NamedModel]]) -> Iterator[Key]:
    """The parameters of a section's types, from the models of the types."""
    for name in dict.fromkeys(name for model in models.values() for name in model.model_fields if name != "type"):
        fields = {of: model.model_fields[name] for of, model in models.items() if name in model.model_fields}
        kind = kind_in(next(iter(fields.values())).metadata)
        of = tuple(fields) if len(fields) < len(models) else ()
        yield honoured(name, kind, _PARAMETER_TEXTS.get(name, ""), of=of, null=_NO_NULL.get(name, ""))


def _stage_3(names: str) -> str:
    """The names, with and without the prefix that they have in some versions."""
    return " ".join(f"stage3_{name} {name}" for name in names.split())


_NO_NULL = {
    "warmup_max_lr": "null means the default in one schedule and the group's own in the other; give a number, or leave "
    "it out"
}
_NEEDS_STEPS = "Other than 0 it needs decay_step_size."
_PARAMETER_TEXTS = {
    "lr": "Learning rate.",
    "betas": "Decay rates of the moments.",
    "eps": "Added to the denominator of Adam's and Adagrad's step; for Muon that of what AdamW steps.",
    "weight_decay": "With torch_adam the default of AdamW is torch's 0.01, not DeepSpeed's.",
    "maximize": "Ascend instead.",
    "muon_lr": "That of the matrices; without lr, 0.02.",
    "adam_lr": "That of what AdamW steps; without lr, 0.0003.",
    "adam_weight_decay": "That of what AdamW steps.",
    "ns_eps": "Least norm by which a matrix is divided before the iteration.",
    "ns_steps": "Steps of the Newton-Schulz iteration.",
    "ns_coefficients": "Coefficients of the Newton-Schulz iteration.",
    "adjust_lr_fn": "How the learning rate depends on the shape of a matrix.",
    "split": "Which parameters hold several matrices.",
    "others": "Patterns of the names of further parameters that AdamW is to step.",
    "decay_lr_rate": _NEEDS_STEPS,
    "decay_mom_rate": _NEEDS_STEPS,
}
_MONITOR_TEXTS = {
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "csv_monitor": "`metrics.csv`",
    "output_path": "The folder. Default: `runs`.",
    "job_name": "A folder in it. Default: `longshore`.",
    "project": "The run's project.",
    "team": "The run's entity.",
    "group": "The run's group.",
}

# fmt: off
# One row is one key, or several; the formatter would make ten lines of it.

_BATCH_AND_GRADIENTS = (
    setting("train_batch_size", auto=Auto.OMIT),
    setting("train_micro_batch_size_per_gpu", "micro_batch_size", auto=Auto.OMIT),
    setting("gradient_accumulation_steps", auto=Auto.OMIT),
    setting("managed_gradient_accumulation", "managed_accumulation"),
    setting("dataloader_drop_last", "drop_last"),
    honoured("gradient_clipping", NOT_NEGATIVE,
             "The largest global L2 norm; 0: no clipping. Default: 1.0, as in DeepSpeed, and a note says so. (The "
             "default of `longshore.Config` is no clipping.)",
             null="null could mean none or the default; write 0 for no clipping, or 1.0"),
    setting("prescale_gradients"),
    setting("gradient_predivide_factor"),
    refused("gradient_allreduce_op", OneOf(("mean", "sum")), ("mean",),
            "gradients are averaged over ranks; for their sum multiply the loss by the number of ranks"),
    setting("communication_data_type", "communication_dtype", auto=Auto.OMIT),
    switch("sparse_gradients", "make the embedding with sparse=False; gradients are dense"),
    old_name("fp32_allreduce", BOOLEAN, "communication_data_type", "fp32"),
)

_ZERO = (
    setting("stage"),
    setting("reduce_bucket_size", "reduce_bucket_numel", auto=Auto.OMIT),
    setting("allgather_bucket_size", "allgather_bucket_numel", auto=Auto.OMIT),
    setting("overlap_comm", auto=Auto.OMIT),
    accepted("contiguous_gradients parameter_alignment", BOOLEAN, _LAYOUT),
    accepted("reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions", BOOLEAN, _COLLECTIVE),
    setting("compute_grad_norm", what="Under longshore run-deepspeed, stages 1 to 3 do so if it is left out."),
    refused("load_from_fp32_weights", BOOLEAN, (True,), "longshore loads masters as they were saved; leave it out"),
    switch("elastic_checkpoint", "it is a checkpoint format of DeepSpeed's; leave it out"),
    refused("zenflow", Block({}), (),
            "it steps with stale gradients; leave it out: offload_optimizer with super_offload overlaps without them"),
    accepted("sub_group_size", AT_LEAST_0,
             "It sets how much stage 3 steps at a time. See tile_numel in the section longshore."),
    refused("ignore_unused_parameters", BOOLEAN, (True,),
            "longshore does not step a parameter without a gradient, and engine.explain() names it; leave this out"),
    accepted("legacy_stage1", BOOLEAN, "It chooses between two implementations of stage 1; longshore has one."),
    accepted("round_robin_gradients", BOOLEAN, "It sets the order in which ranks copy gradients, not the sum."),
    accepted("log_trace_cache_warnings", BOOLEAN, "It switches a warning of DeepSpeed's prefetching."),
    accepted("enable_sanity_checks", BOOLEAN,
             "Checks change no weight. longshore's are always on, and LONGSHORE_DEBUG=1 adds those across ranks."),
    accepted("memory_efficient_linear", BOOLEAN, "It replaces torch's Linear, which needs no replacement here."),
    accepted("save_muon_momentum_buffer_in_memory", BOOLEAN, "DeepSpeed reads it for Muon at stage 3 only."),
    accepted(_stage_3("prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
                      "max_live_parameters max_reuse_distance"), AT_LEAST_0, _GATHERED),
    accepted(_stage_3("module_granularity_threshold"), Number(whole=True), _GATHERED),
    accepted(_stage_3("use_all_reduce_for_fetch_params allgather_sequential"), BOOLEAN, _GATHERED),
    accepted("override_module_apply", BOOLEAN, _GATHERED),
    setting("stage3_gather_16bit_weights_on_model_save", "gather_on_save", auto=Auto.OMIT),
    old_name("gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save", BOOLEAN,
             "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    accepted("pipeline_loading_checkpoint", BOOLEAN, "It is about loading at stage 3, not about training."),
    refused("zero_hpz_partition_size", AT_LEAST_0, (0, 1), "longshore shards parameters over all ranks; leave it out"),
    switch("zero_quantized_weights zero_quantized_nontrainable_weights", "true gathers parameters as 8-bit integers, "
           "and the model computes with other weights than those that are trained; set it to false"),
    switch("zero_quantized_gradients", "true exchanges gradients as 4-bit integers, and steps have other gradients "
           "than those of the model; set it to false"),
    refused("zeropp_loco_param", Block({}), (), _QUANTIZED),
    refused("mics_shard_size", _FROM_MINUS_1, (-1,), _ALL_RANKS),
    switch("mics_hierarchical_params_gather", _ALL_RANKS),
    old_name("cpu_offload", BOOLEAN, "zero_optimization.offload_optimizer.device", "cpu"),
    old_name("cpu_offload_param", BOOLEAN, "zero_optimization.offload_param.device", "cpu"),
    accepted("cpu_offload_use_pin_memory", BOOLEAN, _SPEED),
)

_LOGGING_AND_OTHERS = (
    old_name("allgather_size", AT_LEAST_1, "zero_optimization.allgather_bucket_size"),
    accepted("disable_allgather", BOOLEAN, "DeepSpeed reads it and does nothing with it."),
    accepted("zero_allow_untested_optimizer", BOOLEAN,
             "longshore refuses, by name, each optimizer that it cannot step exactly."),
    accepted("zero_force_ds_cpu_optimizer", BOOLEAN, "offload_optimizer alone says where a step runs."),
    honoured("steps_per_print", Either((AT_LEAST_1, Infinite())), "Infinity: never, as when it is left out.",
             field="steps_per_print", auto=Auto.OMIT),
    setting("wall_clock_breakdown"),
    setting("dump_state"),
    switch("memory_breakdown", "call engine.explain(), which has the bytes by kind"),
    accepted("log_level", TEXT, "It sets what DeepSpeed's own logger prints."),
    accepted("log", Either((BOOLEAN, TEXT, SECTION)), "No version of DeepSpeed reads it."),
    accepted("vocabulary_size", AT_LEAST_1, "DeepSpeed uses it for a warning only."),
    accepted("disable_python_gc", BOOLEAN, "It switches Python's garbage collector, which longshore leaves alone."),
    accepted("seq_parallel_communication_data_type", DTYPE, "DeepSpeed reads it with sequence parallelism only."),
    accepted("use_data_before_expert_parallelism", BOOLEAN, "DeepSpeed reads it with expert parallelism only."),
    refused("sequence_parallel_size", AT_LEAST_1, (1,), f"{_DATA_PARALLEL}; leave it out"),
    accepted("pipeline", Block({}), "DeepSpeed reads it for a PipelineModule, which longshore does not train."),
    accepted("aio", Block({}), _NVME),
    switch("graph_harvesting", "capture graphs of the model in your code; leave it out"),
    *(
        refused(name, Block(on_when_absent=name == "weight_quantization"), (),
                f"{what}; remove the section, or set enabled to false")
        for name, what in (
            ("amp", "use bf16, fp16 or torch_autocast"),
            ("autotuning", "choose the batch and bucket sizes yourself"),
            ("elasticity", "set the batch numbers yourself"),
            ("eigenvalue", "it serves quantized training, which longshore does not do"),
            ("progressive_layer_drop", "drop layers in the model"),
            ("curriculum_learning data_efficiency", "order the samples in your loader"),
            ("hybrid_engine", "generate with the model, engine.module"),
            ("nebula", "save with longshore"),
            ("quantize_training", "longshore does not quantize"),
            ("weight_quantization", "longshore does not quantize"),
            ("expert_parallel", _DATA_PARALLEL),
        )
    ),
    refused("datastates_ckpt", Block({}), (), "save with longshore; remove the section"),
    refused("sparse_attention", Block({}), (), "use torch's flex_attention in the model; remove the section"),
    refused("compression_training", Block({}), (), "longshore does not quantize or prune; remove the section"),
    refused("compile", Block({"deepcompile": (False,), "enabled": (False,), "autoep_non_moe": (False,)}), (),
            "compile the model with torch.compile; remove the section"),
    refused("tensor_parallel", Block({"autotp_size": (0, 1), "tp_size": (0, 1), "tp.tp_size": (0, 1),
                                      "tensor_parallel.tp_size": (0, 1)}), (), f"{_DATA_PARALLEL}; remove the section"),
)

_SECTIONS: dict[str, tuple[Key, ...]] = {
    "": (*_BATCH_AND_GRADIENTS, *_LOGGING_AND_OTHERS),
    "data_types": (
        setting("grad_accum_dtype", "accumulation_dtype", auto=Auto.OMIT),
        honoured("param_dtype", DTYPE, "Must agree with fp16 and bf16; it is compared only.", auto=Auto.OMIT),
        refused("buffer_dtype", DTYPE, (),
                "buffers keep the dtype that they have; cast them in the model, and leave this out"),
        accepted("keep_in_fp32_modules", Items(TEXT),
                 "It keeps buffers from being cast, and longshore never casts buffers."),
    ),
    "zero_optimization": _ZERO,
    "zero_optimization.leaf_module": (
        setting("classes", "leaf_classes", _LEAVES),
        setting("names", "leaf_names", _LEAVES),
        setting("name_suffixes", "leaf_name_suffixes", _LEAVES),
    ),
    "zero_optimization.offload_optimizer": (
        setting("device", "offload_device"),
        accepted("pin_memory", BOOLEAN, _SPEED),
        accepted("nvme_path", TEXT, _NVME),
        accepted("buffer_count", AT_LEAST_0, _NVME),
        accepted("pipeline_read pipeline_write fast_init", BOOLEAN, _NVME),
        setting("ratio", "offload_ratio", "DeepSpeed calls it Twin-Flow."),
        setting("states"),
        setting("states_seed"),
        honoured("super_offload", BOOLEAN, "Steps on the host while backward runs. true means speculation_memory auto, "
                 "unless the section longshore sets it. Clipping and rollback are exact."),
        honoured("cpuadam_cores_perc", FRACTION, "The share of the CPUs on which host threads run. It is read "
                 "with super_offload only, as in DeepSpeed. Default: all of them."),
    ),
    "zero_optimization.offload_param": (
        setting(
            "device",
            "param_device",
            "The optimizer's state is then on the host, too; a file that says otherwise gets a note.",
        ),
        accepted("nvme_path", TEXT, _NVME),
        accepted("buffer_count buffer_size max_in_cpu", AT_LEAST_0, _NVME),
        accepted("pin_memory", BOOLEAN, "Where there is an accelerator, memory that it copies from is always pinned."),
    ),
    "fp16": (
        honoured("enabled", BOOLEAN, "Parameters are cast to fp16; masters are fp32, and the loss is scaled."),
        honoured("auto_cast", BOOLEAN, f"Floating inputs of forward are cast to fp16. {_SCALED}"),
        honoured("loss_scale", Number(0, maximum=LARGEST_SCALE), f"The static loss scale; 0: dynamic. {_SCALED}",
                 auto=Auto.OMIT),
        setting("initial_scale_power", "loss_scaling.initial_scale_power", _SCALED, auto=Auto.OMIT),
        setting("loss_scale_window", "loss_scaling.window", _SCALED, auto=Auto.OMIT),
        setting("hysteresis", "loss_scaling.hysteresis", _SCALED, auto=Auto.OMIT),
        setting("consecutive_hysteresis", "loss_scaling.consecutive_hysteresis", _SCALED, auto=Auto.OMIT),
        setting("min_loss_scale", "loss_scaling.min_scale", _SCALED, auto=Auto.OMIT),
        switch("fp16_master_weights_and_grads", _MASTERS),
    ),
    "bf16": (
        honoured("enabled", BOOLEAN, "Parameters are cast to bf16; masters are fp32."),
        accepted("immediate_grad_update", BOOLEAN, "It sets when gradients are copied, not their sum."),
        honoured("check_grad_overflow", BOOLEAN,
                 "true: a step whose gradients are not finite is skipped (a static loss scale of 1). Default: false, "
                 "NaN and infinity are applied as torch does; DeepSpeed's default is true, so a note says so."),
        old_name("check_overflow", BOOLEAN, "bf16.check_grad_overflow"),
        switch("bf16_master_weights_and_grads", f"{_MASTERS}: bf16_optimizer_states is read without it"),
        honoured("bf16_optimizer_states", BOOLEAN, f"true: {_BF16}", auto=Auto.OMIT),
    ),
    "torch_autocast": (
        honoured("enabled", BOOLEAN, "`torch.autocast` around forward."),
        honoured("dtype", LOW_DTYPE, "Its dtype; needed when enabled, since torch's own default depends on the device. "
                 "fp16 is scaled dynamically, with the window (2000) and hysteresis (1) of torch's scaler."),
        accepted("lower_precision_safe_modules", Items(TEXT), "It chooses gradients that DeepSpeed rounds when it "
                 "sends them; longshore rounds none, unless communication_data_type is set."),
    ),
    "optimizer": (
        honoured("type", OPTIMIZER_TYPE, "In any case. Adam means AdamW unless adam_w_mode is false."),
        accepted("legacy_fusion", BOOLEAN, "It chooses one of DeepSpeed's kernels; longshore has one."),
    ),
    "optimizer.params": (
        *_parameters(OPTIMIZER_CONFIGS),
        honoured("ns_method", OneOf(("standard",), {"gram": "Gram Newton-Schulz has other numbers than torch's"}),
                 "The iteration is torch's. It is worth saying, since DeepSpeed's default is another.", of=("Muon",)),
        refused("per_head_muon", BOOLEAN, (False,),
                "say how many heads each projection has in split, such as {\"*.q_proj.weight\": 32}", of=("Muon",)),
        honoured("adam_w_mode", BOOLEAN, "false makes type Adam plain Adam; type AdamW stays AdamW, and Muon has it "
                 "true only. Default: true.", of=(*_ADAM, "Muon")),
        honoured("torch_adam", BOOLEAN,
                 "The same numbers by the same kernel; only the default of weight_decay is torch's then.", of=_ADAM),
        accepted("fused foreach", BOOLEAN, _FLAG),
        accepted("set_grad_none", BOOLEAN, "It sets what zero_grad() leaves in .grad, not the weights.", of=_ADAM),
        refused("amsgrad", BOOLEAN, (False,), "the maximum of second moments is not kept; leave amsgrad out",
                of=(*_ADAM, "Adagrad")),
        switch("capturable", "a host step cannot be captured in a CUDA graph; leave it out"),
        switch("differentiable", "autograd cannot see a host step; leave it out"),
        honoured("fp32_optimizer_states", BOOLEAN, f"false: {_BF16}", auto=Auto.OMIT),
        refused("initial_accumulator_value", NOT_NEGATIVE, (0.0,), "the sum starts at 0; leave it out",
                of=("Adagrad",)),
        refused("max_grad_norm", NOT_NEGATIVE, (0.0,), "set gradient_clipping, at the top of the file, instead"),
    ),
    "scheduler": (honoured("type", SCHEDULER_TYPE, "The schedule, in any case."),),
    "scheduler.params": (
        *_parameters(SCHEDULER_CONFIGS),
        refused("last_batch_iteration", _FROM_MINUS_1, (-1,),
                "a schedule starts at its beginning; load its state to go on from a checkpoint"),
    ),
    "activation_checkpointing": (
        setting("cpu_checkpointing"),
        accepted("partition_activations", BOOLEAN,
                 "It splits saved activations over model-parallel ranks, which longshore does not have."),
        accepted("contiguous_memory_optimization", BOOLEAN, "It sets where saved activations lie, not their values."),
        accepted("number_checkpoints", AT_LEAST_0, "It sets the buffer size of contiguous_memory_optimization."),
        accepted("synchronize_checkpoint_boundary", BOOLEAN, "Streams are ordered without this wait."),
        switch("profile", "no times are printed for checkpoints; use torch.profiler"),
    ),
    **{
        section: (
            honoured("enabled", BOOLEAN, f"Rank 0 writes the metrics of every step to {_MONITOR_TEXTS[section]}."),
            *(honoured(name, TEXT, _MONITOR_TEXTS[name]) for name in model.model_fields),
        )
        for section, model in MONITORS.items()
    },
    "comet": (
        switch("enabled", "log loss, engine.get_lr() and engine.get_global_grad_norm() from your loop; set enabled to "
               "false"),
        accepted("project workspace api_key experiment_name experiment_key mode", TEXT, _OFF),
        accepted("samples_log_interval", AT_LEAST_1, _OFF),
        accepted("online", BOOLEAN, _OFF),
    ),
    "flops_profiler": (
        honoured("enabled", BOOLEAN, "Rank 0 prints the times and the floating-point operations of one step."),
        accepted("recompute_fwd_factor", NOT_NEGATIVE, "The operations of backward are counted, recomputed ones too."),
        honoured("profile_step", AT_LEAST_0, "How many steps come before that one. Default: 1."),
        honoured("top_modules", AT_LEAST_0, "How many classes of modules are listed for each depth. Default: 1."),
        honoured("module_depth", _FROM_MINUS_1, "The last depth for which they are; -1 (default): the deepest."),
        honoured("detailed", BOOLEAN, "Every module is listed. Default: true."),
        honoured("output_file", TEXT, "Where the profile is written. Default: it is printed."),
    ),
    "comms_logger": (
        switch("enabled", "use torch.profiler; set enabled to false"),
        accepted("verbose prof_all debug", BOOLEAN, _OFF),
        accepted("prof_ops", Items(TEXT), _OFF),
    ),
    "timers.throughput": (
        accepted("enabled", BOOLEAN, "It only measures, as steps_per_print does here."),
        accepted("synchronized", BOOLEAN, "It only measures."),
    ),
    "checkpoint": (
        accepted("tag_validation", OneOf(("Ignore", "Warn", "Fail")),
                 "Checkpoint names that differ between ranks are always an error."),
        switch("load_universal use_node_local_storage", _CHECKPOINTS),
        accepted("checkpoint_serialization", BOOLEAN, "It sets how DeepSpeed writes its files."),
        accepted("writer", Block({}), "It sets how DeepSpeed writes its files."),
    ),
    "checkpoint.parallel_write": (
        accepted("pipeline_stage", BOOLEAN, "DeepSpeed reads it with pipeline parallelism only."),
    ),
    "longshore": (
        setting("tile_numel"),
        setting("threads"),
        setting("cpu_set"),
        setting("speculation_memory", what="Default: auto with super_offload, otherwise 0.", auto=Auto.VALUE),
        setting("wrap_policy", auto=Auto.VALUE),
        setting("detect_writes"),
        setting("accumulate", auto=Auto.VALUE),
    ),
}

# fmt: on
OLD_SECTIONS = {"bfloat16": "bf16"}
"""Sections under a name that they no longer have."""

TABLE: tuple[Key, ...] = tuple(
    replace(row, name=name, section=section)
    for section, rows in _SECTIONS.items()
    for row in rows
    for name in row.name.split()
)

KEYS: dict[tuple[str, str], Key] = {(key.section, key.name): key for key in TABLE}

SECTIONS: tuple[str, ...] = tuple(
    dict.fromkeys(path for section in _SECTIONS if section for path in accumulate(section.split("."), joined))
)
"""Dotted paths of all sections, in the order of the table."""

TARGETS: dict[str, str] = {key.field: key.path for key in TABLE if key.field}
"""Paths of the file by fields of ``Config``, and of its ``loss_scaling`` with a dot."""
