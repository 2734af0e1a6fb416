"""A model's first weights, from rank 0's memory or from files, and how every rank gets its shards of them."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.checkpoint.rank_group import RankGroup
from longshore.engine.creation import on_meta, put
from longshore.engine.ranks import Ranks
from longshore.engine.weight_files import WeightFiles, cast
from longshore.errors import ParameterError
from longshore.optim.parameters import ParameterRecord, flat
from longshore.optim.shards import held_part

if TYPE_CHECKING:
    from longshore.sharding.fsdp import FullyShardedModel


class Weights:
    """A model's first weights.

    Args:
        files: where to read them; None: rank 0 has them.
        parameters: names in the files, by name in the model.
        buffers: names of buffers that are in the files.
        kept: names of persistent buffers that are not.
    """

    def __init__(
        self,
        files: WeightFiles | None = None,
        parameters: dict[str, str] | None = None,
        buffers: frozenset[str] = frozenset(),
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self._files = files
        self._parameters = parameters or {}
        self._buffers = buffers
        self._kept = kept

    @torch.no_grad()
    def place(self, model: nn.Module, ranks: Ranks, parameters: bool) -> None:
        """Move buffers, and ``parameters`` or not, to this rank's device with their values; all ranks have to call."""
        for parameter in model.parameters() if parameters else ():
            if parameter.is_meta:
                put(nn.Parameter(_empty(parameter, ranks.device), parameter.requires_grad), into=parameter)
        made: dict[int, tuple[Tensor, Tensor]] = {}
        """Each buffer, which may have several names, and its replacement, by ``id``."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in made:
                        there = _empty(buffer, ranks.device) if buffer.is_meta else buffer.to(ranks.device)
                        made[id(buffer)] = buffer, there
                    module._buffers[name] = made[id(buffer)][1]
        if parameters:
            model.to(ranks.device)
        if self._files is not None and ranks.rank == 0:
            for name, buffer in model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._files.read(name))
            for name, parameter in model.named_parameters() if parameters else ():
                parameter.copy_(self._files.read(self._parameters[name]))
        for tensor in (*(model.parameters() if parameters else ()), *model.buffers()):
            _broadcast(tensor, ranks)

    @torch.no_grad()
    def fill(self, sharded: FullyShardedModel, former: dict[str, Tensor], ranks: Ranks) -> None:
        """Fill each rank's shards; all ranks have to call.

        Args:
            sharded: the model, with memory for the shards.
            former: the model's parameters before it was sharded, by name. Their memory is freed, one by one.
            ranks: this process among the run's.
        """
        for name, parameter in sharded.model.named_parameters():
            layout = sharded.layout_of(parameter)
            shards = [layout.shard(rank) for rank in range(ranks.world_size)]
            if self._files is not None:
                held = held_part(parameter)
                held.copy_(self._read(name, parameter, sharded, shards[ranks.rank]).view(held.shape))
            elif former:
                _scatter(former[name], parameter, shards, ranks)
            if name in former:
                # Code that still uses it fails: its shape fits nothing.
                former[name].data = former[name].data.new_empty(0)

    def _read(self, name: str, parameter: Tensor, sharded: FullyShardedModel, shard: tuple[int, int]) -> Tensor:
        assert self._files is not None
        name, (offset, numel), layout = self._parameters[name], shard, sharded.layout_of(parameter)
        if numel == 0:
            return torch.empty(0, dtype=parameter.dtype)
        if layout.dim is not None:  # tensor parallelism may have divided it across rows
            whole = flat(self._files.read(name))
            return cast(layout.part_of(whole, sharded.tp_rank)[offset : offset + numel], parameter.dtype)
        row_numel = parameter.numel() // parameter.shape[0]
        return cast(flat(self._files.read(name, offset // row_numel, (offset + numel) // row_numel)), parameter.dtype)

    def warn_about_rest(self) -> None:
        """Warn about buffers that the files lack, and tensors that the model lacks."""
        if self._files is None:
            return
        if self._kept:
            warnings.warn(
                f"{self._files.path} has no {', '.join(sorted(self._kept)[:3])} ({len(self._kept)} buffers, which "
                "state_dict() has): they keep the values that the model initialised",
                stacklevel=5,
            )
        unread = sorted(self._files.names - set(self._parameters.values()) - self._buffers)
        if unread:
            warnings.warn(
                f"{len(unread)} tensors of {self._files.path} are in no place of the model and are not read: "
                f"{', '.join(unread[:3])}{', ...' if len(unread) > 3 else ''}",
                stacklevel=5,
            )

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


def first_weights(model: nn.Module, path: str | os.PathLike[str] | None, ranks: Ranks, everywhere: bool) -> Weights:
    """Find the model's first weights, and check them on every rank; all have to call.

    Args:
        model: in its dtype.
        path: of files, or None for rank 0's weights.
        ranks: this process among the run's.
        everywhere: every rank reads its shards, instead of rank 0 everything.

    Raises:
        ValueError, FileNotFoundError: missing weights, by name; on all ranks, whichever lacks them.
    """
    weights = Weights()

    def look() -> None:
        nonlocal weights
        if path is not None and (everywhere or ranks.rank == 0):
            weights = _from_files(model, WeightFiles(path))
        elif path is None and ranks.rank == 0:
            _check_there(model)

    try:
        RankGroup(ranks.group if ranks.world_size > 1 else None).together(look)
    except BaseException:
        weights.close()
        raise
    if ranks.rank == 0:
        weights.warn_about_rest()
    return weights


def _from_files(model: nn.Module, files: WeightFiles) -> Weights:
    try:
        parameters = files.chosen(dict(model.named_parameters(remove_duplicate=False)))
        buffers = dict(model.named_buffers())
        there = {name: buffer for name, buffer in buffers.items() if name in files.names}
        files.chosen(there)
        for name, buffer in buffers.items():
            if buffer.is_meta and name not in there:
                raise ValueError(
                    f"buffer {name} is on the meta device, and {files.path} has none of that name; make the model "
                    "under longshore.Init(empty=True), which makes buffers"
                )
    except BaseException:
        files.close()
        raise
    kept = frozenset(buffers.keys() & model.state_dict().keys()) - there.keys()
    return Weights(files, parameters, frozenset(there), kept)


def _check_there(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise ValueError(
                    f"{kind} {name} is on the meta device, and rank 0 has no values for it; give "
                    "initialize(weights=...) safetensors files, or make the model under longshore.Init()"
                )


def without_memory(model: nn.Module) -> None:
    """Replace a model's parameters by ones without memory; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = on_meta(parameter)
                module._parameters[name] = made[id(parameter)]


def with_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate memory, uninitialised, for a sharded model's parameters that have none."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model._apply(lambda tensor: _empty(tensor, device) if tensor.is_meta else tensor)


@torch.no_grad()
def leaves_as_is(module: nn.Module, records: Iterable[ParameterRecord], convert: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``convert``, as ``nn.Module._apply`` gets it, returns every parameter and buffer itself.

    Raises:
        ParameterError: it would change a parameter of ``records``, which an optimizer steps; nothing was converted.
    """
    for record in records:
        found = convert(record.parameter)
        if (found.dtype, found.device) != (record.dtype, record.device):
            raise ParameterError(
                f"the engine steps {record.name} as {record.dtype} on {record.device}, and this would make it "
                f"{found.dtype} on {found.device}; set fp16 or bf16 in the configuration, or convert and move the "
                "model before initialize() (engine.destroy() ends this engine)"
            )
    return all(convert(tensor) is tensor for tensor in itertools.chain(module.parameters(), module.buffers()))


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device)


def _broadcast(tensor: Tensor, ranks: Ranks) -> None:
    """Broadcast rank 0's values."""
    if ranks.world_size == 1 or tensor.numel() == 0:
        return
    # An expanded buffer (a mask) repeats itself in memory, and cannot be written as a whole.
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    values = once.detach().contiguous()
    dist.broadcast(values.view(-1).view(torch.uint8), src=0, group=ranks.group)
    once.copy_(values)


def _scatter(former: Tensor, parameter: Tensor, shards: list[tuple[int, int]], ranks: Ranks) -> None:
    """Send each rank its shard from rank 0."""
    held = held_part(parameter)
    if ranks.rank > 0:
        if held.numel() > 0:
            received = torch.empty_like(held, memory_format=torch.contiguous_format)
            dist.recv(received.view(-1).view(torch.uint8), src=0, group=ranks.group)
            held.copy_(received)
        return
    whole = flat(former.detach())
    for rank, (offset, numel) in enumerate(shards):
        part = whole[offset : offset + numel]
        if rank == 0:
            held.copy_(part.view(held.shape))
        elif numel > 0:
            dist.send(part.to(ranks.device).view(torch.uint8), dst=rank, group=ranks.group)
