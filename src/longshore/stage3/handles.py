"""Tensors of sharded parameters that scripts hold outside of ``gather()``, checked for changes that would be lost."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

from torch import Tensor

from longshore.errors import ParameterError
from longshore.optim.parameters import has_hooks
from longshore.optim.released import is_released
from longshore.optim.shards import former_of, held_part


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
