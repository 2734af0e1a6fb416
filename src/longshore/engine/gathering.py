"""Temporary gathering of whole parameters, wherever their shards are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.errors import ParameterError, RankError
from longshore.optim.shards import is_sharded


@contextlib.contextmanager
def gather(params: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Gather whole parameters inside a ``with`` block, to read or to write them; every rank has to enter and leave it.

    Inside, the parameters are whole wherever a script has them: the model's (``layer.weight``), those of
    ``parameters()``, the optimizer's, and those from before ``initialize()``; all are the same values. ``with`` returns
    them, in order. Tensors that share their memory (``p.detach()``, ``p.numpy()``) stay valid afterwards. This works at
    every stage: parameters that are not sharded are returned as they are.

    Args:
        params: a model or a module (all of its parameters), one parameter, or several.
        modifier_rank: the rank that may write; its values are copied to all ranks afterwards, and are the masters from
            the next step on. None: no rank writes.

    Raises:
        ValueError: a DTensor belongs to no model of ``longshore.initialize``, or the rank does not exist.
        ParameterError: at the end, on all ranks: a sharded parameter was written without ``modifier_rank``, or was
            given memory of another shape, dtype or device. All keep the values from before.
        RankError: at the end: another rank left the block by an exception. All keep the values from before.
    """
    wanted = list(params.parameters()) if isinstance(params, nn.Module) else params
    wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
    for entry in wanted:
        if not isinstance(entry, Tensor):
            raise TypeError(f"gather() takes parameters or a module, not {type(entry).__name__}")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ranks = dist.get_world_size() if several else 1
    if modifier_rank is not None and not (isinstance(modifier_rank, int) and 0 <= modifier_rank < ranks):
        raise ValueError(f"modifier_rank is a rank from 0 to {ranks - 1}, or None, not {modifier_rank!r}")
    sharded = [parameter for parameter in wanted if comes_in_shards(parameter)]
    if not sharded:
        yield wanted
    else:
        # Imported here: it imports torch's FSDP2, which takes a while.
        from longshore.sharding.gather_block import GatherBlock

        block = GatherBlock(sharded, modifier_rank is not None)
        try:
            handles = dict(zip(map(id, sharded), block.handles, strict=True))
            try:
                yield [handles.get(id(parameter), parameter) for parameter in wanted]
            except Exception as error:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    _tell(f"{type(error).__name__}: {error}", [])
                raise
            _tell(None, block.problems())
            if modifier_rank is not None:
                for whole in block.whole():
                    _broadcast(whole.tensor, modifier_rank)
                block.write()
        finally:
            block.leave()
    if modifier_rank is not None and several:
        done = set(map(id, sharded))
        for tensor in wanted:
            if id(tensor) not in done:
                _broadcast(tensor, modifier_rank)


def comes_in_shards(parameter: Tensor) -> bool:
    """Return whether a tensor is a parameter that is sharded outside of :func:`gather`, whatever it is now."""
    fsdp = sys.modules.get("longshore.sharding.fsdp")  # if it was never imported, nothing of longshore is sharded
    return is_sharded(parameter) or (fsdp is not None and fsdp.is_member(parameter))


def _tell(failure: str | None, problems: list[str]) -> None:
    """Tell all ranks what became of the block on this one, and raise on all of them what was wrong on any."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (failure, problems))
    for rank, (theirs, _) in enumerate(said):
        if theirs is not None:
            raise RankError(
                f"rank {rank} left gather() by an exception ({theirs}), and all parameters keep their values from "
                "before; look at the first error of any rank"
            )
    for rank, (_, wrong) in enumerate(said):
        if wrong:
            more = f" ({len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
            raise ParameterError(
                f"rank {rank}, inside gather(): {wrong[0]}{more}, so all parameters keep their values from before; "
                "write in place, and say which rank writes (modifier_rank)"
            )


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int) -> None:
    if tensor.numel() == 0:
        return
    values = tensor.detach().contiguous()
    dist.broadcast(values.view(-1).view(torch.uint8), src=source)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
    # The write may be one that torch cannot see, and all ranks have to adopt it.
    torch.autograd.graph.increment_version(tensor)
