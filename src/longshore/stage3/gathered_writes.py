"""Writes to parameters while FSDP2 has them gathered: as shards, or as the tensors into which they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from longshore.errors import ParameterError
from longshore.layout.divisions import ParameterLayout
from longshore.optim.shards import flat, held_part


class _Gathered(NamedTuple):
    """A parameter that stayed gathered after a forward: FSDP2's record, and the versions that its tensors had."""

    name: str
    member: Any
    layout_of: Callable[[Tensor], ParameterLayout]
    shard_version: int
    whole_version: int


class GatheredWrites:
    """Writes of scripts to parameters that stay gathered after a forward, as those of the model itself do.

    FSDP2 would lose what is written to the gathered tensors, and not see in a next forward what is written to shards.
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
        """Give the shards what was written to gathered tensors, and watch no more; return whether a shard was written,
        so that the parameters have to be gathered anew.

        Raises:
            ParameterError: nobody can say which values of a parameter count, or its gathered tensor is a part of tensor
                parallelism. The values of its shard stay; those of other parameters were taken.
        """
        gathered, by_shard = self._take_each()
        for each in gathered:
            _check_same(each)
        return any(by_shard)

    def take_before_backward(self) -> None:
        """As :meth:`take`, without looking at values, and watch on: what a backward does not reach stays gathered."""
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
