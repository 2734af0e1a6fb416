"""Rows: logging, and sections about things that longshore does not do."""

from __future__ import annotations

from longshore.engine.config.keys import Key, accepted, honoured, refused
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BOOLEAN,
    DTYPE,
    NOT_NEGATIVE,
    TEXT,
    Block,
    Choice,
    Integer,
    Items,
)

_LOGGING = "tests/engine/test_logging.py::"
_MONITORS = "tests/engine/test_monitoring.py::"
_FILES = {"output_path": "The folder; `runs` where it is left out.", "job_name": "A folder in it; `longshore`."}
_OFF = "Read only when the section is enabled, which is refused."
_MONITOR = "log loss, engine.get_lr() and engine.get_global_grad_norm() from your loop; set enabled to false"
_CHECKPOINTS = "it is a way of saving that longshore does not have; leave it out"

# fmt: off
# One row is one key; the formatter would make ten lines of it.

LOGGING: tuple[Key, ...] = (
    honoured("", "steps_per_print", AT_LEAST_1, "A line on rank 0 every so many steps. Left out: none.",
             f"{_LOGGING}test_steps_per_print", "steps_per_print", absent_when_auto=True),
    honoured("", "wall_clock_breakdown", BOOLEAN, "That line has the times of forward, backward and step.",
             f"{_LOGGING}test_wall_clock_breakdown", "wall_clock_breakdown"),
    honoured("", "dump_state", BOOLEAN, "`engine.explain()` is printed on rank 0 when the engine is made.",
             f"{_LOGGING}test_dump_state", "dump_state"),
    refused("", "memory_breakdown", BOOLEAN, (False,), "call engine.explain(), which has the bytes by kind"),
    accepted("", "log_level", TEXT, "What DeepSpeed's own logger prints."),
    *(
        honoured(section, "enabled", BOOLEAN, f"Rank 0's numbers of every step go to {where}.",
                 f"{_MONITORS}test_{section}")
        for section, where in (("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases"),
                               ("csv_monitor", "`metrics.csv`"))
    ),
    *(
        honoured(section, name, TEXT, what, f"{_MONITORS}test_{section}")
        for section, rows in (
            ("tensorboard", _FILES),
            ("csv_monitor", _FILES),
            ("wandb", {"project": "Of the run.", "team": "Its entity.", "group": "Of the run."}),
        )
        for name, what in rows.items()
    ),
    refused("comet", "enabled", BOOLEAN, (False,), _MONITOR),
    *(
        accepted("comet", name, TEXT, _OFF)
        for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode")
    ),
    accepted("comet", "samples_log_interval", AT_LEAST_1, _OFF),
    accepted("comet", "online", BOOLEAN, _OFF),
    refused("flops_profiler", "enabled", BOOLEAN, (False,), "use torch.utils.flop_counter; set enabled to false"),
    accepted("flops_profiler", "recompute_fwd_factor", NOT_NEGATIVE, _OFF),
    accepted("flops_profiler", "profile_step", AT_LEAST_0, _OFF),
    accepted("flops_profiler", "module_depth", Integer(-1), _OFF),
    accepted("flops_profiler", "top_modules", AT_LEAST_0, _OFF),
    accepted("flops_profiler", "detailed", BOOLEAN, _OFF),
    accepted("flops_profiler", "output_file", TEXT, _OFF),
    refused("comms_logger", "enabled", BOOLEAN, (False,), "use torch.profiler; set enabled to false"),
    accepted("comms_logger", "verbose", BOOLEAN, _OFF),
    accepted("comms_logger", "prof_all", BOOLEAN, _OFF),
    accepted("comms_logger", "debug", BOOLEAN, _OFF),
    accepted("comms_logger", "prof_ops", Items(TEXT), _OFF),
    accepted("timers.throughput", "enabled", BOOLEAN, "It measures; steps_per_print prints what longshore measures."),
    accepted("timers.throughput", "synchronized", BOOLEAN, "It measures."),
)

OTHER: tuple[Key, ...] = (
    accepted("", "vocabulary_size", AT_LEAST_1, "DeepSpeed warns by it, and does nothing else with it."),
    accepted("", "disable_python_gc", BOOLEAN, "When Python collects garbage; longshore leaves that alone."),
    accepted("", "seq_parallel_communication_data_type", DTYPE, "Read with sequence parallelism only."),
    accepted("", "use_data_before_expert_parallelism", BOOLEAN, "Read with expert parallelism only."),
    refused("", "sequence_parallel_size", AT_LEAST_1, (1,), "longshore shards data-parallel ranks only; leave it out"),
    accepted("", "pipeline", Block({}), "Read for a PipelineModule only, which is no model for longshore."),
    accepted("", "aio", Block({}), "Read with NVMe only, which is refused."),
    refused("", "graph_harvesting", BOOLEAN, (False,), "capture graphs of the model in your code; leave it out"),
    accepted("checkpoint", "tag_validation", Choice(("Ignore", "Warn", "Fail")),
             "Names of checkpoints that differ over ranks are an error in any case."),
    refused("checkpoint", "load_universal", BOOLEAN, (False,), _CHECKPOINTS),
    refused("checkpoint", "use_node_local_storage", BOOLEAN, (False,), _CHECKPOINTS),
    accepted("checkpoint", "checkpoint_serialization", BOOLEAN, "How files of DeepSpeed's are written."),
    accepted("checkpoint", "writer", Block({}), "How files of DeepSpeed's are written."),
    accepted("checkpoint.parallel_write", "pipeline_stage", BOOLEAN, "Read with pipeline parallelism only."),
    *(
        refused("", name, Block(), (), f"{what}; remove the section, or set enabled to false")
        for name, what in (
            ("amp", "use bf16, fp16 or torch_autocast"),
            ("autotuning", "choose the batch and bucket sizes yourself"),
            ("elasticity", "set the batch numbers yourself"),
            ("eigenvalue", "it serves quantized training, which longshore does not do"),
            ("progressive_layer_drop", "drop layers in the model"),
            ("curriculum_learning", "order the samples in your loader"),
            ("data_efficiency", "order the samples in your loader"),
            ("hybrid_engine", "generate with the model, engine.module"),
            ("nebula", "save with longshore"),
            ("quantize_training", "longshore does not quantize"),
            ("expert_parallel", "longshore shards data-parallel ranks only"),
        )
    ),
    refused("", "weight_quantization", Block(on_when_absent=True), (),
            "longshore does not quantize; remove the section, or set enabled to false"),
    refused("", "datastates_ckpt", Block({}), (), "save with longshore; remove the section"),
    refused("", "sparse_attention", Block({}), (), "use torch's flex_attention in the model; remove the section"),
    refused("", "compression_training", Block({}), (), "longshore does not quantize or prune; remove the section"),
    refused("", "compile", Block({"deepcompile": (False,), "enabled": (False,), "autoep_non_moe": (False,)}), (),
            "compile the model with torch.compile; remove the section"),
    refused("", "tensor_parallel", Block({"autotp_size": (0, 1), "tp_size": (0, 1), "tp.tp_size": (0, 1),
                                          "tensor_parallel.tp_size": (0, 1)}), (),
            "longshore shards data-parallel ranks only; remove the section"),
)

NOT_KEYS: dict[str, str] = {
    "checkpoint_activations": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(), and the section activation_checkpointing only tunes it; remove the key",
    "gradient_checkpointing": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(); remove the key",
    "partitioned_activations": "the key is partition_activations",
    "max_grad_norm": "the key is gradient_clipping, at the top of the file",
    "lr": "a learning rate is optimizer.params.lr",
}
"""What people write that no version ever read, with what to do."""
