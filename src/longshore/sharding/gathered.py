"""Gathering whole parameters for a while, wherever their shards are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.optim.shards import is_sharded


@contextlib.contextmanager
def gather(params: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Whole parameters inside a ``with``, to read or to write; every rank has to enter and to leave.

    Inside, the model's modules have whole parameters (``layer.weight``), as long as its engine was not destroyed; the
    same tensors are what ``with`` gives, in order. It works at every stage: what is not sharded is given as it is.

    Args:
        params: a model or a module (all of its parameters), one parameter, or several.
        modifier_rank: what this rank wrote holds on all ranks afterwards, and is the master from the next step on.
            None: nobody writes. What is written to a sharded parameter all the same is lost.

    Raises:
        ValueError: a DTensor that no model of ``longshore.initialize`` has, or a rank that does not exist.
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
    # Who wrote it may have done so where torch does not see it, and all ranks have to take it up.
    torch.autograd.graph.increment_version(tensor)
