"""The optimizer's record of each parameter, and what makes one acceptable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longshore.errors import GradientError, ParameterError
from longshore.kernels import SUPPORTED_DTYPES
from longshore.optim.family import History
from longshore.optim.shards import held_part, is_sharded

if TYPE_CHECKING:
    from longshore.optim.offload import Placement


class Identity(NamedTuple):
    """What changes whenever a tensor is written or given other memory, as far as torch knows.

    An address alone is not enough: after ``p.data = x`` twice the allocator may
    hand the first one out again. While the weak reference lives, the storage it
    refers to is not confused with a later one.
    """

    versions: tuple[int, int]
    data_ptr: int
    strides: tuple[int, ...]
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor, held: Tensor) -> Identity:
        """The identity of a parameter, of which this process has ``held``."""
        storage = StorageWeakRef(held.untyped_storage())
        # Writing a DTensor changes its own version, and not that of the shard.
        return cls((tensor._version, held._version), held.data_ptr(), held.stride(), storage)


def flat(tensor: Tensor) -> Tensor:
    """A tensor's elements in logical order, one behind the other: a view where it can be.

    ``reshape`` alone keeps the stride of a one-dimensional tensor, and a tensor
    with the negative bit holds other numbers than it stands for.
    """
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach().view(-1)
    return tensor.detach().resolve_neg().reshape(-1).contiguous()


def has_hooks(parameter: Tensor) -> bool:
    """Whether the user has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class ParameterRecord:
    """What the optimizer knows of one parameter besides its pages.

    Args:
        index: counts the parameters of the optimizer.
        name: in messages.
        parameter: the user's.
        placement: where its state is.
    """

    def __init__(self, index: int, name: str, parameter: Tensor, placement: Placement) -> None:
        # Fixed.
        self.index = index
        self.name = name
        self.parameter = parameter
        self._leaf_of = placement.leaf_of
        self._is_sharded = is_sharded(parameter)
        self.keeps_shard = bool(placement.shards_among({index: parameter}))
        """State is kept, read and written for what this process has of the parameter, not for all of it."""
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        # Change with each step.
        self.history = History()
        self.has_state = False
        """Whether it was stepped, or a state was loaded."""
        self.has_master = False
        self.published: Identity | None = None
        """The parameter as this optimizer left it; None: not by us."""

    def leaf(self) -> Tensor | None:
        """What autograd accumulates the gradient into: the parameter itself, or, where its shards are gathered for
        each forward, what they are gathered into; None before the first time."""
        return self.parameter if self._leaf_of is None else self._leaf_of(self.parameter)

    @property
    def step(self) -> int:
        """Applied steps."""
        return self.history.step

    @property
    def changed(self) -> bool:
        """Whether somebody else may have written the parameter since it was published (law 10)."""
        return self.published != Identity.of(self.parameter, self.held)

    def mark_published(self) -> None:
        self.published = Identity.of(self.parameter, self.held)

    def publish(self, target: Tensor, history: History) -> None:
        """The parameter has the new values, which are in ``target`` (law 4), and this history."""
        held, leaf = self.held, self.leaf()
        if target.data_ptr() != held.data_ptr() and held.numel() > 0:
            held.copy_(target.view(held.shape))  # it is not contiguous
        else:
            # A graph that was recorded before must not run backward on new
            # weights: torch's own check finds the version changed.
            torch.autograd.graph.increment_version(self.parameter)
        if leaf is not None and leaf is not self.parameter:
            torch.autograd.graph.increment_version(leaf)
        self.history = history
        self.has_state = True
        self.mark_published()

    @property
    def held(self) -> Tensor:
        """What this process has of the parameter."""
        return held_part(self.parameter) if self._is_sharded else self.parameter

    @property
    def kept(self) -> Tensor:
        """What state is kept of: the shard, or all of the parameter."""
        return self.held if self.keeps_shard else self.parameter

    def values(self) -> Tensor:
        """The elements that this process has, in logical order, flat and contiguous: a view where it can be."""
        return flat(self.held)

    def check(self) -> None:
        """The parameter is still the one that was laid out.

        Raises:
            ParameterError: its device, dtype or shape changed.
        """
        parameter = self.parameter
        found = (parameter.device, parameter.dtype, parameter.shape)
        if found != (self.device, self.dtype, self.shape):
            raise ParameterError(
                f"parameter {self.name} was {self.dtype} {list(self.shape)} on {self.device} when the optimizer was "
                f"built and is {parameter.dtype} {list(parameter.shape)} on {parameter.device} now; "
                "build the optimizer after moving or converting the model"
            )

    def check_gradient(self, gradient: Tensor, same_dtype: bool) -> None:
        """The gradient is one that can be counted.

        Raises:
            GradientError: sparse, or of a device, shape or dtype that cannot be stepped.
        """
        if gradient.layout != torch.strided:
            raise GradientError(
                f"parameter {self.name} has a {gradient.layout} gradient; longshore steps dense gradients only "
                "(for nn.Embedding, use sparse=False)"
            )
        dtypes = (self.dtype,) if same_dtype else SUPPORTED_DTYPES
        if gradient.dtype not in dtypes:
            raise GradientError(
                f"parameter {self.name} ({self.dtype}) has a gradient of {gradient.dtype}; "
                f"it must be {' or '.join(str(dtype) for dtype in dtypes)}"
            )
        if gradient.device != self.device or gradient.shape != self.shape:
            raise GradientError(
                f"parameter {self.name} is {list(self.shape)} on {self.device}, and its gradient is "
                f"{list(gradient.shape)} on {gradient.device}"
            )


def check_parameter(parameter: Tensor, name: str, device: torch.device | None, shards: bool = False) -> None:
    """Refuse, before training starts, a parameter that cannot be stepped; ``shards``: a DTensor can.

    Raises:
        ValueError: its kind, dtype, device or memory layout is not supported.
    """
    kind = type(held_part(parameter).detach() if shards else parameter.detach())
    if kind is not Tensor:
        raise ValueError(
            f"parameter {name} is a {kind.__name__}; longshore steps plain tensors and DTensors, on one device "
            "(quantized parameters are not supported)"
        )
    if parameter.is_neg():
        raise ValueError(f"parameter {name} is a negated view; use .resolve_neg()")
    if parameter.is_inference():
        raise ValueError(f"parameter {name} was made in inference mode and cannot be trained; clone it outside")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"parameter {name} is on {parameter.device}; longshore trains parameters on cpu and cuda devices "
            "(build the optimizer after the model has its weights)"
        )
    if device is not None and parameter.device != device:
        raise ValueError(
            f"parameter {name} is on {parameter.device} and earlier ones are on {device}; "
            "all parameters of one optimizer are on one device"
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter {name} is {parameter.layout}; longshore steps dense parameters only")
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(f"parameter {name} is expanded: several elements share memory; use .contiguous()")


def check_trainable(parameter: Tensor, name: str) -> None:
    """A parameter is about to be laid out: its dtype has to be one that the kernels step.

    Frozen parameters may be of any dtype (quantized base weights under an adapter).

    Raises:
        ValueError: any other dtype.
    """
    if parameter.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"parameter {name} is {parameter.dtype}; longshore trains {names}")


def check_no_shared_memory(records: Sequence[ParameterRecord]) -> None:
    """Two parameters must not be the same memory: each would have a master of its own.

    Raises:
        ValueError: naming the pair.
    """
    extents = []
    for position, record in enumerate(records):
        parameter = record.held
        if parameter.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            extents.append((start, start + (last + 1) * parameter.element_size(), position))
    reaching: list[tuple[int, int]] = []  # earlier extents that end behind the present start
    for start, end, position in sorted(extents):
        reaching = [(other_end, other) for other_end, other in reaching if other_end > start]
        for _, other in reaching:
            if _overlap(records[other].held, records[position].held):
                raise ValueError(
                    f"parameters {records[other].name} and {records[position].name} are different tensors over the "
                    "same memory; tie them by using one nn.Parameter in both places"
                )
        reaching.append((end, position))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose extents overlap share an element: columns of one matrix do not."""
    if a.dtype != b.dtype:
        return True
    item_bytes, begin = a.element_size(), min(a.data_ptr(), b.data_ptr())
    offsets = [(tensor.data_ptr() - begin) // item_bytes for tensor in (a, b)]
    ends = [
        offset + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for offset, tensor in zip(offsets, (a, b), strict=True)
    ]
    taken = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    taken.as_strided(a.shape, a.stride(), offsets[0]).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), offsets[1]).any())


def group_members(groups: Sequence[dict[str, Any]], params: Iterable[Any]) -> list[Any]:
    """The parameters of a new group beside ``groups``, with names where those have some: torch wants all or none.

    Raises:
        ValueError: one is listed twice, naming both places.
    """
    members = list(params)
    refuse_duplicates(members)
    named = any("param_names" in group for group in groups)
    if not named or any(isinstance(entry, tuple) for entry in members):
        return members
    return [(f"{len(groups)}.{position}", parameter) for position, parameter in enumerate(members)]


def refuse_duplicates(params: list[Any]) -> None:
    """A parameter listed twice would be stepped twice.

    Raises:
        ValueError: naming both places.
    """
    seen: dict[int, int] = {}
    for position, entry in enumerate(params):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if id(parameter) in seen:
            raise ValueError(
                f"parameters {seen[id(parameter)]} and {position} of a group are the same tensor, which would be "
                "stepped twice; list it once"
            )
        seen[id(parameter)] = position
