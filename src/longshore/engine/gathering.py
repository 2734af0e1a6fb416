"""Temporary gathering of whole parameters, wherever their shards are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.optim.shards import is_sharded


@contextlib.contextmanager
def gather(params: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Gather whole parameters inside a ``with`` block, to read or to write them; every rank has to enter and leave it.

    Inside, the model's modules have whole parameters (``layer.weight``), as long as its engine was not destroyed;
    ``with`` returns the same tensors, in order. This works at every stage: parameters that are not sharded are returned
    as they are.

    Args:
        params: a model or a module (all of its parameters), one parameter, or several.
        modifier_rank: the rank that may write; its values are copied to all ranks afterwards, and are the masters from
            the next step on. None: no rank writes; writes to a sharded parameter are then lost.

    Raises:
        ValueError: a DTensor belongs to no model of ``longshore.initialize``, or the rank does not exist.
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
    sharded = [parameter for parameter in wanted if is_sharded(parameter)]
    with contextlib.ExitStack() as stack:
        whole: dict[int, Tensor] = {}
        if sharded:
            # Imported here: it imports torch's FSDP2, which takes a while.
            from longshore.sharding.fsdp import unsharded

            whole = stack.enter_context(unsharded(sharded, modifier_rank is not None))
        given = [whole.get(id(parameter), parameter) for parameter in wanted]
        yield given
        if modifier_rank is not None and several:
            for tensor in given:
                _broadcast(tensor, modifier_rank)


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
