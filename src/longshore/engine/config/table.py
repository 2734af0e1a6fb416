"""The whole table, with the rows about logging and about what longshore does not do, and how a key is found in it."""

from __future__ import annotations

from longshore.engine.config.keys import Key, accepted, each_accepted, honoured, refused
from longshore.engine.config.names import alias_of, candidates, edits, quoted
from longshore.engine.config.table_training import (
    ACTIVATIONS,
    BATCH,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PRECISION,
    SCHEDULER,
)
from longshore.engine.config.table_zero import OFFLOAD, ZERO
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BOOLEAN,
    DTYPE,
    NOT_NEGATIVE,
    TEXT,
    Block,
    Integer,
    Items,
    OneOf,
)

_FILES = {"output_path": "The folder. Default: `runs`.", "job_name": "A folder in it. Default: `longshore`."}
_OFF = "DeepSpeed reads it when the section is enabled, which longshore refuses."
_MONITOR = "log loss, engine.get_lr() and engine.get_global_grad_norm() from your loop; set enabled to false"
_CHECKPOINTS = "longshore does not save this way; leave it out"

# fmt: off
# One row is one key; the formatter would make ten lines of it.

LOGGING: tuple[Key, ...] = (
    honoured("", "steps_per_print", AT_LEAST_1, "Rank 0 prints a line every so many steps. Default: never.",
             "steps_per_print", absent_when_auto=True),
    honoured("", "wall_clock_breakdown", BOOLEAN, "That line has the times of forward, backward and step.",
             "wall_clock_breakdown"),
    honoured("", "dump_state", BOOLEAN, "Rank 0 prints `engine.explain()` when the engine is made.",
             "dump_state"),
    refused("", "memory_breakdown", BOOLEAN, (False,), "call engine.explain(), which has the bytes by kind"),
    accepted("", "log_level", TEXT, "It sets what DeepSpeed's own logger prints."),
    *(
        honoured(section, "enabled", BOOLEAN, f"Rank 0 writes the metrics of every step to {where}.")
        for section, where in (("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases"),
                               ("csv_monitor", "`metrics.csv`"))
    ),
    *(
        honoured(section, name, TEXT, what)
        for section, rows in (
            ("tensorboard", _FILES),
            ("csv_monitor", _FILES),
            ("wandb", {"project": "The run's project.", "team": "The run's entity.", "group": "The run's group."}),
        )
        for name, what in rows.items()
    ),
    refused("comet", "enabled", BOOLEAN, (False,), _MONITOR),
    *each_accepted("comet", "project workspace api_key experiment_name experiment_key mode", TEXT, _OFF),
    accepted("comet", "samples_log_interval", AT_LEAST_1, _OFF),
    accepted("comet", "online", BOOLEAN, _OFF),
    refused("flops_profiler", "enabled", BOOLEAN, (False,), "use torch.utils.flop_counter; set enabled to false"),
    accepted("flops_profiler", "recompute_fwd_factor", NOT_NEGATIVE, _OFF),
    *each_accepted("flops_profiler", "profile_step top_modules", AT_LEAST_0, _OFF),
    accepted("flops_profiler", "module_depth", Integer(-1), _OFF),
    accepted("flops_profiler", "detailed", BOOLEAN, _OFF),
    accepted("flops_profiler", "output_file", TEXT, _OFF),
    refused("comms_logger", "enabled", BOOLEAN, (False,), "use torch.profiler; set enabled to false"),
    *each_accepted("comms_logger", "verbose prof_all debug", BOOLEAN, _OFF),
    accepted("comms_logger", "prof_ops", Items(TEXT), _OFF),
    accepted("timers.throughput", "enabled", BOOLEAN, "It only measures, as steps_per_print does here."),
    accepted("timers.throughput", "synchronized", BOOLEAN, "It only measures."),
)

OTHER: tuple[Key, ...] = (
    accepted("", "vocabulary_size", AT_LEAST_1, "DeepSpeed uses it for a warning only."),
    accepted("", "disable_python_gc", BOOLEAN, "It switches Python's garbage collector, which longshore leaves alone."),
    accepted("", "seq_parallel_communication_data_type", DTYPE, "DeepSpeed reads it with sequence parallelism only."),
    accepted("", "use_data_before_expert_parallelism", BOOLEAN, "DeepSpeed reads it with expert parallelism only."),
    refused("", "sequence_parallel_size", AT_LEAST_1, (1,), "longshore shards data-parallel ranks only; leave it out"),
    accepted("", "pipeline", Block({}), "DeepSpeed reads it for a PipelineModule, which longshore does not train."),
    accepted("", "aio", Block({}), "DeepSpeed reads it with NVMe only, which longshore refuses."),
    refused("", "graph_harvesting", BOOLEAN, (False,), "capture graphs of the model in your code; leave it out"),
    accepted("checkpoint", "tag_validation", OneOf(("Ignore", "Warn", "Fail")),
             "Checkpoint names that differ between ranks are always an error."),
    refused("checkpoint", "load_universal", BOOLEAN, (False,), _CHECKPOINTS),
    refused("checkpoint", "use_node_local_storage", BOOLEAN, (False,), _CHECKPOINTS),
    accepted("checkpoint", "checkpoint_serialization", BOOLEAN, "It sets how DeepSpeed writes its files."),
    accepted("checkpoint", "writer", Block({}), "It sets how DeepSpeed writes its files."),
    accepted("checkpoint.parallel_write", "pipeline_stage", BOOLEAN,
             "DeepSpeed reads it with pipeline parallelism only."),
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

# fmt: on
NOT_KEYS: dict[str, str] = {
    "checkpoint_activations": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(), and the section activation_checkpointing only tunes it; remove the key",
    "gradient_checkpointing": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(); remove the key",
    "partitioned_activations": "the key is partition_activations",
    "max_grad_norm": "the key is gradient_clipping, at the top of the file",
    "lr": "a learning rate is optimizer.params.lr",
}
"""Names that people write although no version ever read them, with what to do."""

TABLE: tuple[Key, ...] = (
    *BATCH,
    *GRADIENTS,
    *ZERO,
    *OFFLOAD,
    *PRECISION,
    *OPTIMIZER,
    *SCHEDULER,
    *ACTIVATIONS,
    *LOGGING,
    *OTHER,
    *HOST,
)

OLD_SECTIONS = {"bfloat16": "bf16"}
"""Sections under a name that they no longer have."""

KEYS: dict[tuple[str, str], Key] = {(key.section, key.name): key for key in TABLE}


def _with_parents(section: str) -> list[str]:
    parts = section.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


SECTIONS: tuple[str, ...] = tuple(
    dict.fromkeys(parent for key in TABLE if key.section for parent in _with_parents(key.section))
)
"""Dotted paths of all sections, in the order of the table."""

TARGETS: dict[str, str] = {key.field: key.path for key in TABLE if key.field}
"""Paths of the file by fields of ``Config``."""


def names_in(section: str, of: str = "") -> list[str]:
    """Keys and sections that may stand in ``section``; those that ``of`` (a type) has."""
    keys = [key.name for key in TABLE if key.section == section and (not of or not key.of or of in key.of)]
    old = list(OLD_SECTIONS) if not section else []
    return [*keys, *(name for name in (_inside(section, path) for path in SECTIONS) if name), *old]


def _inside(section: str, path: str) -> str:
    parent, _, name = path.rpartition(".")
    return name if parent == section else ""


def unknown(section: str, name: object, of: str = "") -> str:
    """Describe an unknown name: the nearest name here, and where else it is a key."""
    here = f"{section} of {of}" if of else section or "the file's top level"
    said = f"{quoted(name)} is not a key of {here}"
    if not isinstance(name, str):
        return f"{said}; keys are strings"
    parent, _, last = name.rpartition(".")
    if name in SECTIONS or (parent, last) in KEYS:
        return f"{said}; sections are objects in objects, so write {quoted(last)} inside {quoted(parent)}"
    if name in NOT_KEYS:
        return f"{said}; {NOT_KEYS[name]}"
    elsewhere = _elsewhere(name, section)
    near = candidates(name, names_in(section, of))
    if elsewhere:  # spelled right, so it has the wrong place, unless a neighbour is one slip away
        near = [known for known in near if edits(name, known) == 1]
    meant = f"did you mean {' or '.join(map(quoted, near))}?" if near else ""
    if meant and not elsewhere:
        return f"{said}; {meant}"
    if of and (section, name) in KEYS:
        return f"{said}; {' and '.join(KEYS[section, name].of)} have it; remove it, or change the type"
    if elsewhere:
        return f"{said}, but of {elsewhere}; move it there" + (f", or {meant}" if meant else "")
    known = dict.fromkeys(key.name for key in TABLE)
    called = alias_of(name, known)
    far = [
        key.path
        for key in TABLE
        if (key.name in called if called else candidates(name, [key.name]))
        and (key.section, key.name) != (section, name)
    ]
    if far:
        return f"{said}; did you mean {' or '.join(map(quoted, dict.fromkeys(far[:3])))}?"
    return f"{said}, nor of any other section; remove it (docs/deepspeed_config.md lists all keys)"


def _elsewhere(name: str, section: str) -> str:
    places = [key.section or "the top level" for key in TABLE if key.name == name and key.section != section]
    places += [path.rpartition(".")[0] or "the top level" for path in SECTIONS if path.rpartition(".")[2] == name]
    return " and ".join(dict.fromkeys(places))
