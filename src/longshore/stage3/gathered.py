"""Sharded parameters that are whole for a while: writes to them, and the tensors of them that scripts hold.

Every handle of a parameter that ``gather()`` made whole reads and writes the same values. Writes while FSDP2 has
parameters gathered, to shards or to the tensors into which they are gathered, are taken over. Tensors that scripts hold
outside of ``gather()`` are checked for changes that would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from longshore.errors import ParameterError
from longshore.layout.layout import ParameterLayout
from longshore.optim.dtensor import checksum, flat, former_of, held_part
from longshore.optim.grad_placeholder import is_released
from longshore.optim.parameters import has_hooks

_WHOLE: dict[int, Tensor] = {}
"""The whole tensor that each gathered shard stands for, by the shard's ``id``."""


class _SlotsOfDTensor(Tensor):
    """A type with the memory layout of ``DTensor``: only between such types Python lets an object change its own."""

    __slots__ = DTensor.__slots__


_OF_THE_SHARD = (Tensor.grad, Tensor._grad, Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks)  # pyright: ignore
"""Attributes that stay the shard's: the optimizer keeps a placeholder in its ``.grad``, and looks for hooks there."""

_HOOKING = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class WholeParameter(_SlotsOfDTensor):
    """Type of a shard while it is gathered: operations on its values are on the whole parameter.

    It keeps the shard (``_local_tensor`` and ``_spec``), which FSDP2 and the optimizer still read there.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOOKING or getattr(func, "__self__", None) in _OF_THE_SHARD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _done_with_whole(func, args, kwargs or {}, lambda handle: _WHOLE[id(handle)])

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Reached from C++ only, such as by collectives, where autograd has recorded the call already.
        return _done_with_whole(func, args, kwargs or {}, lambda handle: _WHOLE[id(handle)].detach())

    # Python asks an object itself for these.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _WHOLE[id(self)].__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return _WHOLE[id(self)].__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(_WHOLE[id(self)])


def _done_with_whole(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Any, whole_of: Callable[[Any], Tensor]
) -> Any:
    handles: dict[int, Any] = {}
    kept: list[Tensor] = []  # so that no id is used twice

    def whole(value: Any) -> Any:
        if type(value) is WholeParameter:
            found = whole_of(value)
            kept.append(found)
            handles[id(found)] = value
            return found
        if isinstance(value, tuple):
            return type(value)(*map(whole, value)) if hasattr(value, "_fields") else type(value)(map(whole, value))
        if isinstance(value, list):
            return [whole(each) for each in value]
        return {key: whole(each) for key, each in value.items()} if isinstance(value, dict) else value

    result = func(*whole(tuple(args)), **whole(kwargs))
    # What returns the tensor itself (zero_(), requires_grad_(), +=) returns the handle.
    return handles.get(id(result), result)


class Whole:
    """A sharded parameter that is whole inside blocks of ``gather()``; :meth:`end` makes it a shard again.

    Args:
        name: the parameter's name in messages.
        shard: the parameter as it is in the optimizer, a ``DTensor``.
        leaf: the tensor into which it is gathered, with the whole values now. A ``DTensor`` is one of tensor
            parallelism: handles have a copy then, and ``leaf`` itself stays as it is.
        former: parameters that the shard replaced, without elements outside of the blocks.

    Attributes:
        tensor: the whole parameter, in memory that stays as long as something uses it.
        digests: for each block that has it, the digest that it must have at the end; None: it may be written there.
        refused: whether a block that it must not be written in was left, and it was.
    """

    def __init__(self, name: str, shard: Any, leaf: Tensor, former: Sequence[Tensor]) -> None:
        self.name = name
        self.shard = shard
        self.digests: dict[object, int | None] = {}
        self.refused = False
        self._leaf: Tensor | None = None
        if isinstance(leaf, DTensor):
            self.tensor: Tensor = nn.Parameter(leaf.full_tensor().detach().clone(), leaf.requires_grad)
        else:
            # FSDP2 frees the memory into which it gathers, and scripts keep what shares it (detach(), numpy()).
            self.tensor = self._leaf = leaf
            self._gathered = leaf.data
            leaf.data = leaf.data.clone()
        self._memory = self.tensor.data
        self._kind = type(shard)
        _WHOLE[id(shard)] = self.tensor
        shard.__class__ = WholeParameter
        self._trains = self.tensor.requires_grad
        self._former = [(each, each.data) for each in former]
        for each in former:
            each.data = self._memory
            each.requires_grad_(self._trains)

    def begin(self, block: object, writes: bool) -> None:
        self.digests[block] = None if writes else self.digest()

    def digest(self) -> int:
        return checksum(self.tensor)

    def take(self) -> str | None:
        """Give all handles the memory that a script gave one of them (``p.data = x``); return what it did that cannot
        count."""
        if any(each.grad is not None and not is_released(each.grad) for each, _ in self._former):
            return f"parameter {self.name} got a gradient where it is held from before initialize()"
        memory, handles = self._memory, (self.tensor, *(each for each, _ in self._former))
        given = [each.data for each in handles if not _same(each, memory)]
        if not given:
            return None
        if not all(_same(each, given[0]) for each in given):
            return f"two handles of parameter {self.name} were given different memory (p.data = x)"
        found, expected = given[0], memory
        if (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device):
            return (
                f"parameter {self.name} is {list(expected.shape)} {expected.dtype} on {expected.device} and was made "
                f"{list(found.shape)} {found.dtype} on {found.device} (p.data = x)"
            )
        self._memory = found
        for each in handles:
            each.data = found
        return None

    def written_in(self, block: object) -> bool:
        """Return whether it was written in a block that must not write it, or in such a block inside this one."""
        digest = self.digests[block]
        self.refused = self.refused or (digest is not None and digest != self.digest())
        return self.refused

    def end(self) -> None:
        """Make it a shard again; its values are those of the shards."""
        handles = self.tensor, *(each for each, _ in self._former)
        # A script may have frozen or thawed any of them.
        trains = self._trains ^ any(each.requires_grad != self._trains for each in handles)
        self.shard.__class__ = self._kind
        del _WHOLE[id(self.shard)]
        for each in (self.shard, *handles):
            each.requires_grad_(trains)
        if self._leaf is not None:
            self._leaf.data = self._gathered
        for each, without_elements in self._former:
            each.data = without_elements


def _same(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether two tensors are the same elements in the same memory."""
    places = [(each.data_ptr(), each.shape, each.stride(), each.dtype, each.device) for each in (tensor, memory)]
    return places[0] == places[1]


class Handles:
    """The shards of a model's parameters, and the parameters from before ``initialize()`` that scripts still have.

    The latter have no elements outside of blocks of ``gather()``.

    Args:
        keys: the ``id`` of each shard, by name.
        members: FSDP2's record of each shard, by its ``id``.
        whole: has the ``id`` of each shard that is whole now, inside a block of ``gather()``.
    """

    def __init__(self, keys: Mapping[str, int], members: Mapping[int, Any], whole: Container[int]) -> None:
        self._shards = {name: members[key].sharded_param for name, key in keys.items()}
        self._whole = whole
        self._memory = {name: _memory_of(shard) for name, shard in self._shards.items()}
        self._formers: dict[str, tuple[int, Any]] = {}
        """Version and memory of each former parameter when it was noted."""

    def note(self, names: Collection[str]) -> None:
        """Take former parameters as they are now: they have been replaced, or have been whole."""
        for name in names:
            if (former := former_of(self._shards[name])) is not None:
                self._formers[name] = former._version, _place_of(former)

    def check(self) -> None:
        """Raise ParameterError for a change of a parameter that is not whole; for a write only once."""
        for name, before in self._formers.items():
            former = former_of(self._shards[name])
            if former is None or self._is_whole(name) or (what := _done_to(former, *before)) is None:
                continue
            self._formers[name] = former._version, before[1]
            raise ParameterError(
                f"parameter {name} {what} through the object that it was before initialize(), which is empty outside "
                "of gather() at stage 3, so that this would be lost; use longshore.gather([p], modifier_rank=...), or "
                "the model's own parameter, which is a shard"
            )
        for name, shard in self._shards.items():
            if self._is_whole(name):
                continue
            storage, held = self._memory[name]
            self._memory[name] = now = _memory_of(shard)
            if now[0]._cdata != storage._cdata and now[1] is held:
                raise ParameterError(
                    f"parameter {name} was given other memory (p.data = x), which changes nothing in a shard: write in "
                    "place (p.data.copy_(x)), or inside longshore.gather()"
                )

    def _is_whole(self, name: str) -> bool:
        return id(self._shards[name]) in self._whole


def _memory_of(shard: Any) -> tuple[Any, Tensor]:
    """Return what ``p.data = x`` replaces in a DTensor, which has no elements, and the tensor that has them."""
    return shard.untyped_storage(), held_part(shard)


def _place_of(former: Tensor) -> Any:
    return former.shape, former.dtype, former.data_ptr()


def _done_to(former: Tensor, version: int, place: Any) -> str | None:
    if former.grad is not None and not is_released(former.grad):
        return "was given a gradient"
    if has_hooks(former):
        return "was given a hook"
    if _place_of(former) != place:
        return "was given other memory"
    return "was written" if former._version != version else None


class _Gathered(NamedTuple):
    """A parameter that stayed gathered after a forward: FSDP2's record, and the versions that its tensors had."""

    name: str
    member: Any
    layout_of: Callable[[Tensor], ParameterLayout]
    shard_version: int
    whole_version: int


class GatheredWrites:
    """Writes of scripts to parameters that stay gathered after a forward, as those of the model itself do.

    FSDP2 would lose writes to the gathered tensors, and not see in a next forward those to shards.
    """

    def __init__(self) -> None:
        self._gathered: list[_Gathered] = []

    def watch(self, members: Iterable[tuple[str, Any, Callable[[Tensor], ParameterLayout]]]) -> None:
        """Watch parameters, given with their names and the functions of their layouts, from the end of a forward on."""
        self._gathered = [
            _watched(name, member, layout_of)
            for name, member, layout_of in members
            if member.sharded_state == ShardedState.UNSHARDED and member._unsharded_param.numel()
        ]

    def take(self) -> bool:
        """Give the shards the values that were written to gathered tensors, and watch no more; return whether a shard
        was written, so that the parameters have to be gathered anew.

        Raises:
            ParameterError: it cannot be told which values of a parameter count, or its gathered tensor is a part of
                tensor parallelism. The values of its shard stay; those of other parameters were taken.
        """
        gathered, by_shard = self._take_each()
        for each in gathered:
            _check_same(each)
        return any(by_shard)

    def take_before_backward(self) -> None:
        """As :meth:`take`, without looking at values, and watch on: tensors that a backward does not reach stay
        gathered."""
        gathered, by_shard = self._take_each()
        self._gathered = [
            each if written else _watched(*each[:3]) for each, written in zip(gathered, by_shard, strict=True)
        ]

    def _take_each(self) -> tuple[list[_Gathered], list[bool]]:
        """Take the writes to all parameters before the first error is raised; return whether each shard was written."""
        gathered = [each for each in self._gathered if each.member.sharded_state == ShardedState.UNSHARDED]
        self._gathered, by_shard, failure = [], [], None
        for each in gathered:
            try:
                by_shard.append(_take(each))
            except ParameterError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return gathered, by_shard


def _watched(name: str, member: Any, layout_of: Callable[[Tensor], ParameterLayout]) -> _Gathered:
    return _Gathered(name, member, layout_of, member.sharded_param._version, member._unsharded_param._version)


def _take(gathered: _Gathered) -> bool:
    """Give the shard the writes to the gathered tensor; return whether the shard was written."""
    shard, whole = gathered.member.sharded_param, gathered.member._unsharded_param
    to_shard = shard._version != gathered.shard_version
    if whole._version == gathered.whole_version:
        return to_shard
    if to_shard or (mine := _part_of(gathered)) is None:
        raise ParameterError(
            f"parameter {gathered.name} was written as the tensor that the model has between a forward and its "
            f"backward, and {'as its shard, too' if to_shard else 'is one of tensor parallelism'}: write the shard, "
            "or inside longshore.gather(); the shard's values count now"
        )
    own = held_part(shard)
    with torch.no_grad():
        own.copy_(mine.view(own.shape))
    torch.autograd.graph.increment_version(shard)  # tells the optimizer that somebody wrote
    return False


def _check_same(gathered: _Gathered) -> None:
    shard = gathered.member.sharded_param
    mine = None if shard._version != gathered.shard_version else _part_of(gathered)
    held = flat(held_part(shard))
    if mine is not None and not torch.equal(mine.to(held.device).view(torch.uint8), held.view(torch.uint8)):
        raise ParameterError(
            f"parameter {gathered.name} was written between a forward and its backward, when there were two tensors "
            "of it, in a way that torch does not count (p.data, NumPy): write it under torch.no_grad() without .data, "
            "or inside longshore.gather(); the shard's values count now"
        )


def _part_of(gathered: _Gathered) -> Tensor | None:
    """Return the elements of a gathered tensor that this rank's shard has, flat; None with tensor parallelism."""
    if gathered.member._unsharded_dtensor_spec is not None:
        return None
    offset, numel = gathered.layout_of(gathered.member.sharded_param).shard(dist.get_rank())
    return flat(gathered.member._unsharded_param)[offset : offset + numel]
