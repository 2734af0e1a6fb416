"""``longshore train`` and ``demo``: their settings, whose annotated fields are the options, and all checks of values.

job.py and comparison.py do the work, and are imported only for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from longshore.cli.options import CommandSettings, Option
from longshore.cli.terminal import CommandError, SettingsError, os_reason
from longshore.seam import StateFormat, parse_memory_budget

if TYPE_CHECKING:  # it imports torch
    from longshore import Config

NUMEL_MULTIPLE = 16
"""Every parameter's size is a multiple of this, since torch's fused CPU AdamW rounds the last ``numel % 16`` elements
differently (docs/optimizer.md)."""

BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise SettingsError(
                f"--hidden-size {self.hidden_size} does not split into {self.heads} heads of an even size: "
                f"change --hidden-size or --heads"
            )


SIZES = {
    "tiny": Shape(hidden_size=64, intermediate_size=176, layers=2, heads=4),
    "small": Shape(hidden_size=256, intermediate_size=688, layers=4, heads=4),
    "medium": Shape(hidden_size=512, intermediate_size=1376, layers=8, heads=8),
    "large": Shape(hidden_size=896, intermediate_size=2560, layers=12, heads=14),
}
"""With the byte vocabulary: 0.14, 3.3, 25.6 and 121.6 million parameters."""

DTYPES = ("fp32", "bf16", "fp16")

_data, _model, _training, _engine, _output = (
    partial(Option, panel=panel) for panel in ("Data", "Model", "Training", "Engine", "Output")
)
_part = partial(_model, "Replaces the number of --size.", at_least=1)
_width = partial(_part, at_least=NUMEL_MULTIPLE, at_most=1 << 20, multiple_of=NUMEL_MULTIPLE)

# Options of more than one command; each command has its own default.
DataPaths = Annotated[
    tuple[Path, ...],
    _data("File or folder of plain text; repeatable. Default: Python's standard library.", flag="--data"),
]
Size = Annotated[str, _model("Size of a Llama with random weights.", choices=tuple(SIZES))]
DECAYING = ("linear", "cosine")
"""Schedules in which the learning rate of a step follows from the number of all steps."""
Steps = Annotated[int, _training("Optimizer steps.", at_least=1)]
SeqLen = Annotated[int, _training("Tokens in a sequence.", at_least=1)]
BatchSize = Annotated[int, _training("Sequences in a backward, on each rank.", at_least=1)]
Accumulation = Annotated[int, _training("Backwards in a step.", at_least=1)]
Clip = Annotated[float, _training("Largest norm of all gradients together; 0: do not clip.", at_least=0)]
Seed = Annotated[int, _training("Seed of weights and order of data.", at_least=0, at_most=2**63 - 1)]


@dataclass(frozen=True)
class DataSettings(CommandSettings):
    """Text to train on. ``paths``: files and folders; if empty, the standard library is read."""

    paths: DataPaths = ()
    max_bytes: Annotated[int | None, _data("Read at most this much text.", at_least=1)] = None
    tokenizer: Annotated[Path | None, _data("Local tokenizer. Default: that of --model, or else bytes.")] = None

    def check_paths(self) -> None:
        """Raise CommandError if a path is wrong. Nothing is imported for that, so that users need not wait for it."""
        check_data(self.paths)
        if self.tokenizer is not None and not self.tokenizer.exists():
            raise CommandError(f"--tokenizer {self.tokenizer} does not exist: give a folder or a tokenizer.json file")


def check_data(paths: tuple[Path, ...]) -> None:
    """Raise CommandError if a file or folder to read is not there."""
    for path in paths:
        mode_of_data(path)


def mode_of_data(path: Path) -> int:
    """Return the mode of a file or folder to read."""
    try:
        return path.stat().st_mode
    except OSError as error:
        raise CommandError(f"cannot read --data {path}: {os_reason(error)}") from error


@dataclass(frozen=True)
class ShapeSettings(CommandSettings):
    """A preset, and numbers that replace its own."""

    size: Size = "small"
    hidden_size: Annotated[int | None, _width()] = None
    intermediate_size: Annotated[int | None, _width()] = None
    layers: Annotated[int | None, _part(at_most=10_000)] = None
    heads: Annotated[int | None, _part(at_most=1 << 16)] = None

    def shape(self) -> Shape:
        return Shape(**{name: getattr(self, name) or value for name, value in SIZES[self.size].__dict__.items()})


_STREAM = (
    "Keep the parameters in host memory, and copy them to the device block by block as they are used: for models "
    "larger than the device. The weights are the same bits. It means --release-gradients, or goes with --stage 3."
)

_CHECKPOINTING = (
    "Backward computes each block again, instead of keeping what it computed; with --stream the inputs of the blocks "
    "rest on the host, too. The weights are the same bits."
)


@dataclass(frozen=True)
class ModelSettings(CommandSettings):
    """A shape for random weights, or ``path``, a folder with a model in the format of transformers."""

    shape: Shape = SIZES["small"]
    path: Annotated[Path | None, _model("Folder with a causal language model to train.", flag="--model")] = None
    dtype: Annotated[str, _model("Parameters' dtype. fp16 needs --stage or --config.", choices=DTYPES)] = "fp32"
    device: Annotated[
        str, _model("cpu, or a type of accelerator (cuda, xpu, ...). auto: the accelerator, if there is one.")
    ] = "auto"
    stream: Annotated[bool, _model(_STREAM)] = False
    activation_checkpointing: Annotated[bool, _model(_CHECKPOINTING)] = False

    def check_path(self) -> None:
        """Raise CommandError if ``path`` is no folder."""
        if self.path is not None and not self.path.is_dir():
            raise CommandError(f"--model {self.path} is not a folder: give one with config.json and model.safetensors")


def _parse_speculation_memory(text: str) -> int | str:
    """Parse a value that ``longshore.Offload`` takes: ``auto``, a percentage, a size, or an integer number of bytes."""
    value = int(text) if text.isdecimal() and len(text) < 20 else text
    parse_memory_budget(value)
    return value


_MEMORY = (
    "Host memory for stepping while backward runs: 25% (100%: a spare for every tile), 8GiB, a number of bytes, or "
    "auto. Needs --release-gradients, --stage or --config."
)
_ACCUMULATE = (
    "Where gradients of several batches are added: on the device, for 4 bytes a parameter there, on the host, or "
    "(auto) on the device while it has room. Needs --release-gradients, --stage or --config."
)
_PLAIN = (
    "Train with torch.optim in place of longshore, to compare: state on the device, fp32 masters for bf16. "
    "Not with --stage or --config."
)
STATES = tuple(each.value for each in StateFormat)
_STATES = (
    "Format of AdamW's moments: bf16 (rounded stochastically) takes 10 bytes a parameter instead of 14, 8bit 8.1. "
    "Masters stay fp32."
)
_RULE = (
    "AdamW for everything, or Muon for the hidden matrices and AdamW for the rest, with rates adjusted so that one "
    "--lr is for both."
)
MUON_RATES = {"adjust_lr_fn": "match_rms_adamw"}
"""How the learning rates of Muon's groups follow from ``--lr``."""


@dataclass(frozen=True)
class OptimizerSettings(CommandSettings):
    """The optimizer and its schedule; None: a configuration file names the schedule, and the engine follows it."""

    rule: Annotated[str, _training(_RULE, flag="--optimizer", choices=("adamw", "muon"))] = "adamw"
    lr: Annotated[float, _training("Highest learning rate.", at_least=0)] = 1e-3
    schedule: Annotated[str | None, _training("Learning rate after the warmup.", choices=("constant", *DECAYING))] = (
        "cosine"
    )
    warmup: Annotated[int, _training("Steps in which the learning rate rises to --lr.", at_least=0)] = 20
    weight_decay: Annotated[float, _training("Weight decay of matrices. Vectors never decay.", at_least=0)] = 0.1
    clip: Clip = 1.0
    offload: Annotated[
        bool, _training("Optimizer state in host memory, or on the device.", flag="--offload/--no-offload")
    ] = True
    plain: Annotated[bool, _training(_PLAIN)] = False
    release_gradients: Annotated[
        bool, _training("Send gradients to the host during backward, and accumulate and clip them there.")
    ] = False
    speculation_memory: Annotated[
        int | str, _training(_MEMORY, parse=_parse_speculation_memory, metavar="<memory>")
    ] = 0
    accumulate: Annotated[str, _training(_ACCUMULATE, choices=("auto", "device", "host"))] = "auto"
    states: Annotated[str, _training(_STATES, choices=STATES)] = "fp32"
    states_seed: Annotated[
        int, _training("Seed of the rounding that --states does.", at_least=0, at_most=2**63 - 1)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.states != "fp32" and (self.plain or self.rule == "muon"):
            why = "--plain trains with torch.optim" if self.plain else "the states of --optimizer muon are fp32 always"
            raise SettingsError(f"--states {self.states} is for longshore's AdamW, and {why}: leave one out")
        for option, given in (
            ("--release-gradients sends gradients to the host", self.release_gradients),
            ("--speculation-memory is for stepping on the host", self.speculation_memory),
            ("--accumulate is for gradients on their way to the host", self.accumulate != "auto"),
        ):
            if given and not self.on_host:
                why = "--plain" if self.plain else "--no-offload"
                raise SettingsError(f"{option}, and {why} keeps the optimizer state on the device: leave one out")

    @property
    def on_host(self) -> bool:
        """Whether the state is in host memory."""
        return self.offload and not self.plain


@dataclass(frozen=True)
class LoopSettings(CommandSettings):
    """The batches, how often something is measured and printed, and ``ranks``, the number of processes.

    With ``eval_every`` above 0 there is also a validation before the first step and one after the last.
    """

    seq_len: SeqLen = 128
    steps: Steps = 500
    batch_size: BatchSize = 8
    accumulation: Accumulation = 1
    seed: Seed = 0
    eval_every: Annotated[int, _output("Steps between validations; 0: no validation.", at_least=0)] = 100
    eval_batches: Annotated[int, _output("Batches in a validation.", at_least=1)] = 8
    log_every: Annotated[int, _output("Steps between logged lines.", at_least=1)] = 10
    ranks: int = 1

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size * self.accumulation * self.ranks


_STAGE = (
    "Train with longshore.initialize, also on several ranks (torchrun -m longshore train ...), which share nothing "
    "(0), optimizer state (1), gradients too (2), or parameters too (3)."
)
_CONFIG = (
    "DeepSpeed JSON file for longshore.initialize. It decides the options that are not given; those that are given "
    "must agree with it."
)


@dataclass(frozen=True)
class EngineSettings:
    """The configuration of a run that goes through ``longshore.initialize``.

    Attributes:
        config: everything that file and command line say, for the ranks of this run.
        notes: remarks about the file of ``--config``, to be shown once.
        stops_at_overflow: whether a gradient norm that is NaN or infinite ends training. Otherwise the step is
            skipped, under a dynamic loss scale.
    """

    config: Config
    notes: tuple[str, ...] = ()
    stops_at_overflow: bool = True


_TRACE = (
    "HTML page for a trace of every tile during three steps in the middle of the run. The same as JSON for Perfetto "
    "is written beside it."
)
_SAVE = "Steps between checkpoints in --out, of which the newest two are kept, with one at the end; 0: none."
_RESUME = (
    "Continue the run in --out from its newest checkpoint; the weights are those of a run that was never stopped. "
    "Ranks, accumulation and stage may change as far as a step's gradients are added in the same order, and --steps "
    "may grow where the schedule does not follow from it (--schedule constant)."
)
_RESUME_AUTO = (
    "Continue the run in --out, or begin one if there is none yet, so that a script that is queued again is one line; "
    "--resume auto is the same."
)
_TWO_RANKS = "Also train on two ranks, with ZeRO-1, 2 and 3; one run is killed and resumed."


@dataclass(frozen=True)
class TrainSettings(CommandSettings):
    """A whole run. With ``stage`` or ``config`` it goes through ``longshore.initialize``, and ``engine`` is set before
    it begins. Otherwise it is one process."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    out: Annotated[Path | None, _output("Folder for the weights, the metrics and the loss curve.")] = None
    overwrite: Annotated[bool, _output("Replace the run that is in --out.")] = False
    stage: Annotated[int | None, _engine(_STAGE, at_least=0, at_most=3)] = None
    config: Annotated[Path | None, _engine(_CONFIG)] = None
    engine: EngineSettings | None = None
    trace: Annotated[Path | None, _output(_TRACE)] = None
    save_every: Annotated[int, _output(_SAVE, at_least=0)] = 0
    resume: Annotated[bool, _output(_RESUME)] = False
    resume_auto: Annotated[bool, _output(_RESUME_AUTO)] = False

    @property
    def continues(self) -> bool:
        """Whether a run in ``out`` is continued."""
        return self.resume or self.resume_auto

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, given in (("--save-every", self.save_every), ("--resume", self.continues), ("--trace", self.trace)):
            if given and self.out is None and option != "--trace":
                raise SettingsError(f"{option} needs --out DIR, the folder of the run")
            if given and self.optimizer.plain:
                raise SettingsError(f"{option} is for runs of longshore, and --plain trains without it: leave one out")
        if self.model.stream and not self.optimizer.on_host:
            why = "--plain" if self.optimizer.plain else "--no-offload"
            raise SettingsError(
                f"--stream keeps parameters on the host, and {why} the optimizer state on the device: leave one out"
            )
        if self.continues and self.overwrite:
            raise SettingsError("--resume continues the run in --out, and --overwrite replaces it: leave one out")
        if self.overwrite and self.out is None:
            raise SettingsError("--overwrite needs --out DIR: without it nothing is written")
        if self.out is not None and self.model.path is not None and self.out.resolve() == self.model.path.resolve():
            raise SettingsError(f"--out {self.out} is the folder of --model: choose another, so that it is kept")


@dataclass(frozen=True)
class DemoSettings(CommandSettings):
    """The runs of the demo. With ``seconds``, which is for all of them together, ``steps`` does not count."""

    size: Size = "small"
    steps: Steps = 60
    seconds: Annotated[float | None, _training("Choose the steps so that all runs together take this long.")] = None
    seq_len: SeqLen = 128
    batch_size: BatchSize = 4
    seed: Seed = 0
    data: DataPaths = ()
    out: Annotated[Path | None, _output("PNG file for the loss curves.")] = None
    two_ranks: Annotated[bool, _training(_TWO_RANKS, flag="--two-ranks/--no-two-ranks")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise SettingsError(f"--seconds must be more than 0, not {self.seconds}")
