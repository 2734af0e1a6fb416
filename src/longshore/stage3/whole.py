"""Sharded parameters that are whole for a while: every handle of one reads and writes the same whole values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longshore.optim.released import is_released
from longshore.optim.shards import checksum

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
