"""Muon, as ``torch.optim.Muon``, one matrix at a time.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A step has three parts: momentum and
Nesterov's, elementwise, on the host; Newton-Schulz on the whole matrix, which begins with bfloat16 in torch, so that
nothing more has to travel; weight decay and the update, elementwise, on the host.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from longshore.kernels import MatrixRule, Rule, newton_schulz, newton_schulz_bytes
from longshore.kernels.reference import Scalars, fma, scalar, where
from longshore.layout.tiles import DimRange, MatrixLayout
from longshore.optim.family import History, RuleFamily, flag, not_negative, number
from longshore.optim.offload import Offload
from longshore.optim.rules.adam import AdamFamily, AdamW
from longshore.optim.tiled_optimizer import RuleOptimizer

_HEADS = ("lm_head", "head", "output", "output_layer", "classifier", "score", "unembed", "unembedding", "embed_out")
"""Names of the modules that compute what a model returns, in libraries and in scripts."""
_FUSED = ("qkv", "query_key_value", "c_attn", "in_proj", "gate_up", "fused", "weight_ih_l", "weight_hh_l")
"""Parts of names of parameters that hold several matrices."""


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
        ValueError: the parameter cannot be divided in this way; the message begins with a description of it.
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
        offload: settings of the host side. With ``speculation_memory``, the pass before Newton-Schulz goes ahead;
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


def muon_groups(
    model: nn.Module,
    *,
    split: Mapping[str, Split | Mapping[str, Any]] | None = None,
    others: Sequence[str] = (),
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Return the usual groups of a model for :class:`~longshore.Muon`, and print them.

    Muon steps the matrices; AdamW steps embeddings, the head (also one that is tied to an embedding) and everything of
    another shape. Norms, biases and other vectors have no weight decay. Frozen parameters are in no group.

    Args:
        model: the model.
        split: which parameters hold several matrices: patterns of parameter names (``"*.qkv.weight"``, as in a shell;
            the first that fits counts, and one with a star leaves vectors out, such as biases), each with what a group
            of :class:`~longshore.Muon` has as its ``split``, or with a dictionary of ``split`` and ``split_dim``. None:
            a name that looks so is one matrix nevertheless.
        others: patterns of the names of further parameters that AdamW is to step, also where a pattern of ``split``
            with a star fits them.
        muon: options of the groups of matrices, such as ``{"lr": 0.02}``.
        adamw: options of the other groups.
        show: print a line for each group.

    Raises:
        TypeError: ``model`` is no module, or one of the others is no dictionary, or no list.
        ValueError: a pattern fits no parameter; ``split`` names a parameter and ``others`` fits it, too; or a parameter
            looks as if it held several matrices, and neither says how it is divided.
    """
    _check_types(model, others, split=split, muon=muon, adamw=adamw)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    options_of = matrix_options(model, named, split or {}, others)
    matrices: dict[str, tuple[dict[str, Any], list[tuple[str, Tensor]]]] = {}
    tables: list[tuple[str, Tensor]] = []
    vectors: list[tuple[str, Tensor]] = []
    for name, parameter in named.items():
        options = options_of[name]
        if options is None:
            (vectors if parameter.ndim < 2 else tables).append((name, parameter))
        else:
            matrices.setdefault(repr(options), (options, []))[1].append((name, parameter))
    adamw = dict(adamw or {})
    for given, known in ((muon or {}, MatrixFamily.options), (adamw, AdamFamily.options)):
        if unknown := given.keys() - known.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no option; there are {', '.join(known)}")
    groups = [
        {"params": members, "use_muon": True, **(muon or {}), **options} for options, members in matrices.values()
    ]
    if tables:
        groups.append({"params": tables, "use_muon": False, **adamw})
    if vectors:
        groups.append({"params": vectors, "use_muon": False, **adamw, "weight_decay": 0.0})
    if show:
        show_groups(groups)
    return groups


def _check_types(model: object, others: object, **dictionaries: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_groups takes a model, a torch.nn.Module, not {type(model).__name__}")
    for name, given in dictionaries.items():
        if not isinstance(given, (Mapping, type(None))):
            raise TypeError(f"{name} is a dictionary, not {given!r}")
    if isinstance(others, str):
        raise TypeError(f"others is a list of patterns, such as [{others!r}], not a string")


def show_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each group of :class:`~longshore.Muon` whose members have names."""
    for group in groups:
        print(_line(group))


def matrix_options(
    model: nn.Module,
    named: Mapping[str, Tensor],
    split: Mapping[str, Split | Mapping[str, Any]],
    others: Sequence[str],
    marks: Mapping[str, bool] | None = None,
    where: str = "in longshore.muon_groups()",
) -> dict[str, dict[str, Any] | None]:
    """Return by name the options ``split`` and ``split_dim`` of each parameter that Muon is to step, and None for each
    that AdamW is to step.

    Args:
        model: the model; it says which parameters are of embeddings and of the head.
        named: the parameters.
        split: as in :func:`muon_groups`.
        others: as in :func:`muon_groups`.
        marks: by name, whether Muon steps a parameter. None: that follows from the model.
        where: where the user gives these two, for errors.

    Raises:
        ValueError: as in :func:`muon_groups`.
    """
    used = {pattern for pattern in split for name, each in named.items() if _divides(pattern, name, each)}
    used |= {pattern for pattern in others for name in named if fnmatch.fnmatchcase(name, pattern)}
    for pattern in (*split, *others):
        if pattern not in used:
            close = difflib.get_close_matches(pattern, named, 1, 0.0)
            raise ValueError(
                f"{pattern!r} is the name of no trained parameter of the model; it stands {where}, and there is "
                f"{', '.join(close) or 'none'}"
            )
    outer = _embeddings_and_heads(model)
    found: dict[str, dict[str, Any] | None] = {}
    for name, parameter in named.items():
        fits = ((pattern, how) for pattern, how in split.items() if _divides(pattern, name, parameter))
        pattern, how = next(fits, (name, _UNSAID))
        other = False
        for fitting in (each for each in others if fnmatch.fnmatchcase(name, each)):
            if name in split:
                raise ValueError(
                    f"parameter {name} has a split {where}, which Muon steps by, and others={[fitting]} leaves it to "
                    "AdamW: take it out of one of them"
                )
            other = True
        if how is _UNSAID and marks is None:
            # A matrix of one row or column is a vector, such as the magnitudes of weight_norm.
            other |= id(parameter) in outer or parameter.ndim not in (2, 3) or 1 in parameter.shape[-2:]
        if other or (marks is not None and not marks[name]):
            found[name] = None
        else:
            found[name] = _options_of(how, name, parameter, where, pattern)
    return found


_UNSAID = object()


def _divides(pattern: str, name: str, parameter: Tensor) -> bool:
    """Return whether a pattern of ``split`` is for a parameter: one with a star leaves vectors out, such as biases."""
    return fnmatch.fnmatchcase(name, pattern) and (parameter.ndim > 1 or pattern == name)


def _embeddings_and_heads(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter of an embedding or of the model's head."""
    found = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    # Names with a number are of blocks, in which BERT, for one, has modules called output.
    named = ((name.split("."), module) for name, module in model.named_modules())
    found += [module for path, module in named if path[-1] in _HEADS and not any(map(str.isdigit, path))]
    output = getattr(model, "get_output_embeddings", lambda: None)()  # of language models
    found += [output] if isinstance(output, nn.Module) else []
    return {id(parameter) for module in found for parameter in module.parameters()}


def _options_of(how: Any, name: str, parameter: Tensor, where: str, pattern: str) -> dict[str, Any]:
    """Return the options ``split`` and ``split_dim`` of a group for a parameter, which ``pattern`` fits."""
    said = f"say split={{{name!r}: ...}} {where}, or others=[{name!r}] for AdamW"
    if how is _UNSAID:
        if parameter.ndim == 3:
            raise ValueError(
                f"parameter {name} is {list(parameter.shape)}: a stack of matrices ('stack'), or none; {said}"
            )
        if parameter.ndim == 2 and any(part in name.lower() for part in _FUSED):
            raise ValueError(
                f"parameter {name}, {list(parameter.shape)}, looks as if it held several matrices; {said} (a number of "
                "blocks, their sizes, or None if it is one matrix)"
            )
        return {}
    options = dict(how) if isinstance(how, Mapping) else {} if how is None else {"split": how}
    if unknown := options.keys() - {"split", "split_dim"}:
        raise ValueError(f"split={{{name!r}: ...}} has split and split_dim, and no {', '.join(sorted(unknown))}")
    try:
        matrix_layout(tuple(parameter.shape), options.get("split"), options.get("split_dim", 0))
    except ValueError as error:
        fits = f"; split={{{pattern!r}: ...}} {where} fits it, and others=[{name!r}] leaves it to AdamW"
        raise ValueError(f"parameter {name} {error}{'' if pattern == name else fits}") from None
    return options


def _line(group: Mapping[str, Any]) -> str:
    """Describe a group."""
    members = group["params"]
    numel = sum(parameter.numel() for _, parameter in members)
    kind = "Muon " if group["use_muon"] else "AdamW"
    options = ", ".join(f"{name}={value}" for name, value in group.items() if name not in ("params", "use_muon"))
    names = ", ".join(name for name, _ in members[:3]) + (", ..." if len(members) > 3 else "")
    return f"{kind}  {len(members):4} tensors  {numel:14,} elements  {f'({options})  ' if options else ''}{names}"
