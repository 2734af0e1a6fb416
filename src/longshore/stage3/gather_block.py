"""Blocks of ``gather()``, inside which sharded parameters are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from longshore.optim.shards import flat, former_of, held_part, is_former
from longshore.stage3.fsdp import FullyShardedModel, member_of
from longshore.stage3.fsdp_records import groups_of, parallel_placements
from longshore.stage3.whole import Whole


class GatherBlock:
    """Parameters that are whole inside one block of ``gather()``; blocks may be inside one another.

    All ranks have to make it and to :meth:`leave` it.

    Args:
        parameters: sharded parameters, given as shards, as the tensors into which they are gathered, or as the
            parameters that the shards replaced.
        writes: whether they are to be written.

    Raises:
        ValueError: a parameter belongs to no known model, or is one of tensor parallelism and is to be written.
    """

    def __init__(self, parameters: Sequence[Tensor], writes: bool) -> None:
        found: dict[int, tuple[FullyShardedModel, Any]] = {}
        self.handles: list[Tensor] = []
        """Tensors that are whole inside, in the order of ``parameters``: the shards, and those that they replaced."""
        for given in parameters:
            model, member = member_of(given)
            found[id(member)] = model, member
            self.handles.append(given if is_former(given) else member.sharded_param)
            if writes and parallel_placements(member):
                # The module keeps its part, and a write to the copy would be lost silently.
                raise ValueError(
                    f"parameter {model.names[id(member.sharded_param)]} is one of tensor parallelism, of which "
                    "gather() gives a copy to read; to write it use longshore.utils.safe_set_full_fp32_param()"
                )
        self._writes = writes
        self._members = list(found.values())
        self._models = list(dict.fromkeys(model for model, _ in self._members))
        self._modules = [
            module
            for model in self._models
            for module in model.modules
            if any(id(member) in found for group in groups_of(module) for member in group.fsdp_params)
        ]
        for model in self._models:
            model.align()
        try:
            for module in self._modules:
                self._gather(module)
        except BaseException:
            self.leave()
            raise

    def _gather(self, module: FSDPModule) -> None:
        """Make those of the parameters whole that a module gathers, one module after the other: memory for one more is
        enough."""
        here = {id(member) for group in groups_of(module) for member in group.fsdp_params}
        wanted = [(model, member) for model, member in self._members if id(member) in here]
        if any(id(member.sharded_param) not in model.whole for model, member in wanted):
            module.unshard()
        for model, member in wanted:
            shard = member.sharded_param
            if id(shard) not in model.whole:
                former = [] if (one := former_of(shard)) is None else [one]
                model.whole[id(shard)] = Whole(model.names[id(shard)], shard, member._unsharded_param, former)
            model.whole[id(shard)].begin(self, self._writes)
        if all(model.grid.tp_size == 1 for model, _ in wanted):
            FSDPModule.reshard(module)  # the module has the shards now, which are whole

    def whole(self) -> list[Whole]:
        return [model.whole[id(member.sharded_param)] for model, member in self._members]

    def problems(self) -> list[str]:
        """Return the changes of the block that cannot stay, by parameter."""
        found = []
        for each in self.whole():
            if (problem := each.take()) is not None:
                found.append(problem)
            elif each.written_in(self):
                found.append(f"parameter {each.name} was written without modifier_rank")
        return found

    @torch.no_grad()
    def write(self) -> None:
        """Give the shards the whole values, which are those of all ranks now."""
        for model, member in self._members:
            whole, shard = model.whole[id(member.sharded_param)], held_part(member.sharded_param)
            offset, numel = model.layout_of(member.sharded_param).shard(dist.get_rank())
            shard.copy_(flat(whole.tensor)[offset : offset + numel].view(shard.shape))
            # These are the versions of the shard itself, which tells the optimizer that somebody wrote.
            torch.autograd.graph.increment_version(member.sharded_param)
            for block, digest in whole.digests.items():
                if digest is not None:
                    whole.digests[block] = whole.digest()  # another block around this one

    def leave(self) -> None:
        for model, member in self._members:
            key = id(member.sharded_param)
            if (whole := model.whole.get(key)) is not None:
                whole.digests.pop(self, None)
                if not whole.digests:
                    model.whole.pop(key).end()
                    model.handles.note([whole.name])
        for model in self._models:
            model.align_trainable()
            model.copies.wait()
        for module in self._modules:
            FSDPModule.reshard(module)
