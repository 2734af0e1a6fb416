"""Records that an optimizer keeps of its parameters, and checks of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longshore.accelerator import is_accelerator
from longshore.errors import GradientError, ParameterError
from longshore.kernels import SUPPORTED_DTYPES
from longshore.layout.tiles import MatrixLayout, Spec
from longshore.optim.dtensor import flat, former_of, held_part, is_sharded
from longshore.optim.family import History, RuleFamily
from longshore.store import Store

if TYPE_CHECKING:
    from longshore.optim.offload import Offload


class Identity:
    """Values that change whenever a parameter is written or given other memory, as far as torch knows.

    An address alone is not enough: after ``p.data = x`` twice the allocator may reuse the first address. While the weak
    reference lives, the storage it refers to is not confused with a later one.
    """

    __slots__ = ("address", "held_version", "storage", "stride", "version")

    def __init__(self, tensor: Tensor, held: Tensor, former: Identity | None) -> None:
        """``held`` is this process's part of the parameter."""
        self.address, self.stride = held.data_ptr(), held.stride()
        # A weak reference costs more than everything else here.
        kept = former.storage if former is not None and former.same_memory(held) else None
        self.storage = kept or StorageWeakRef(held.untyped_storage())
        # Writing a DTensor changes its own version, and not that of the shard.
        self.version, self.held_version = tensor._version, held._version

    def same_memory(self, held: Tensor) -> bool:
        return (
            held.data_ptr() == self.address
            and held.untyped_storage()._cdata == self.storage.cdata
            and held.stride() == self.stride
        )

    def same(self, tensor: Tensor, held: Tensor) -> bool:
        return tensor._version == self.version and held._version == self.held_version and self.same_memory(held)


def has_hooks(parameter: Tensor) -> bool:
    """Return whether the user has hooks on the parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class ParameterRecord:
    """Record that an optimizer keeps of one parameter besides its state.

    Args:
        index: the parameter's index in the optimizer.
        name: the parameter's name in messages.
        parameter: the user's tensor.
        offload: decides where its state is.
        family: the optimizer's rules.
        group: the parameter group that it is in now.

    Raises:
        ValueError: a rule of this group cannot step the parameter.

    Attributes:
        family: the rules by which it is stepped.
        matrices: how it is divided into matrices; None: its elements are stepped one by one.
        coding: how the states of its elements, or of this process's shard, are encoded.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameter: Tensor,
        offload: Offload,
        family: RuleFamily,
        group: Mapping[str, Any],
    ) -> None:
        # These are fixed.
        self.index = index
        self.name = name
        self.parameter = parameter
        self.family = family.of(group)
        self.matrices: MatrixLayout | None = None
        try:
            self.matrices = self.family.matrix_layout(group, tuple(parameter.shape))
        except ValueError as error:
            raise ValueError(f"parameter {name} {error}") from None
        if self.matrices is not None and not parameter.is_contiguous():
            raise ValueError(
                f"parameter {name} is a matrix that is not contiguous in memory (stored transposed, or a view), for "
                "which torch's products have other bits: make it so, with nn.Parameter(parameter.contiguous())"
            )
        self.coding = offload.coding_of(name, parameter)
        self._leaf_of = offload.leaf_of
        self._is_sharded = is_sharded(parameter)
        self.keeps_shard = offload.alone and is_sharded(parameter)
        """Whether state is kept, read and written for this process's shard of the parameter, not for all of it."""
        former = former_of(parameter)
        self._former = None if former is None else weakref.ref(former)
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        # These change with each step.
        self.history = History()
        self.has_state = False
        """Whether the parameter was stepped, or a state was loaded for it."""
        self.has_master = False
        self.published: Identity | None = None
        """Identity of the parameter as this optimizer left it; None if it was not published since its state was set."""
        self.left: Tensor | None = None
        """The placeholder in the ``.grad`` of the parameter that a shard replaced (see :func:`former_of`)."""

    def rename(self, name: str, offload: Offload) -> None:
        """Set the name, on which random bits depend, before the parameter is laid out."""
        self.name, self.coding = name, offload.coding_of(name, self.parameter)

    def leaf(self) -> Tensor | None:
        """Return the tensor into which autograd accumulates the gradient: the parameter itself, or, if its shards are
        gathered for each forward, the gathered parameter; None before it was first gathered."""
        return self.parameter if self._leaf_of is None else self._leaf_of(self.parameter)

    @property
    def former(self) -> Tensor | None:
        """The parameter that this shard replaced, if a script still has it."""
        return None if self._former is None else self._former()

    @property
    def has_gradient(self) -> bool:
        """Whether something is in ``.grad`` of the parameter, or of :attr:`former`."""
        former = self.former
        return self.parameter.grad is not None or (former is not None and former.grad is not None)

    @property
    def step(self) -> int:
        """Number of applied steps."""
        return self.history.step

    @property
    def changed(self) -> bool:
        """Whether others may have written the parameter since it was published (law 10)."""
        return self.published is None or not self.published.same(self.parameter, self.held)

    def mark_published(self) -> None:
        self.published = Identity(self.parameter, self.held, self.published)

    def publish(self, target: Tensor, history: History) -> None:
        """Give the parameter the new values, which are in ``target`` (law 4), and the new history. The caller then
        calls :meth:`mark_published`."""
        held, leaf = self.held, self.leaf()
        if target.data_ptr() != held.data_ptr() and held.numel() > 0:
            held.copy_(target.view(held.shape))  # target is a copy, since the parameter is not contiguous
        else:
            # A graph made before must not run backward on new weights: torch's own check finds the version changed.
            torch.autograd.graph.increment_version(self.parameter)
        if leaf is not None and leaf is not self.parameter:
            torch.autograd.graph.increment_version(leaf)
        self.history = history
        self.has_state = True

    def publish_values(self, values: Tensor) -> None:
        """Give the parameter the rounded values (flat, of :attr:`held`) to which its master was set."""
        with torch.no_grad():
            self.held.copy_(values.reshape(self.held.shape))
        torch.autograd.graph.increment_version(self.parameter)
        self.has_master = True
        self.mark_published()

    @property
    def held(self) -> Tensor:
        """This process's shard of the parameter, or all of it."""
        return held_part(self.parameter) if self._is_sharded else self.parameter

    @property
    def kept(self) -> Tensor:
        """The tensor whose state is kept: this process's shard, or all of the parameter."""
        return self.held if self.keeps_shard else self.parameter

    @property
    def spec(self) -> Spec:
        """The parameter as a store lays it out."""
        matrix = None if self.matrices is None else self.matrices.whole(self.index)
        return Spec(self.index, self.kept.numel(), self.dtype, self.coding, matrix)

    def fill_initial(self, store: Store) -> None:
        """Fill the states that are not zero before the first step."""
        for name, value in self.family.initial(self.history).items():
            store.states.write(self.index, name, torch.full((1,), value).expand(self.kept.numel()))

    def values(self) -> Tensor:
        """Return the elements that this process has, flat (see :func:`flat`)."""
        return flat(self.held)

    @property
    def moved(self) -> bool:
        """Whether the parameter's device, dtype or shape changed since it was laid out."""
        parameter = self.parameter
        return (parameter.device, parameter.dtype, parameter.shape) != (self.device, self.dtype, self.shape)

    def check(self) -> None:
        """Raise ParameterError if the parameter :attr:`moved`, or is a part of a matrix that is never whole."""
        parameter = self.parameter
        if self.keeps_shard and self.matrices is not None:
            raise ParameterError(
                f"parameter {self.name} is a DTensor, of which this process has a shard, and Muon needs whole "
                "matrices: let longshore.initialize() shard the model (stage 3), or put it into a group with "
                "use_muon=False"
            )
        if self.moved:
            raise ParameterError(
                f"parameter {self.name} was {self.dtype} {list(self.shape)} on {self.device} when the optimizer was "
                f"built and is {parameter.dtype} {list(parameter.shape)} on {parameter.device} now; "
                "build the optimizer after moving or converting the model; to change a shape, put a new parameter into "
                "its group, and move its state (group['params'][i] = new; state[new] = state.pop(old))"
            )

    def check_kind(self, family: RuleFamily, group: Mapping[str, Any]) -> None:
        """Raise ParameterError if the parameter is in a group of another kind than the one it was laid out with, and
        for a matrix that would be stepped under autocast."""
        try:
            layout = family.matrix_layout(group, tuple(self.shape))
        except ValueError as error:
            raise ParameterError(f"parameter {self.name} {error}") from None
        if layout is not None and (device := _autocast_device()):
            raise ParameterError(
                f"parameter {self.name} is stepped inside torch.autocast({device!r}), which would choose the dtype of "
                "Newton-Schulz: call step() outside of it, and keep forward and the loss inside"
            )
        if self.family is family and self.matrices == layout:
            return
        was, now = ("no matrix" if each is None else _words_of(each) for each in (self.matrices, layout))
        raise ParameterError(
            f"parameter {self.name} was laid out as {was}, and its group makes it {now} now (use_muon, split or "
            "split_dim was changed, or it was put into another group): its state does not fit; build the optimizer anew"
        )

    def check_gradient(self, gradient: Tensor, same_dtype: bool) -> None:
        """Raise GradientError for a sparse gradient, or one of a device, shape or dtype that cannot be stepped."""
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
        leaf = self.leaf()
        device = self.device if leaf is None else leaf.device
        if gradient.device != device or gradient.shape != self.shape:
            self.check()  # it is the parameter that changed
            raise GradientError(
                f"parameter {self.name} is {list(self.shape)} on {device}, and its gradient is "
                f"{list(gradient.shape)} on {gradient.device}"
            )


def _autocast_device() -> str:
    """Return a type of device for which this thread has autocast on, or an empty string."""
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return next((each for each in types if torch.is_autocast_enabled(each)), "")


def _words_of(layout: MatrixLayout) -> str:
    shapes = ", ".join(str(list(layout.shape_of(block))) for block in layout.blocks[:3])
    return f"{len(layout.blocks)} matrices of {shapes}{', ...' if len(layout.blocks) > 3 else ''}"


def names_of(groups: Iterable[Mapping[str, Any]], by_id: Mapping[int, ParameterRecord]) -> list[tuple[Tensor, str]]:
    """Return the parameters that are in these groups, with the names that they got when they were added."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return [(each, by_id[id(each)].name) for each in parameters if id(each) in by_id]


def is_lazy(parameter: Any) -> bool:
    """Return whether a parameter is one of a lazy module that has not seen its input yet."""
    return isinstance(parameter, torch.nn.UninitializedParameter)


def check_parameter(parameter: Tensor, name: str, device: torch.device | None, shards: bool = False) -> None:
    """Raise ValueError for a parameter whose kind, device or memory layout is not supported; ``shards``: whether
    DTensors are supported."""
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
    if parameter.device.type != "cpu" and not is_accelerator(parameter.device):
        raise ValueError(
            f"parameter {name} is on {parameter.device}; longshore trains parameters on the CPU and on torch's "
            "accelerator "
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
    """Raise ValueError for a parameter, about to be laid out, of a dtype that the kernels do not step.

    Frozen parameters may be of any dtype (quantized base weights under an adapter).
    """
    if parameter.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"parameter {name} is {parameter.dtype}; longshore trains {names}")


def check_no_shared_memory(records: Sequence[ParameterRecord]) -> None:
    """Raise ValueError, naming the pair, for two parameters in the same memory: each would have its own master."""
    extents = []
    for record in records:
        if record.held.numel() > 0:
            start = record.held.data_ptr()
            extents.append((start, start + _span(record.held) * record.held.element_size(), record.index, record))
    reaching: list[tuple[int, ParameterRecord]] = []  # earlier extents that end after the present start
    for start, end, _, record in sorted(extents):
        reaching = [(other_end, other) for other_end, other in reaching if other_end > start]
        for _, other in reaching:
            if _overlap(other.held, record.held):
                raise ValueError(
                    f"parameters {other.name} and {record.name} are different tensors over the same memory; tie them "
                    "by using one nn.Parameter in both places"
                )
        reaching.append((end, record))


def _span(tensor: Tensor) -> int:
    """Return the number of elements that a non-empty tensor spans in memory, from its first element to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors whose extents overlap share an element; two columns of one matrix do not."""
    if a.dtype != b.dtype:
        return True
    begin = min(a.data_ptr(), b.data_ptr())
    first, second = ((tensor.data_ptr() - begin) // tensor.element_size() for tensor in (a, b))
    taken = torch.zeros(max(first + _span(a), second + _span(b)), dtype=torch.bool, device="cpu")
    taken.as_strided(a.shape, a.stride(), first).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), second).any())


def group_members(groups: Sequence[dict[str, Any]], params: Iterable[Any]) -> list[Any]:
    """Return the parameters of a group to add to ``groups``, named if those are: torch wants names for all or for none.

    Raises:
        ValueError: a parameter is listed twice, and would be stepped twice; the message gives both positions.
    """
    members = list(params)
    seen: dict[int, int] = {}
    for position, entry in enumerate(members):
        first = seen.setdefault(id(entry[1] if isinstance(entry, tuple) else entry), position)
        if first != position:
            raise ValueError(
                f"parameters {first} and {position} of a group are the same tensor, which would be stepped twice; list "
                "it once"
            )
    named = any("param_names" in group for group in groups)
    if not named or any(isinstance(entry, tuple) for entry in members):
        return members
    return [(f"{len(groups)}.{position}", parameter) for position, parameter in enumerate(members)]
