"""What ``longshore train`` is asked to do, as frozen numbers; whatever is refused is refused here."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from longshore.byte_sizes import parse_memory_budget
from longshore.cli.failure import SettingsError

if TYPE_CHECKING:  # it imports torch
    from longshore.engine import Config

NUMEL_MULTIPLE = 16
"""Every parameter's size is a multiple of this. torch's fused CPU AdamW rounds the last ``numel % 16``
elements differently (docs/optimizer.md), so with such sizes no element is one of those."""

BYTE_VOCABULARY = 256
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int


SIZES = {
    "tiny": Shape(hidden_size=64, intermediate_size=176, layers=2, heads=4),
    "small": Shape(hidden_size=256, intermediate_size=688, layers=4, heads=4),
    "medium": Shape(hidden_size=512, intermediate_size=1376, layers=8, heads=8),
    "large": Shape(hidden_size=896, intermediate_size=2560, layers=12, heads=14),
}
"""With the byte vocabulary: 0.14, 3.3, 25.6 and 121.6 million parameters."""

DTYPES = ("fp32", "bf16", "fp16")
SCHEDULES = ("constant", "linear", "cosine")
DEVICES = ("auto", "cpu", "cuda")
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class DataSettings:
    """``paths``: files and folders; none for the standard library. ``max_bytes``: how much of them is read."""

    paths: tuple[Path, ...] = ()
    max_bytes: int | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            _at_least("--max-bytes", self.max_bytes, 1)


@dataclass(frozen=True)
class ModelSettings:
    """A shape for random weights, or ``path``, a folder with a model in the format of transformers."""

    shape: Shape = SIZES["small"]
    path: Path | None = None
    dtype: str = "fp32"
    device: str = "auto"

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, DEVICES)
        if self.path is not None:
            return
        shape = self.shape
        _at_least("--layers", shape.layers, 1)
        _at_least("--heads", shape.heads, 1)
        for option, value in (
            ("--hidden-size", shape.hidden_size),
            ("--intermediate-size", shape.intermediate_size),
        ):
            _at_least(option, value, NUMEL_MULTIPLE)
            if value % NUMEL_MULTIPLE:
                raise SettingsError(f"{option} must be a multiple of {NUMEL_MULTIPLE}, not {value}")
        if shape.hidden_size % (2 * shape.heads):
            raise SettingsError(
                f"--hidden-size {shape.hidden_size} does not split into {shape.heads} heads of an even size: "
                f"change --hidden-size or --heads"
            )


@dataclass(frozen=True)
class OptimizerSettings:
    """``clip`` 0 is no clipping. Matrices decay; vectors (the norms' weights) do not. ``schedule`` None: the
    engine's own, which a configuration file names."""

    lr: float = 1e-3
    schedule: str | None = "cosine"
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    offload: bool = True
    release_gradients: bool = False
    speculation_memory: int | str = 0
    """As in ``longshore.Offload``."""

    def __post_init__(self) -> None:
        if self.schedule is not None:
            _one_of("--schedule", self.schedule, SCHEDULES)
        _at_least("--warmup", self.warmup, 0)
        for option, value in (("--lr", self.lr), ("--weight-decay", self.weight_decay), ("--clip", self.clip)):
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"{option} must be a number that is not negative, not {value}")
        if self.release_gradients and not self.offload:
            raise SettingsError(
                "--release-gradients sends gradients to the host, where --no-offload keeps no state: leave one out"
            )
        if self.speculation_memory and not self.offload:
            raise SettingsError(
                "--speculation-memory is for stepping on the host, where --no-offload keeps no state: leave one out"
            )


@dataclass(frozen=True)
class LoopSettings:
    """``seq_len``: tokens a sequence; ``batch_size``: sequences a backward; ``accumulation``: backwards a step,
    each on ``ranks`` processes at once.

    ``eval_every`` 0 is no validation; otherwise there is also one before the first and one after the last step.
    """

    seq_len: int = 128
    steps: int = 500
    batch_size: int = 8
    accumulation: int = 1
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 8
    log_every: int = 10
    ranks: int = 1

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--seq-len", self.seq_len, 1),
            ("--steps", self.steps, 1),
            ("--batch-size", self.batch_size, 1),
            ("--accumulation", self.accumulation, 1),
            ("--seed", self.seed, 0),
            ("--eval-every", self.eval_every, 0),
            ("--eval-batches", self.eval_batches, 1),
            ("--log-every", self.log_every, 1),
        ):
            _at_least(option, value, least)
        if self.seed > MAX_SEED:
            raise SettingsError(f"--seed must be at most {MAX_SEED}, not {self.seed}")

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size * self.accumulation * self.ranks


@dataclass(frozen=True)
class EngineSettings:
    """Training goes through ``longshore.initialize``.

    Attributes:
        config: everything that file and command line say, for the ranks of this run.
        file: of ``--config``, or None.
        notes: what is worth saying about the file, once.
        stops_at_overflow: a norm that is no number ends training, since nobody asked to skip such steps.
    """

    config: Config
    file: Path | None = None
    notes: tuple[str, ...] = ()
    stops_at_overflow: bool = True


@dataclass(frozen=True)
class TrainSettings:
    """All of a run. ``out`` None writes nothing; ``engine`` None trains in one process without the engine.
    ``trace``: the page of a trace, with JSON beside it; None: nothing is traced. ``save_every``: steps between
    checkpoints, 0 for none. ``resume``: go on with the run in ``out``."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    out: Path | None = None
    overwrite: bool = False
    engine: EngineSettings | None = None
    trace: Path | None = None
    save_every: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        _at_least("--save-every", self.save_every, 0)
        for option, given in (("--save-every", self.save_every), ("--resume", self.resume)):
            if given and self.out is None:
                raise SettingsError(f"{option} needs --out DIR, the folder of the run")
        if self.resume and self.overwrite:
            raise SettingsError("--resume goes on with the run in --out, and --overwrite replaces it: leave one out")
        if self.overwrite and self.out is None:
            raise SettingsError("--overwrite needs --out DIR: without it nothing is written")
        if self.out is not None and self.model.path is not None and self.out.resolve() == self.model.path.resolve():
            raise SettingsError(f"--out {self.out} is the folder of --model: choose another, so that it is kept")


def choose_shape(size: str | None, model: Path | None, parts: dict[str, int | None]) -> Shape:
    """The preset ``size`` (default: small) with the given ``parts`` in place of its own.

    With ``model`` the shape is that model's, so a size or a part beside it is refused.
    """
    given = {option: value for option, value in parts.items() if value is not None}
    if model is not None:
        named = (["--size"] if size is not None else []) + ["--" + option.replace("_", "-") for option in given]
        if named:
            raise SettingsError(f"{named[0]} and --model exclude each other: the model in {model} has its own shape")
        return SIZES["small"]
    size = "small" if size is None else size
    _one_of("--size", size, tuple(SIZES))
    preset = SIZES[size]
    return Shape(**{**preset.__dict__, **given})


def parse_speculation_memory(text: str) -> int | str:
    """What ``longshore.Offload`` takes: ``auto``, a percentage, a size with a unit, or an integer number of bytes."""
    value = int(text) if text.isdecimal() and len(text) < 20 else text
    try:
        parse_memory_budget(value)
    except ValueError as error:
        raise SettingsError(f"--speculation-memory {text}: {error}") from None
    return value


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise SettingsError(f"{option} must be at least {least}, not {value}")


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise SettingsError(f"{option} {value!r} is not known; {hint}choose from {', '.join(known)}")
