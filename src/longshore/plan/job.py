"""The model, the training job and the choices that a plan compares; and the configuration file of a choice.

A planned model has names, shapes and dtypes of parameters, and the operations of forward. Nothing looks at
weights.
:mod:`longshore.plan.reading` reads models from modules and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import nn

from longshore.engine.config import OptimizerConfig, load_config
from longshore.seam import (
    ENCODABLE,
    OPTIMIZERS,
    MatrixLayout,
    MuonConfig,
    StateFormat,
    check_encodable,
    format_byte_size,
    parse_state_format,
)


@dataclass(frozen=True)
class Job:
    """The part of training that is the same for all choices of a plan.

    Raises:
        ValueError: there is no such format of states, or the optimizer's cannot have it.
    """

    batch_size: int = 1  # sequences in one backward on one rank
    seq_len: int = 2048  # tokens in a sequence
    accumulation: int = 1  # backwards in a step
    dtype: torch.dtype | None = torch.bfloat16  # the engine casts parameters to it; None: it does not
    optimizer: str = "AdamW"  # a key of OPTIMIZERS
    clipping: float | None = 1.0  # the largest norm of gradients; None: no norm is measured
    checkpointing: bool = False  # backward recomputes activations, block by block
    bucket_numel: int = 500_000_000  # ``reduce_bucket_size``, in elements
    tile_numel: int | None = None  # elements in a tile; None: the engine's default
    optimizer_params: Mapping[str, Any] | None = None  # as in a DeepSpeed file; None: what the optimizer suggests
    states: str = StateFormat.FP32.value  # format of the optimizer's states, as in :class:`longshore.Offload`
    accumulate: str = "auto"  # where several gradients of a step are added, as in :class:`longshore.Offload`

    def __post_init__(self) -> None:
        states = self.state_format.value
        try:
            check_encodable(self.optimizer, states)
        except ValueError as error:
            raise ValueError(f"states {states} {error}") from None

    @property
    def state_format(self) -> StateFormat:
        """Format of the states, as far as a parameter's shape allows it."""
        return parse_state_format(self.states)

    @property
    def state_formats(self) -> tuple[StateFormat, ...]:
        """Formats that the states of the job's optimizer may have."""
        return tuple(StateFormat) if self.optimizer in ENCODABLE else (StateFormat.FP32,)

    @property
    def tokens(self) -> int:
        """Tokens in one backward on one rank."""
        return self.batch_size * self.seq_len

    @property
    def optimizer_section(self) -> dict[str, Any]:
        """The section of a DeepSpeed file that names the optimizer."""
        given = self.optimizer_params
        params = OPTIMIZERS[self.optimizer].suggested if given is None else given
        return {"type": self.optimizer, "params": dict(params)}

    @cached_property
    def optimizer_config(self) -> OptimizerConfig:
        """The optimizer as the engine reads it."""
        content = {"train_micro_batch_size_per_gpu": 1, "optimizer": self.optimizer_section}
        found = load_config(content, needs_optimizer=True).config.optimizer
        assert found is not None
        return found

    @cached_property
    def state_arrays(self) -> int:
        """Arrays of optimizer state: the master weights, and the optimizer's own; of parameters that are no
        matrices."""
        config = self.optimizer_config
        group = {"use_muon": False} if isinstance(config, MuonConfig) else config.options()
        family = OPTIMIZERS[self.optimizer].rules()
        return 1 + len(family.states_of(group))


@dataclass(frozen=True)
class PlanChoice:
    """One way to train."""

    stage: int
    offload: str  # where the optimizer's state is: "cpu" or "none"
    ratio: float = 1.0  # the share of the state that is on the host
    speculation: int | str = 0  # ``speculation_memory``, as in :class:`longshore.Offload`
    param_device: str = "none"  # where the parameters rest: "cpu", or "none" for the device

    @property
    def streams(self) -> bool:
        """Whether parameters rest on the host and are copied to the device unit by unit."""
        return self.param_device == "cpu"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state is on the host, though parameters may compute on a device."""
        return self.offload == "cpu"

    @property
    def title(self) -> str:
        words = [f"stage {self.stage}", *(["offload"] if self.offloads else [])]
        words += ["streamed"] if self.streams else []
        if self.ratio != 1.0:
            words.append(f"ratio {self.ratio:g}")
        if self.speculation:
            size = self.speculation
            words.append(f"spares {size if isinstance(size, str) else format_byte_size(size)}")
        return ", ".join(words)


def configuration(job: Job, choice: PlanChoice) -> dict[str, Any]:
    """Return a DeepSpeed-style configuration that ``longshore.initialize`` loads. Its learning rate is only a first
    guess."""
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clipping or 0.0,
        "optimizer": job.optimizer_section,
    }
    if job.dtype is torch.bfloat16:
        content["bf16"] = {"enabled": True, "check_grad_overflow": False}
    elif job.dtype is torch.float16:
        content["fp16"] = {"enabled": True}
    zero: dict[str, Any] = {"stage": choice.stage, "reduce_bucket_size": job.bucket_numel}
    own: dict[str, Any] = {}
    if choice.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if choice.ratio != 1.0:
            zero["offload_optimizer"]["ratio"] = choice.ratio
        if choice.speculation:
            own["speculation_memory"] = choice.speculation
        if job.accumulate != "auto":
            own["accumulate"] = job.accumulate
    if job.state_format is not StateFormat.FP32:
        zero.setdefault("offload_optimizer", {"device": choice.offload})["states"] = job.state_format.value
    if choice.streams:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if job.tile_numel is not None:
        own["tile_numel"] = job.tile_numel
    content["zero_optimization"] = zero
    return {**content, "longshore": own} if own else content


class Use(Enum):
    """Use of a parameter in forward."""

    MULTIPLIED = "multiplied"
    """Every token is multiplied by it: two operations an element in forward, four in backward."""
    LOOKED_UP = "looked up"
    """An embedding: each token takes one row."""
    HEAD = "head"
    """Multiplied as well; gives the logits, one number for each entry of the vocabulary."""
    ELEMENTWISE = "elementwise"
    """Norms and biases."""


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter; a tied parameter is listed once."""

    name: str  # the first of its names
    shape: tuple[int, ...]  # its whole shape, not a shard's
    dtype: torch.dtype  # the model's own; a configuration may cast it
    use: Use
    unit: int | None = None  # number, in forward's order, of the module that stage 3 gathers it with; None: the model
    active: float = 1.0  # share of its elements that one token is multiplied by (below 1 for experts)
    trainable: bool = True  # it has gradients and optimizer state
    matrices: MatrixLayout | None = None  # how Muon divides it; None: its elements are stepped one by one
    group: int = 0  # number of its group in the optimizer, which lays out one group after another

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplied(self) -> float:
        """Elements that one token is multiplied by."""
        return self.active * self.numel if self.use in (Use.MULTIPLIED, Use.HEAD) else 0.0

    @property
    def width(self) -> float:
        """Numbers that go into and come out of the matrix for one token."""
        if self.use is not Use.MULTIPLIED or len(self.shape) < 2:
            return 0.0
        *outer, rows, columns = self.shape
        return self.active * math.prod(outer) * (rows + columns)


@dataclass(frozen=True)
class PlannedModel:
    """A whole model."""

    name: str
    parameters: tuple[PlannedParameter, ...]  # in the order in which the model registers them
    hidden_size: int = 0  # numbers of a token between two blocks; 0: not known
    attention_width: int = 0  # heads times head size, summed over all layers; 0: attention is not counted
    buffer_bytes: int = 0  # bytes of buffers, which are on the device
    notes: tuple[str, ...] = ()  # assumptions that were made
    module: nn.Module | None = field(default=None, compare=False, repr=False)  # what it was read from, if not files
    not_streamed: str | None = None  # why it cannot be streamed, if that is known

    @property
    def numel(self) -> int:
        return sum(each.numel for each in self.parameters)

    @cached_property
    def trainable(self) -> tuple[PlannedParameter, ...]:
        return tuple(each for each in self.parameters if each.trainable)

    @property
    def units(self) -> int:
        """Number of modules that stage 3 gathers as a whole, without the model itself."""
        return 1 + max((each.unit for each in self.parameters if each.unit is not None), default=-1)

    @property
    def vocabulary(self) -> int:
        """Number of logits of one token; 0: the model has no head."""
        return max((each.shape[0] for each in self.parameters if each.use is Use.HEAD), default=0)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements of floating-point parameters."""
        numels: dict[torch.dtype, int] = {}
        for each in self.parameters:
            if each.dtype.is_floating_point:
                numels[each.dtype] = numels.get(each.dtype, 0) + each.numel
        return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)

    def cast(self, dtype: torch.dtype | None) -> PlannedModel:
        """Return the model as the engine casts it; None leaves it as it is."""
        if dtype is None or all(each.dtype == dtype for each in self.parameters):
            return self
        cast = (replace(each, dtype=dtype) if each.dtype.is_floating_point else each for each in self.parameters)
        return replace(self, parameters=tuple(cast))


def parameter_bytes(parameters: Sequence[PlannedParameter]) -> int:
    return sum(each.numel * each.dtype.itemsize for each in parameters)


def by_unit(parameters: Sequence[PlannedParameter]) -> Mapping[int | None, list[PlannedParameter]]:
    """Group the parameters by the unit that stage 3 gathers them with."""
    found: dict[int | None, list[PlannedParameter]] = {}
    for each in parameters:
        found.setdefault(each.unit, []).append(each)
    return found
