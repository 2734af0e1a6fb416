"""Muon, as ``torch.optim.Muon``, one matrix at a time.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A step has three parts: momentum and
Nesterov's, elementwise, on the host; Newton-Schulz on the whole matrix, which begins with bfloat16 in torch, so that
nothing more has to travel; weight decay and the update, elementwise, on the host.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import MatrixRule, Rule, newton_schulz, newton_schulz_bytes
from longshore.kernels.reference import Scalars, fma, scalar, where
from longshore.layout.tiles import DimRange, MatrixLayout
from longshore.optim.family import History, RuleFamily, flag, not_negative, number
from longshore.optim.offload import Offload
from longshore.optim.rule_optimizer import RuleOptimizer
from longshore.optim.rules.adam import AdamFamily, AdamW


def muon_momentum(scalars: Scalars, g: Tensor, buffer: Tensor, update: Tensor) -> tuple[Tensor, ...]:
    """Return the new momentum, and the matrix to be made orthogonal; ``update`` is not read."""
    one_minus_momentum = scalar(scalars, 0)
    momentum = scalar(scalars, 1)
    nesterov = scalar(scalars, 2)
    # torch's lerp, as in Adam's file.
    from_buffer = one_minus_momentum < 0.5
    from_gradient = momentum < 0.5
    toward_gradient = where(from_buffer, one_minus_momentum, one_minus_momentum - 1.0)
    toward_buffer = where(from_gradient, momentum, momentum - 1.0)
    buffer = fma(toward_gradient, g - buffer, where(from_buffer, buffer, g))
    ahead = fma(toward_buffer, buffer - g, where(from_gradient, g, buffer))
    update = where(nesterov != 0.0, ahead, buffer)
    return buffer, update


def muon_update(scalars: Scalars, g: Tensor, p: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    """Return the new master; ``g`` is the orthogonal matrix, and the momentum stays as it is."""
    decay = scalar(scalars, 0)
    negative_lr = scalar(scalars, 1)
    p = fma(g, negative_lr, p * decay)
    return p, buffer


@dataclass(frozen=True)
class MomentumRule(Rule):
    """First part of a step, on a buffer that has only the momentum: the output is to be made orthogonal."""

    name = "MuonMomentum"
    states = ("update",)
    optional_states = 1
    outputs_last = True
    update = staticmethod(muon_momentum)

    momentum: float
    nesterov: bool

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        return 1.0 - self.momentum, self.momentum, float(self.nesterov)


@dataclass(frozen=True)
class UpdateRule(Rule):
    """Last part of a step, on a buffer that has only the master: the gradient is the orthogonal matrix."""

    name = "MuonUpdate"
    states = ("momentum_buffer",)
    optional_states = 1
    update = staticmethod(muon_update)

    lr: float
    """The learning rate, adjusted to the shape of the matrix."""
    decay: float
    """What the master is multiplied by: 1 minus the learning rate of the group times its weight decay."""

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        return self.decay, -self.lr


@dataclass(frozen=True)
class MuonRule(MatrixRule):
    """The hyper-parameters of one group of matrices."""

    state = "momentum_buffer"

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    lr_dtype: torch.dtype | None = None
    """The dtype of the learning rate if it is a tensor, in which torch then computes with it."""

    @property
    def first(self) -> Rule:
        return MomentumRule(self.momentum, self.nesterov)

    def transform(self, matrix: Tensor) -> Tensor:
        return newton_schulz(matrix, self.ns_coefficients, self.ns_steps, self.eps)

    def last(self, rows: int, columns: int) -> Rule:
        ratio = math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        lr = self.lr if self.lr_dtype is None else torch.tensor(self.lr, dtype=self.lr_dtype, device="cpu")
        return UpdateRule(lr=float(lr * ratio), decay=float(1 - lr * self.weight_decay))

    def workspace_bytes(self, rows: int, columns: int) -> int:
        return newton_schulz_bytes(rows, columns)


# -- options ------------------------------------------------------------------


def coefficients(value: Any, name: str) -> tuple[float, float, float]:
    """Read three numbers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) != 3:
        raise ValueError(f"{name} is three numbers, not {value!r}")
    a, b, c = (_fitting(number(each, name), torch.float32, name) for each in value)
    return a, b, c


def least_norm(value: Any, name: str) -> float:
    """Read the number that norms in bfloat16 are clamped to."""
    return _fitting(number(value, name), torch.bfloat16, name)


def _fitting(value: float, dtype: torch.dtype, name: str) -> float:
    """Return a number that torch converts to ``dtype``: otherwise the first step would end half way."""
    most = torch.finfo(dtype).max
    if most < abs(value) < math.inf:
        raise ValueError(f"{name} must be from {-most} to {most}, which {dtype} can hold, and is {value}")
    return value


def plain(value: Any, name: str) -> float:
    """Read a number of Python's. With a NumPy number or a tensor, torch computes in the dtype of that."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of Python's for Muon, not {type(value).__name__}; pass float(...)")
    return not_negative(value, name)


def learning_rate(value: Any, name: str) -> float:
    """Read a number of Python's, or a tensor of one element."""
    return not_negative(value, name) if isinstance(value, Tensor) else plain(value, name)


def momentum(value: Any, name: str) -> float:
    """Read a decay rate from 0 to 1."""
    found = plain(value, name)
    if found > 1.0:
        raise ValueError(f"{name} must be at most 1, above which it grows without end, and is {found}")
    return found


def steps(value: Any, name: str) -> int:
    """Read a number of steps: an integer of at least 0 and below 100."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a number of steps, an integer, not {value!r}")
    if not 0 <= int(value) < 100:
        raise ValueError(f"{name} must be at least 0 and below 100, and is {value}")
    return int(value)


def adjustment(value: Any, name: str) -> str | None:
    """Read how the learning rate is adjusted to the shape of a matrix."""
    if value not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"{name} is 'original' (as None) or 'match_rms_adamw', not {value!r}")
    return value


Split = int | Sequence[int] | str | None


def matrix_layout(shape: tuple[int, ...], split: Split, dim: int) -> MatrixLayout:
    """Return how a parameter is divided into matrices.

    Args:
        shape: of the parameter.
        split: None: the parameter is one matrix; a number: it is divided into so many equal blocks; several numbers:
            these are the sizes of the blocks; ``"stack"``: each ``parameter[i]`` is a matrix.
        dim: the dimension, 0 or 1, along which it is divided.

    Raises:
        ValueError: the parameter cannot be divided in this way; the message begins with what it is.
    """
    if isinstance(split, str) and split == "stack":
        if len(shape) != 3:
            raise ValueError(f"is {list(shape)}, and split='stack' is for three dimensions: a stack of matrices")
        blocks = tuple(DimRange(0, index * shape[1], shape[1]) for index in range(shape[0]))
        return MatrixLayout(shape[0] * shape[1], shape[2], blocks)
    if len(shape) != 2:
        stacked = " (or, if it is a stack of matrices, such as experts, with split='stack')" if len(shape) == 3 else ""
        raise ValueError(
            f"is {list(shape)}, and Muon steps matrices: put it into a group with use_muon=False, which AdamW "
            f"steps{stacked}, or let longshore.muon_groups(model) make the groups"
        )
    if dim not in (0, 1) or type(dim) is not int:
        raise ValueError(f"is {list(shape)}, and split_dim is 0 or 1, not {dim!r}")
    if isinstance(split, (str, bool)) or not isinstance(split, (int, Sequence, type(None))):
        raise ValueError(f"is {list(shape)}, and split is a number of blocks, their sizes, or 'stack', not {split!r}")
    if isinstance(split, Sequence) and not (split and all(type(size) is int for size in split)):
        raise ValueError(f"is {list(shape)}, and the sizes of blocks are integers, not {split!r}")
    sizes = [shape[dim]] if split is None else split
    if isinstance(sizes, int):
        if sizes < 1 or shape[dim] % sizes:
            raise ValueError(f"is {list(shape)}, and its dimension {dim} cannot be divided into {sizes} equal blocks")
        sizes = [shape[dim] // sizes] * sizes
    if sum(sizes) != shape[dim] or (min(sizes) < 1 and split is not None):
        raise ValueError(f"is {list(shape)}, and blocks of {list(sizes)} are not its dimension {dim}")
    if dim == 1 and len(set(sizes)) > 1:
        raise ValueError(f"is {list(shape)}, and along split_dim=1 its blocks are all of one size, not {list(sizes)}")
    ends = list(itertools.accumulate(sizes))
    blocks = tuple(DimRange(dim, end - size, size) for end, size in zip(ends, sizes, strict=True))
    return MatrixLayout(shape[0], shape[1], blocks)


class MatrixFamily(RuleFamily):
    """The groups of matrices."""

    options: ClassVar = {
        "lr": learning_rate,
        "weight_decay": plain,
        "momentum": momentum,
        "nesterov": flag,
        "ns_coefficients": coefficients,
        "eps": least_norm,
        "ns_steps": steps,
        "adjust_lr_fn": adjustment,
    }
    absent: ClassVar = {"use_muon": True, "split": None, "split_dim": 0}
    rule = MuonRule  # pyright: ignore[reportAssignmentType]
    states = (MuonRule.state,)
    matrix_state = MuonRule.state
    keeps_step = False

    def more_fields(self, group: Mapping[str, Any], history: History) -> Mapping[str, Any]:
        return {"lr_dtype": group["lr"].dtype if isinstance(group["lr"], Tensor) else None}

    def matrix_layout(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> MatrixLayout:
        return matrix_layout(shape, group.get("split"), group.get("split_dim", 0))


class OtherFamily(AdamFamily):
    """The groups that AdamW steps beside matrices."""

    def check_step(self, group: Mapping[str, Any]) -> None:
        if "momentum" in group:
            raise ValueError(
                "a group with use_muon=False has been given a momentum, which AdamW does not read (torch's OneCycleLR "
                "and CyclicLR cycle it in every group of an optimizer that knows one): pass cycle_momentum=False"
            )


class MuonFamily(RuleFamily):
    """Groups of matrices, which Muon steps, and groups with ``use_muon=False``, which AdamW steps."""

    options = MatrixFamily.options
    absent = MatrixFamily.absent
    states = (*MatrixFamily.states, *AdamFamily.states)
    matrix_state = MuonRule.state
    encodable = False
    layout_options = ("split", "split_dim")

    def __init__(self) -> None:
        super().__init__()
        self._matrices = MatrixFamily()
        self._others = OtherFamily()

    def of(self, group: Mapping[str, Any]) -> RuleFamily:
        return self._matrices if group.get("use_muon", True) else self._others

    def check_group(self, group: Mapping[str, Any]) -> None:
        mark, family = group.get("use_muon", True), self.of(group)
        if not isinstance(mark, bool):
            raise TypeError(f"use_muon is True or False, not {mark!r}")
        if lacks := sorted(family.options.keys() - family.absent.keys() - group.keys()):
            raise ValueError(
                f"a group with use_muon={mark} has no {', '.join(lacks)}: the option was taken out of it, or use_muon "
                "was changed, for which the optimizer is built anew"
            )
        family.check_group(group)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        return self.of(group).states_of(group)

    @classmethod
    def complete(cls, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        super().complete(groups, defaults)
        if not groups[-1].get("use_muon", True):
            for name in MatrixFamily.options.keys() - AdamFamily.options.keys():
                groups[-1].pop(name, None)
        for group in groups:
            if not group.get("use_muon", True):
                group.pop("split", None)
                group.pop("split_dim", None)


class Muon(RuleOptimizer):
    """``torch.optim.Muon`` with master weights and momentum in host memory, and AdamW for all other parameters.

    The weights are those of ``torch.optim.Muon`` with float32 masters on the kind of device that the parameters compute
    on, bit for bit: Newton-Schulz runs there, on one matrix at a time, and everything else on the host.

    A group with ``use_muon=False`` is stepped as by :class:`AdamW`, with the options and defaults of that: it takes
    none of this call's. :func:`~longshore.muon_groups` makes the usual groups of a model.

    A group may divide its parameters into several matrices, each of which is made orthogonal by itself:

    - ``split=3``: three blocks of rows, such as a fused ``[3 * d, d]`` projection of queries, keys and values;
    - ``split=[d, d // 4, d // 4]``: blocks of so many rows;
    - ``split="stack"``: each ``parameter[i]`` of a stack ``[n, rows, columns]``, such as experts;
    - with ``split_dim=1`` blocks of columns, all of one size.

    Args:
        params: parameters, named parameters, or groups, as for :class:`AdamW`; matrices, unless a group says otherwise.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: decay rate of the momentum.
        nesterov: Nesterov's momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration.
        eps: least norm by which a matrix is divided before the iteration.
        ns_steps: number of Newton-Schulz steps, below 100.
        adjust_lr_fn: how the learning rate depends on a matrix of ``A`` rows and ``B`` columns: ``"original"`` (as
            None) multiplies it by ``sqrt(max(1, A / B))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(A, B))``.
        release_gradients: as for :class:`AdamW`.
        offload: settings of the host side. With ``speculation_memory``, what comes before Newton-Schulz goes ahead;
            with a ``ratio`` below 1, all matrices are on the host. An engine's configuration takes the place of these
            two arguments.

    Raises:
        ValueError: an option, a value or a parameter, which the message names, is not supported.
    """

    rules = MuonFamily
    twin = getattr(torch.optim, "Muon", None)  # torch 2.9 and newer
    file_defaults: ClassVar = {"weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
    suggested: ClassVar = {"lr": 1e-4, "ns_method": "standard", "adjust_lr_fn": "match_rms_adamw"}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and not param_group.get("use_muon", True):
            for name, value in _ADAMW_DEFAULTS.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)


_ADAMW_DEFAULTS = {
    **AdamFamily.group_options(
        {name: parameter.default for name, parameter in inspect.signature(AdamW).parameters.items()}
    ),
    "decoupled_weight_decay": True,
}
