"""Temporary gathering of whole parameters, wherever their shards are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.engine.creation import FirstBlock, send, unplaced
from longshore.errors import ParameterError, RankError
from longshore.optim.shards import is_sharded
from longshore.ranks.waiting import gather_from_all

if TYPE_CHECKING:
    from longshore.stage3.gather_block import GatherBlock


@contextlib.contextmanager
def gather(params: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Gather whole parameters inside a ``with`` block, to read or to write them; every rank has to enter and leave it.

    Inside, the parameters are whole wherever a script has them: the model's (``layer.weight``), those of
    ``parameters()``, the optimizer's, and those from before ``initialize()``; all are the same values. ``with`` returns
    them, in order. Tensors that share their memory (``p.detach()``, ``p.numpy()``) stay valid afterwards. This works at
    every stage: parameters that are not sharded are returned as they are. Before ``initialize()`` parameters that were
    made in :class:`longshore.Init` have rank 0's values inside, on all ranks.

    Args:
        params: a model or a module (all of its parameters), one parameter, or several.
        modifier_rank: the rank that may write; its values are copied to all ranks afterwards, and are the masters from
            the next step on. None: no rank writes.

    Raises:
        ValueError: a DTensor belongs to no model of ``longshore.initialize``, or the rank does not exist.
        ParameterError: at the end, on all ranks: a sharded parameter was written without ``modifier_rank``, or was
            given memory of another shape, dtype or device. All keep the values from before; before ``initialize()``
            rank 0's own parameters have its writes.
        RankError: at the end: another rank left the block by an exception; values as above. Or the ranks gather
            different parameters.
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
    with contextlib.ExitStack() as left:
        first = _first_block(wanted, modifier_rank) if several else None
        if first is not None:
            left.callback(first.leave)
        block, handles = None, dict[int, Tensor]()
        if sharded:
            # Imported here: it imports torch's FSDP2, which takes a while.
            from longshore.stage3.gather_block import GatherBlock

            block = GatherBlock(sharded, modifier_rank is not None)
            left.callback(block.leave)
            handles = dict(zip(map(id, sharded), block.handles, strict=True))
        blocks = [each for each in (first, block) if each is not None]
        try:
            yield [handles.get(id(parameter), parameter) for parameter in wanted]
        except Exception as error:
            if blocks:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    _tell(f"{type(error).__name__}: {error}", [], first is not None)
            raise
        if blocks:
            _tell(None, [problem for each in blocks for problem in each.problems()], first is not None)
        if modifier_rank is not None:
            _write(first, block, modifier_rank)
    if modifier_rank is not None and several:
        done = {*map(id, sharded), *(map(id, first.parameters) if first is not None else ())}
        for tensor in wanted:
            if id(tensor) not in done:
                _broadcast(tensor, modifier_rank)


def _write(first: FirstBlock | None, block: GatherBlock | None, source: int) -> None:
    if block is not None:
        for whole in block.whole():
            _broadcast(whole.tensor, source)
        block.write()
    if first is not None:
        first.write(source)


def _first_block(wanted: Sequence[Tensor], modifier_rank: int | None) -> FirstBlock | None:
    """Give every rank the values of the parameters that are to be placed by ``initialize()``; None if there are none.

    With a writer all ranks meet anyway. Without one they meet only if they gather parameters that :class:`Init` made.
    """
    others = [each for each in wanted if not comes_in_shards(each)]
    if not others or (modifier_rank is None and all(unplaced(each) is None for each in others)):
        return None
    block = FirstBlock(others, modifier_rank is not None)
    return block if block.parameters else None


def comes_in_shards(parameter: Tensor) -> bool:
    """Return whether a tensor is a parameter that is sharded outside of :func:`gather`, whatever it is now."""
    fsdp = sys.modules.get("longshore.stage3.fsdp")  # if it was never imported, nothing of longshore is sharded
    return is_sharded(parameter) or (fsdp is not None and fsdp.is_member(parameter))


def _tell(failure: str | None, problems: list[str], first: bool) -> None:
    """Tell all ranks what became of the block on this one, and raise on all of them what was wrong on any; ``first``:
    parameters from before ``initialize()`` are among those of the block."""
    said = gather_from_all("leaving gather()", (failure, problems))
    kept = "all parameters keep their values from before"
    if first:
        kept = "parameters from before initialize() are what rank 0 made of its own, and others keep their values"
    for rank, (theirs, _) in enumerate(said):
        if theirs is not None:
            raise RankError(
                f"rank {rank} left gather() by an exception ({theirs}), and {kept}; look at the first error of any rank"
            )
    for rank, (_, wrong) in enumerate(said):
        if wrong:
            more = f" ({len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
            raise ParameterError(
                f"rank {rank}, inside gather(): {wrong[0]}{more}, so {kept}; "
                "write in place, and say which rank writes (modifier_rank)"
            )


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int) -> None:
    send(tensor.detach(), source)
    # The write may be one that torch cannot see, and all ranks have to adopt it.
    if tensor.numel():
        torch.autograd.graph.increment_version(tensor)
