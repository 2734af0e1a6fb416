"""What to do about errors whose messages do not say it, and under which heading of docs/errors.md each file belongs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERBS = (
    "add|adapt|apply|begin|build|call|change|check|choose|clip|clone|configure|construct|convert|copy|cut"
    "|declare|drop|end|export|find|free|freeze|gather|get|give|go|group|hook|initialise|initialize"
    "|install|keep|leave|let|list|load|look|lower|make|mend|move|name|pass|pick|pip|put|raise|reach|read"
    "|reduce|remove|rename|resume|return|run|save|select|set|shard|show|spell|stand|start|step|stop|switch|take|tell"
    "|tie|train|try|type|undo|unfreeze|unset|use|wait|wrap|write"
)

INSTRUCTION = re.compile(
    rf"(?:[;:,.]\s+|(?<=»)\s+|\(|\bor\s+)(?P<what>(?:{_VERBS})\b(?!\(|\s+(?:is\b|to None|in «)).*)$", re.IGNORECASE
)
"""Where a message begins to say what is to be done: a verb in the imperative, after a pause."""

BY_CLASS = {
    "GradientError": "`zero_grad()`, on every rank, and go on",
    "ParameterError": "build the optimizer or the engine after moving or converting the model; with "
    "`detect_writes=False`, `refresh_master()` after writes that torch cannot see",
    "BrokenStateError": "load weights and `optimizer.load_state_dict`, on every rank, or a checkpoint",
    "HostMemoryError": "free memory, or raise the limit of the process, and call again",
    "RankError": "mend the loop so that all ranks do the same, `zero_grad()` on every rank; where one ended, start "
    "again from a checkpoint",
    "CheckpointError": "what was there before still is; take another checkpoint (`longshore inspect DIR --verify`)",
    "NoCheckpointError": "nothing was loaded; check the path, or catch it at the first start of a script that begins "
    "or continues",
    "ConfigError": "mend every line that it lists",
    "LossScaleError": "look for NaN or infinity in the data and the loss, or lower the learning rate",
    "RendezvousError": "start all ranks, with an address and a port that all of them reach",
    "LongshoreError": "as it says",
}
"""How to go on, by the class that users catch."""

_DAMAGED = (
    "Take another checkpoint: `load_checkpoint` without a tag passes over one that is damaged, `longshore inspect DIR "
    "--verify` checks all of them, and a copy that was cut off has to be made again."
)
_SYSTEM = "The operating system refused it: see to the path, its permissions and the space on the disk, and try again."
_NOT_OURS = (
    "It cannot be imported. Go on from its weights (DeepSpeed's own zero_to_fp32.py writes them), with new state."
)
_OTHER_MODEL = "Load it into the model and optimizer that were saved, or with strict=False what fits."
_AS_TRAINED = "Save it with the engine's save_checkpoint or longshore.save, and load that."

RULE = re.compile(
    r"(?:\b(?:is|are|takes?|has|have|needs|expected) |\bmust (?:be )?)(?P<rule>(?!«).+?),? (?:not|and is|and are) «"
)
"""A message that says what a value must be and what was found: ``x is a number of bytes, not «x»``."""

RULE_IS_A_VALUE = re.compile(r"(?:an?|the|one|None|true|text|parameters|float\w+|[\d'«])\b|'|model=", re.IGNORECASE)
"""A rule that names the value; any other says what the value must be like."""

BY_FAMILY = [
    (r"^IllegalTransitionError", "It is a bug in longshore: please report it."),
    (r"^AttributeError.*«instead»", "The message ends with what to use instead."),
    (r"^AttributeError.*«where_else»", "The message ends with where to look."),
    (r"in the order in which its threads launch them", "Unset the variable, or set it as the message says."),
    (r"This is a bug in longshore", "Report it; `zero_grad()` on every rank, and go on."),
    (r"a gradient was taken out of \.grad", "`engine.zero_grad()`, on every rank, and go on."),
    (
        r"is a placeholder that does not stand",
        "Let each parameter have one optimizer, and its own `.grad`; `zero_grad()`.",
    ),
    (r"to set a gradient use", "`zero_grad()`; gradients are set with `longshore.utils.safe_set_full_grad()`."),
    (r"the optimizer has no parameters|without a single parameter|parameter list", "Pass `model.parameters()`."),
    (r"clips the 2-norm", "Leave `norm_type` at 2."),
    (r"=«group» is not supported: «why»", "Leave it out; the message ends with why."),
    (
        r"dense parameters only|are not supported\)$|longshore trains «names»",
        "Convert the parameter, or freeze it (`requires_grad_(False)`): frozen ones may be anything.",
    ),
    (
        r"all parameters of one optimizer are on one device",
        "Move the model to one device before you build the optimizer.",
    ),
    (r"trains parameters on cpu and cuda devices", "Move the model to a CPU or a CUDA device."),
    (r"zero_grad\(\) discards", "`zero_grad()` on every rank, and go on."),
    (r"graph of the device is being captured", "Capture the forward alone; `backward()` and `step()` outside of it."),
    (r"another rank does not answer", "See the RankError that it causes."),
    (
        r"a collective failed|a collective was under way|«what»: «words»",
        "Look at the first error of any rank, and start again from a checkpoint (complete ones are unchanged).",
    ),
    (r"«failed» could not connect", "See the error of the rank that it names."),
    (r"all ranks have to make the same calls", "Make the same calls on every rank, and see that each of them runs."),
    (r"see its own error", "See the error of the rank that it names; then `zero_grad()` on every rank."),
    (r"pip install", "Install what it names."),
    (
        r"is a mixture|a mixture of files|they are a mixture",
        "Copy the files of one checkpoint, from all machines, anew.",
    ),
    (
        r": there is no (checkpoint|folder)|names no checkpoint|has no complete checkpoint|it is not a checkpoint",
        "Give the folder that the tags lie in; `longshore inspect DIR` lists those of longshore.",
    ),
    (r"(could not|cannot) be (read|written): «(strerror|error|\.\.\.)»", _SYSTEM),
    (r": cannot (read|write)", _SYSTEM),
    (r"not imported|are imported|imported only|is not kept here", _NOT_OURS),
    (
        r"pickle|is not a tensor, and this format",
        "Save what you need of it as numbers, text, lists, dictionaries or tensors.",
    ),
    (r"keys in a checkpoint are|contains itself", "Change the value that it names before you save it."),
    (r"safetensors files have", "Convert the tensor that it names before you save it."),
    (r"within a character|NUL bytes|is not UTF-8$", "Give plain text files."),
    (r"does not fit; nothing was loaded", _OTHER_MODEL),
    (r"the checkpoint has no|in the checkpoint, not «|elements are missing in the checkpoint", _OTHER_MODEL),
    (r"is damaged|no regular file|is nested deeper than|no manifest|which «.*» names|names twice", _DAMAGED),
    (
        r"^ConfigError: must be (a )?JSON",
        "Write one JSON object in UTF-8: names and strings in double quotes. Comments are fine.",
    ),
    (r"^WrongValueError", "Write such a value; [the list of keys](deepspeed_config.md) says what each key takes."),
    (r"^ValueError: speculation_memory", 'Give `"auto"`, `"25%"`, `"8GiB"` or an integer number of bytes.'),
    (r"must be a number of at least 0", "Give a value that is not negative."),
    (r"wrap_policy counts", "Give a number of elements, at least 1."),
    (r"Optimizer or makes one", "Give a torch.optim.Optimizer, or a function that makes one."),
    (r"device is where the optimizer's state is", "Give 'cpu' or 'none'."),
    (r"takes a closure only", "Call it without arguments, or with a closure."),
    (
        r"must be «dtype»|=True needs|must be from 1 to|numel is at least",
        "Change what it names so that it is as it says.",
    ),
    (
        r"every rank has to|have to run the same|the ranks do different things",
        "Mend the loop so that every rank does the same; then `zero_grad()` on every rank.",
    ),
]
"""Families of messages, by a pattern that is searched in them and in what follows their class, in this order."""


@dataclass(frozen=True)
class Section:
    """A heading of the page.

    Attributes:
        title: of the heading.
        says: what stands under it.
        files: relative to ``src/longshore``; with ``/`` at the end all of a room that no other entry has; after
            ``: `` words that a message (with its class) has, to take these only.
        otherwise: what to do where neither the message nor its family says it; "": nothing may be left.
    """

    title: str
    says: str
    files: tuple[str, ...]
    otherwise: str = ""


SECTIONS = (
    Section(
        "Optimizers: arguments and parameters",
        "`longshore.AdamW` and its like, `longshore.Offload`, and the parameters that they are given. "
        "[The guide](optimizer.md#refused-by-name) lists what is refused.",
        (
            "byte_sizes.py",
            "deprecation.py",
            "optim/rules/",
            "optim/core.py: the optimizer has no",
            "optim/members.py: optimizer got",
            "optim/other_optimizers.py",
            "engine/optimizers.py",
            "optim/family.py",
            "optim/tiled_optimizer.py",
            "optim/offload.py",
            "optim/parameters.py",
            "transfer/__init__.py",
            "kernels/host.py: cpu_set",
            "kernels/host.py: this CPU",
        ),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Gradients and steps",
        "Raised by `step()`, by clipping, or where a gradient is touched that is on the host. Nothing was stepped, but "
        "for a `BrokenStateError`.",
        (
            "tiles/window.py",
            "optim/gradients.py",
            "optim/members.py: is in the parameter groups twice",
            "optim/members.py: a parameter group holds",
            "optim/members.py: is lazy",
            "optim/core.py: LongshoreError",
            "tiles/tiles.py",
            "tiles/tile.py",
            "tiles/: BrokenStateError",
            "transfer/: forked",
            "kernels/: Triton",
            "engine/engine.py",
            "engine/accumulation.py: LongshoreError",
        ),
        "`zero_grad()` discards the window, and training can go on.",
    ),
    Section(
        "State dictionaries",
        "`optimizer.load_state_dict` and writing to `optimizer.state`. A state that does not fit is refused whole.",
        ("optim/",),
        "Load a state that was saved from the same groups of parameters, in the same order.",
    ),
    Section(
        "Configuration",
        "A `ConfigError` lists all that is wrong, each as `path = value: rule; what to do`. The keys that are refused "
        "by name, each with what to do, are in [the list of keys](deepspeed_config.md).",
        ("engine/config/", "compat/config/"),
        "Change the key that the line begins with; [the list of keys](deepspeed_config.md) has its values.",
    ),
    Section(
        "initialize()",
        "Its arguments, the first weights, schedules, the data, and the ranks as they meet.",
        (
            "compat/engine.py",
            "engine/setup.py",
            "engine/creation.py",
            "engine/data.py",
            "engine/schedules.py",
            "engine/weights.py",
            "engine/precision.py",
            "engine/model_sharding.py",
            "units.py",
            "torch_versions.py",
            "engine/",
        ),
        "Change the argument that it names; [initialize()](reference/engine.md) says what each takes.",
    ),
    Section(
        "Values, and activation checkpointing",
        "`longshore.utils`, `longshore.gather` and `longshore.checkpointing`.",
        ("engine/access.py", "engine/activation_checkpointing.py", "compat/activation_checkpointing.py"),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Models larger than the device",
        "[`longshore.stream`](streaming.md).",
        ("streaming/", "activations.py"),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Launching and ranks",
        "Who the ranks are, and ranks that do different things. "
        "[The engine](engine.md#errors-and-going-on-after-them) says how to go on.",
        (
            "engine/ranks.py",
            "machine/",
            "store/agreement.py",
            "ranks/collective_thread.py",
            "ranks/meeting.py",
            "store/rounds.py",
            "checkpoint/rank_group.py",
        ),
        "Mend what it names, and start the ranks again.",
    ),
    Section(
        "Stage 3, FSDP2 and tensor parallelism",
        "[The guide](fully_sharded.md#limits) says what is taken and what is not.",
        ("stage3/", "store/", "ranks/", "engine/sharded_offload.py"),
        "Shard the model as [the guide](fully_sharded.md) shows, or use stage 2.",
    ),
    Section(
        "Importing DeepSpeed's checkpoints",
        "`longshore import-deepspeed`. Nothing is written where one of these is raised.",
        ("compat/checkpoint/",),
        _NOT_OURS,
    ),
    Section(
        "Checkpoints",
        "Saving, loading, exporting. Nothing was loaded, and what was there before still is, unless it says otherwise.",
        ("checkpoint/", "engine/checkpoints.py", "tiles/: checkpoint"),
        _DAMAGED,
    ),
    Section(
        "The command line",
        "One line after `longshore: `, and an exit code that is not 0.",
        ("cli/",),
        "Give the option as it says; `longshore COMMAND --help` lists them.",
    ),
    Section(
        "Scripts written for DeepSpeed",
        "What stands in for `deepspeed` in a script that is run as it is.",
        ("compat/",),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Inside other trainers",
        "What joins longshore to other libraries.",
        ("integrations/",),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Plans, reports and traces",
        "`longshore plan`, `longshore report` and `longshore.trace`.",
        ("plan/", "report/", "tracing/", "__init__.py", "lazily.py", "seam.py"),
        "Change what it names so that it is as the message says.",
    ),
    Section(
        "Inside",
        "Nobody meets these who does not call `longshore.kernels` and its like directly. Otherwise it is a bug in "
        "longshore: please report it.",
        ("kernels/", "transfer/", "tiles/", "layout/", "errors.py"),
        "Report it.",
    ),
)
