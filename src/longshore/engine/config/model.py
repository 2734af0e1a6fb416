"""``Config``: all settings of the engine, typed and frozen; batch sizes; and which settings decide the bits."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import model_validator
from pydantic_core import to_jsonable_python

from longshore.engine.config.base import ConfigError, FrozenModel, Problem
from longshore.engine.config.optimizers import OptimizerConfig, check_encodable, check_states_seed
from longshore.engine.config.schedulers import SchedulerConfig
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    DTYPE,
    FRACTION,
    LARGEST_SCALE,
    LOW_DTYPE,
    MOST_INTEGER,
    POSITIVE,
    TEXT,
    Budget,
    Either,
    Items,
    Number,
    OneOf,
)
from longshore.layout.formats import StateFormat

DtypeName = Literal["fp32", "bf16", "fp16"]
StatesName = Literal["fp32", "bf16", "8bit"]

_Count = Annotated[int, AT_LEAST_1]
_MaybeCount = Annotated[int | None, AT_LEAST_1]
_Text = Annotated[str, TEXT]
_MaybeText = Annotated[str | None, TEXT]
_DEVICE = OneOf(
    ("none", "cpu"), {"nvme": 'optimizer state on NVMe is not kept by longshore; use "cpu", whose state is sharded'}
)
_PARAM_DEVICE = OneOf(
    ("none", "cpu"), {"nvme": 'parameters on NVMe are not kept by longshore; use "cpu", where they rest in host memory'}
)
_STATES = OneOf(tuple(each.value for each in StateFormat))
_ACCUMULATE = OneOf(("auto", "device", "host"))
_SCALE = Number(above=0, maximum=LARGEST_SCALE)
_WRAP_POLICY = Either((OneOf(("auto",)), Number(1, of="elements", whole=True), Items(TEXT)))

OF_EACH_RANK = ("autocast", "cast_inputs", "loss_scaling", "gradient_clipping", "scheduler")
"""Fields of ``Config`` that change bits on one rank too. Those of the optimizer are restored with its state, which also
says which ``states`` and ``states_seed`` it has."""

BETWEEN_RANKS = ("communication_dtype", "accumulation_dtype", "prescale_gradients", "gradient_predivide_factor")
"""Fields that change bits on several ranks. So does ``stage``, see :func:`order_of_sums`."""


class BatchNumbers(NamedTuple):
    """Samples in a step over all ranks, samples in a backward on one rank, and backwards in a step. None: not given."""

    train: int | None
    micro: int | None
    steps: int | None


class Names(NamedTuple):
    """Names of the three numbers in the user's file or arguments."""

    train: str
    micro: str
    steps: str


OURS = Names("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
_MOST_TRIES = 1 << 16


def resolve(given: BatchNumbers, world_size: int | None, names: Names = OURS) -> BatchNumbers:
    """Compute all three numbers from those that are given; by default a micro batch is 1 sample and a step 1 backward.

    While the number of ranks is not known (``world_size`` None), the numbers are checked and returned as they are.

    Raises:
        ValueError: the numbers contradict each other (the message names the one to change, and its value), or
            ``world_size`` is not a number of ranks.
    """
    train, micro, steps = given
    if world_size is None:
        if train is not None and train % ((micro or 1) * (steps or 1)):
            raise ValueError(_does_not_multiply(given, None, names))
        return given
    check_world_size(world_size)
    if train is None:
        micro, steps = micro or 1, steps or 1
        train = micro * steps * world_size
        if train > MOST_INTEGER:
            raise ValueError(
                f"is {names.micro} {micro} x {names.steps} {steps} x {world_size} ranks = {train}, and integers have "
                "at most 64 bits; lower one of them"
            )
        return BatchNumbers(train, micro, steps)
    if micro is None:
        steps = steps or 1
        micro, rest = divmod(train, steps * world_size)
    elif steps is None:
        steps, rest = divmod(train, micro * world_size)
    else:
        rest = train - micro * steps * world_size
    if rest:
        raise ValueError(_does_not_multiply(given, world_size, names))
    return BatchNumbers(train, micro, steps)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless ``world_size`` is a number of ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is a number of ranks, at least 1, not {world_size!r}")


def _does_not_multiply(given: BatchNumbers, world_size: int | None, names: Names) -> str:
    """Describe the rule, the numbers, and each change of one number that corrects them."""
    train, micro, steps = given
    assert train is not None
    factors = [(name, number) for name, number in ((names.micro, micro), (names.steps, steps)) if number is not None]
    product = math.prod([number for _, number in factors]) * (world_size or 1)
    said = [f"{name} {number}" for name, number in factors]
    if world_size is not None:
        said.append(f"{world_size} rank{'s' if world_size > 1 else ''}")
    exact = len(factors) == 2 and world_size is not None
    relation = "is not" if exact else "is not a multiple of"
    below = train // product * product
    fits = (product,) if exact or not below else (below, below + product)
    ways = [f"{names.train} to {' or '.join(map(str, fits))}"]
    for name, number in factors:
        best, rest = divmod(train, product // number)
        if rest == 0:
            if not exact:  # Another number is computed from this one, so any divisor is valid: the nearest below.
                most = min(best, number)
                divisors = (divisor for divisor in range(most, max(0, most - _MOST_TRIES), -1) if best % divisor == 0)
                best = next(divisors, None)  # of numbers with many digits there may be none that is near
            if best is not None:
                ways.append(f"{name} to {best}")
    return (
        f"must be {names.micro} x {names.steps} x ranks, and {train} {relation} {' x '.join(said)} = {product}; "
        f"change {', or '.join(ways)}"
    )


class TensorBoardConfig(FrozenModel):
    """TensorBoard's event files in ``output_path/job_name``."""

    output_path: _Text = "runs"
    job_name: _Text = "longshore"


class CsvConfig(FrozenModel):
    """``metrics.csv`` in ``output_path/job_name``, with a row for each step."""

    output_path: _Text = "runs"
    job_name: _Text = "longshore"


class WandbConfig(FrozenModel):
    """A run of Weights & Biases, or the one that is active already. ``team`` is its entity."""

    project: _MaybeText = None
    team: _MaybeText = None
    group: _MaybeText = None


class FlopsProfilerConfig(FrozenModel):
    """A profile of one step: times, and floating-point operations as ``torch.utils.flop_counter`` counts them.

    Attributes:
        profile_step: how many steps come before that one.
        module_depth: depth of the modules of which the largest are listed, from the model's own, 0; -1: any.
        top_modules: how many classes are listed for each depth.
        detailed: whether every module is listed.
        output_file: where the profile is written; None: it is printed.
    """

    profile_step: Annotated[int, AT_LEAST_0] = 1
    module_depth: Annotated[int, Number(-1, whole=True)] = -1
    top_modules: Annotated[int, AT_LEAST_0] = 1
    detailed: bool = True
    output_file: _MaybeText = None


MONITORS: dict[str, type[FrozenModel]] = {
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CsvConfig,
}
"""Models of the monitors by their fields in ``Config``, which are also their sections of a file."""


class LossScaling(FrozenModel):
    """How the loss is scaled before backward. An overflow skips the step on all ranks.

    Attributes:
        scale: the static scale. None: the scale is dynamic, as the other fields say.
        initial_scale_power: the first scale is two to this power.
        window: steps without an overflow after which the scale doubles.
        hysteresis: overflows before the scale halves.
        consecutive_hysteresis: a step without an overflow refills the hysteresis.
        min_scale: the scale never falls below this.
    """

    scale: Annotated[float | None, _SCALE] = None
    initial_scale_power: Annotated[int, Number(0, maximum=127, whole=True)] = 16
    window: _Count = 1000
    hysteresis: _Count = 2
    consecutive_hysteresis: bool = False
    min_scale: Annotated[float, _SCALE] = 1.0

    @model_validator(mode="after")
    def _starts_above_the_minimum(self) -> LossScaling:
        if self.scale is None and self.min_scale > 2.0**self.initial_scale_power:
            raise ValueError(
                f"min_scale {self.min_scale:g} is above the first scale, 2 ** {self.initial_scale_power} = "
                f"{2**self.initial_scale_power}; lower it, or raise initial_scale_power"
            )
        return self


class Config(FrozenModel):
    """Settings of the engine. :meth:`resolved` fills in the batch numbers that are not given.

    Attributes:
        train_batch_size: samples in a step, over all ranks: micro batch size x accumulation steps x ranks. Any of these
            three numbers that is not given follows from the others.
        micro_batch_size: samples in a backward, on one rank.
        gradient_accumulation_steps: backwards in a step.
        managed_accumulation: ``step()`` applies once ``gradient_accumulation_steps`` backwards have run. False: every
            ``step()`` applies whatever backwards came before it, also those of the user's own ``loss.backward()``;
            ``engine.backward()`` still divides by ``gradient_accumulation_steps``.
        drop_last: the loader leaves out the last batch if it is not full.
        stage: what is sharded. 0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too.
        offload_device: where optimizer state is kept and stepped, as ``device`` in :class:`longshore.Offload`.
        param_device: ``"cpu"``: parameters rest in host memory, and are copied to the device block by block as they are
            used, as by :func:`longshore.stream`; blocks are chosen by ``wrap_policy``. Needs ``stage`` 3 and
            ``offload_device`` cpu.
        reduce_bucket_numel: elements whose gradients are reduced together; at stages 2 and 3 with ``overlap_comm`` half
            of them, so that one half fills while the other is on its way; at stage 3 no more than is gathered
            together. Any size gives the same bits.
        allgather_bucket_numel: elements that are gathered together. Any size gives the same bits.
        overlap_comm: gradients are reduced while backward runs. The weights are the same bits either way.
        wrap_policy: at stage 3, the modules that are gathered as a whole: the transformer blocks (``"auto"``), those of
            the named classes, or those with at least so many elements.
        leaf_classes: at stage 3, classes (by name, with or without their module's) whose modules are gathered whole,
            and none of their submodules by itself: mixtures of experts, in which ranks run different submodules.
        leaf_names: the same for modules by their names in the model.
        leaf_name_suffixes: the same for modules whose names end so.
        compute_grad_norm: each step measures the norm of the gradients for ``engine.get_global_grad_norm()``, which
            returns None otherwise unless clipping or ``loss_scaling`` needs the norm. No weight depends on it.
        gather_on_save: what ``engine.zero_gather_16bit_weights_on_model_save()`` returns, by which Accelerate and
            transformers decide whether they save whole weights at stage 3. ``save_16bit_model()`` always does.
        tile_numel: elements that are copied and stepped at a time. Default: 4194304, or 16777216 if nothing is copied;
            with more than 16 host threads more, up to 33554432.
        threads: host threads that step. Default: the ranks of a machine share the CPUs that they may use, with a
            thread for each CPU.
        cpu_set: logical CPUs that those threads may run on. Default: any.
        cpu_share: share, from 0 (one CPU) to 1, of the CPUs that this process may use, on which host threads run: the
            last ones. ``cpu_set`` names them instead.
        speculation_memory: host memory for stepping tiles while backward still runs, as in :class:`longshore.Offload`
            (100 % is a spare for every tile). Needs ``offload_device`` cpu.
        offload_ratio: the share of the optimizer's state that is on the host, as ``ratio`` in
            :class:`longshore.Offload`. The rest, which belongs to the parameters whose gradients come last, stays on
            the device and is stepped there. The weights are the same bits. Needs ``offload_device`` cpu.
        states: format of the optimizer's states, wherever they are, as in :class:`longshore.Offload`: ``"fp32"``;
            ``"bf16"``, rounded stochastically, for 10 bytes of memory a parameter instead of 14; or ``"8bit"``, for
            8.1. Masters are float32 in each. For Adam, AdamW, Lion, Adagrad and SGD with momentum.
        states_seed: a number on which the random bits of that rounding depend, from 0 to 2**63 - 1.
        detect_writes: each step finds what was written to parameters where torch cannot see it, as in
            :class:`longshore.Offload`.
        accumulate: where the gradients of several backwards are added, ``"auto"``, ``"device"`` or ``"host"``, as in
            :class:`longshore.Offload`. With several ranks, stages 0 and 1 add them on the device, and stages 2 and 3
            this rank's shard of them where it says. Needs ``offload_device`` cpu.
        dtype: dtype to which parameters are cast when the engine is made; buffers keep theirs. None: parameters stay as
            they are. Masters are float32.
        autocast: dtype of ``torch.autocast`` around forward; None: no autocast.
        loss_scaling: how the loss is scaled. None: it is not, and NaN and infinity are applied as torch applies them.
            When not given: dynamic with fp16 (``dtype`` or ``autocast``), otherwise None.
        cast_inputs: floating inputs of forward are cast to ``dtype``.
        communication_dtype: dtype in which gradients are sent. Default: their own; they are summed in float32, so that
            nothing is rounded in between.
        accumulation_dtype: dtype in which several ranks add backwards on the device before they reduce (stages 0 and 1,
            ``no_sync()``). The host always adds in float32.
        gradient_clipping: largest global L2 norm; None: no clipping.
        prescale_gradients: gradients are divided by the number of ranks before they are summed, not after.
        gradient_predivide_factor: gradients are divided by it before they are summed, and by ranks / factor after.
        optimizer: the optimizer, with its options. None: ``initialize(optimizer=...)`` gets one.
        scheduler: the schedule, with its parameters. None: ``initialize(lr_scheduler=...)`` may get one.
        tensorboard: rank 0 writes the metrics of every step to TensorBoard: loss, learning rate, norm, times,
            bandwidths, hit rate, memory. None: it does not.
        wandb: rank 0 writes these metrics to Weights & Biases.
        csv_monitor: rank 0 writes these metrics to a CSV file.
        flops_profiler: rank 0 prints the times and the floating-point operations of one step. None: it does not.
        steps_per_print: rank 0 prints a line every so many steps. Default: never.
        wall_clock_breakdown: the lines of ``steps_per_print`` have the times of forward, backward and step.
        dump_state: rank 0 prints ``engine.explain()`` when the engine is made.
        cpu_checkpointing: ``longshore.checkpointing`` keeps saved activations in host memory.

    Raises:
        ConfigError: a ValueError that names every wrong field.
    """

    train_batch_size: _MaybeCount = None
    micro_batch_size: _MaybeCount = None
    gradient_accumulation_steps: _MaybeCount = None
    managed_accumulation: bool = True
    drop_last: bool = False

    stage: Annotated[Literal[0, 1, 2, 3], OneOf((0, 1, 2, 3))] = 0
    offload_device: Annotated[Literal["none", "cpu"], _DEVICE] = "none"
    param_device: Annotated[Literal["none", "cpu"], _PARAM_DEVICE] = "none"
    reduce_bucket_numel: _Count = 500_000_000
    allgather_bucket_numel: _Count = 500_000_000
    overlap_comm: bool = True
    wrap_policy: Annotated[int | str | tuple[str, ...], _WRAP_POLICY] = "auto"
    leaf_classes: Annotated[tuple[str, ...], Items(TEXT)] = ()
    leaf_names: Annotated[tuple[str, ...], Items(TEXT)] = ()
    leaf_name_suffixes: Annotated[tuple[str, ...], Items(TEXT)] = ()
    compute_grad_norm: bool = False
    gather_on_save: bool = True

    tile_numel: _MaybeCount = None
    threads: Annotated[int | None, Number(1, maximum=4096, whole=True)] = None
    cpu_set: Annotated[tuple[int, ...] | None, Items(AT_LEAST_0)] = None
    cpu_share: Annotated[float | None, FRACTION] = None
    speculation_memory: Annotated[int | str, Budget()] = 0
    offload_ratio: Annotated[float, FRACTION] = 1.0
    states: Annotated[StatesName, _STATES] = "fp32"
    states_seed: Annotated[int, Number(minimum=0, whole=True)] = 0
    detect_writes: bool = True
    accumulate: Annotated[Literal["auto", "device", "host"], _ACCUMULATE] = "auto"

    dtype: Annotated[DtypeName | None, DTYPE] = None
    autocast: Annotated[Literal["bf16", "fp16"] | None, LOW_DTYPE] = None
    loss_scaling: LossScaling | None = None
    cast_inputs: bool = False
    communication_dtype: Annotated[DtypeName | None, DTYPE] = None
    accumulation_dtype: Annotated[DtypeName, DTYPE] = "fp32"

    gradient_clipping: Annotated[float | None, POSITIVE] = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, POSITIVE] = 1.0

    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None

    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    csv_monitor: CsvConfig | None = None
    flops_profiler: FlopsProfilerConfig | None = None
    steps_per_print: _MaybeCount = None
    wall_clock_breakdown: bool = False
    dump_state: bool = False
    cpu_checkpointing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fp16_is_scaled(cls, values: Any) -> Any:
        # An unknown dtype is refused by its own field, with its own message.
        is_given = not isinstance(values, dict) or "loss_scaling" in values
        if not is_given and "fp16" in (DTYPE.read(values.get("dtype")), DTYPE.read(values.get("autocast"))):
            return {**values, "loss_scaling": LossScaling()}
        return values

    @model_validator(mode="after")
    def _states_fit(self) -> Config:
        try:
            check_states_seed(self.states, self.states_seed)
        except ValueError as error:
            raise ValueError(f"states_seed {self.states_seed} {error}") from None
        if self.optimizer is not None:
            try:
                check_encodable(self.optimizer.type, self.states)
            except ValueError as error:
                raise ValueError(f"states {self.states} {error}") from None
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.autocast is not None and self.dtype in ("bf16", "fp16"):
            raise ValueError(
                f"autocast {self.autocast} is for float32 parameters, and dtype {self.dtype} casts them; choose one"
            )
        if self.cast_inputs and self.dtype is None:
            raise ValueError("cast_inputs casts to dtype, and dtype is None; set dtype, or leave cast_inputs out")
        if self.speculation_memory and self.offload_device != "cpu":
            raise ValueError(
                "speculation_memory is for stepping on the host while backward runs, and offload_device is "
                f"{self.offload_device}; set it to cpu, or leave speculation_memory out"
            )
        if self.accumulate != "auto" and self.offload_device != "cpu":
            raise ValueError(
                "accumulate is where gradients on their way to the host are added, and offload_device is "
                f"{self.offload_device}; set it to cpu, or leave accumulate out"
            )
        if self.offload_ratio != 1.0 and self.offload_device != "cpu":
            raise ValueError(
                f"offload_ratio {self.offload_ratio:g} is the share of the optimizer's state that is on the host, and "
                f"offload_device is {self.offload_device}; set it to cpu, or leave offload_ratio out"
            )
        if self.param_device == "cpu":
            for name, wanted in (("stage", 3), ("offload_device", "cpu"), ("offload_ratio", 1.0), ("autocast", None)):
                if getattr(self, name) != wanted:
                    raise ValueError(
                        f"param_device cpu keeps parameters in host memory, which needs {name} {wanted}, and it is "
                        f"{getattr(self, name)}; change one of them"
                    )
        if self.cpu_share is not None and (self.cpu_set is not None or self.threads is not None):
            raise ValueError(
                f"cpu_share {self.cpu_share:g} chooses host threads and their CPUs, and threads or cpu_set is given "
                "too; keep one of them"
            )
        if self.wrap_policy != "auto" and self.stage < 3:
            raise ValueError(f"wrap_policy is for stage 3, and the stage is {self.stage}; leave it out")
        if self.prescale_gradients and self.gradient_predivide_factor != 1.0:
            raise ValueError(
                "prescale_gradients already divides by all ranks before the sum, so gradient_predivide_factor "
                f"{self.gradient_predivide_factor:g} would do nothing; leave one of them out"
            )
        return self

    def resolved(self, world_size: int) -> Config:
        """This configuration with all three batch numbers, for ``world_size`` ranks.

        Without a train batch size, ``micro_batch_size`` and ``gradient_accumulation_steps`` are 1 where they are not
        given.

        Raises:
            ConfigError: the numbers do not multiply out; the message names the one of the three to change, and its
                value.
            ValueError: ``world_size`` is not a number of ranks.
        """
        check_world_size(world_size)
        try:
            numbers = resolve(BatchNumbers(*(getattr(self, name) for name in OURS)), world_size)
        except ValueError as error:
            raise ConfigError("Config", [Problem("train_batch_size", str(error))]) from None
        return self.model_copy(update=dict(zip(OURS, numbers, strict=True)))


NO_OPTIMIZER = Problem(
    "optimizer",
    'is missing, and none is passed; name one ("optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}), or pass '
    "initialize(optimizer=...)",
)


def checked_config(config: Config, world_size: int | None, needs_optimizer: bool) -> Config:
    """Return our own configuration, checked, and resolved for ``world_size`` ranks unless that is None."""
    problems = [NO_OPTIMIZER] if needs_optimizer and config.optimizer is None else []
    try:
        config = config if world_size is None else config.resolved(world_size)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError("Config", problems)
    return config


def decisive(config: Config, world_size: int) -> dict[str, str]:
    """Return the settings that change bits on ``world_size`` ranks, as texts by their names."""
    values = {name: getattr(config, name) for name in OF_EACH_RANK}
    values["cast_inputs"] = config.dtype if config.cast_inputs else None
    found = {name: json.dumps(to_jsonable_python(value)) for name, value in values.items()}
    if world_size > 1:
        found |= {name: json.dumps(getattr(config, name)) for name in BETWEEN_RANKS}
        found["stage"] = "2 or 3" if config.stage >= 2 else "0 or 1"  # they add in another order
    return found


def order_of_sums(stage: int, ranks: int, backwards: int, exact: bool) -> str:
    """Describe the additions of a step's gradients; runs with equal descriptions add the same gradients alike.

    Args:
        stage, ranks, backwards: the ZeRO stage, the number of ranks, and the backwards of a step on each rank. Rank
            ``r`` has gradient ``ranks * k + r`` of a step in its backward ``k``.
        exact: gradients are sent between ranks without rounding.
    """
    numel = ranks * backwards
    if ranks == 1 or backwards == 1:
        # One rank divides each loss by the number, and ranks divide their sum: the same for a power of two.
        if ranks == 1 or (exact and numel & (numel - 1) == 0):
            return f"{numel}, one by one"
        return f"{numel}, rank by rank"
    first = "of each rank, then these" if stage < 2 else "of each backward, then these"
    return f"{ranks} ranks times {backwards} backwards, those {first}"
