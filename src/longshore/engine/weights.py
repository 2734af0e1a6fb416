"""A model's first weights, from rank 0's memory or from safetensors files, and how every rank gets its shards."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.checkpoint.rank_group import RankGroup
from longshore.engine.creation import note_placed, on_meta, put
from longshore.engine.ranks import Ranks
from longshore.engine.wording import joined_names
from longshore.optim.dtensor import flat, held_part, is_sharded, like
from longshore.ranks.waiting import finish
from longshore.transfer import allocate_pinned

if TYPE_CHECKING:
    from longshore.stage3.fsdp import FullyShardedModel


class Weights:
    """A model's first weights. Files are mapped into memory: tensors that are not read take none.

    Args:
        path: a ``.safetensors`` file, or a folder with some (as ``save_pretrained`` makes them); None: rank 0 has the
            weights.

    Raises:
        FileNotFoundError: the file or folder does not exist, or the folder lacks files.
        ValueError: a file cannot be read, or a tensor is in two files; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        """The open file of each tensor."""
        self._names: dict[str, str] = {}
        """The name in the files of each of the model's parameters, by its name in the model."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for file in () if self.path is None else _files(self.path):
                self._open(file)
            undo.pop_all()

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 - no mapping
            if name in self._file_of:
                raise ValueError(f"tensor {name} is in two files of {self.path}; remove the stale ones")
            self._file_of[name] = file

    def close(self) -> None:
        self._file_of.clear()
        self._stack.close()

    # -- before anything changes ------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Compare the files with a model, and keep its parameters' names for reading.

        Raises:
            ValueError: tensors are missing, or have another shape or kind of number; the message names them.
        """
        buffers = dict(model.named_buffers())
        self._names = self._names_of(dict(model.named_parameters(remove_duplicate=False)))
        self._names_of({name: buffer for name, buffer in buffers.items() if name in self._file_of})
        for name, buffer in buffers.items():
            if buffer.is_meta and name not in self._file_of:
                raise ValueError(
                    f"buffer {name} is on the meta device, and {self.path} has none of that name; make the model "
                    "under longshore.Init(empty=True), which makes buffers"
                )

    def _names_of(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Return the name in the files for each of a model's tensors: its own, or that of one tied to it."""
        found, wrong = {}, []
        names: dict[int, list[str]] = {}  # of each tensor; tied ones have several
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        for name, tensor in tensors.items():
            here = next((each for each in names[id(tensor)] if each in self._file_of), None)
            here = name if name in self._file_of else here
            if here is None:
                wrong.append(f"{name} is not there")
                continue
            found[name] = here
            header = self._file_of[here].get_slice(here)
            shape, dtype = list(header.get_shape()), header.get_dtype()  # as the format names it: F32, BF16, I8
            if shape != list(tensor.shape):
                wrong.append(f"{here} is {shape} and the model's is {list(tensor.shape)}")
            elif dtype.startswith(("F", "BF")) != tensor.is_floating_point():
                wrong.append(f"{here} is {dtype} and the model's is {tensor.dtype}")
        if wrong:
            raise ValueError(f"{self.path} has not the weights of this model: {joined_names(wrong)}")
        return found

    def warn_about_rest(self, model: nn.Module) -> None:
        """Warn about buffers that the files lack, and tensors that the model lacks."""
        buffers = dict(model.named_buffers())
        kept = sorted(buffers.keys() & model.state_dict().keys() - self._file_of.keys())
        if kept:
            warnings.warn(
                f"{self.path} has no {', '.join(kept[:3])} ({len(kept)} buffers, which state_dict() has): they keep "
                "the values that the model initialised",
                stacklevel=7,  # of the script, by way of a door
            )
        unread = sorted(self._file_of.keys() - self._names.values() - buffers.keys())
        if unread:
            warnings.warn(
                f"{len(unread)} tensors of {self.path} are in no place of the model and are not read: "
                f"{joined_names(unread)}",
                stacklevel=7,  # of the script, by way of a door
            )

    # -- reading ------------------------------------------------------------------

    @torch.no_grad()
    def place(self, model: nn.Module, ranks: Ranks, device: torch.device, parameters: bool) -> None:
        """Move buffers, and parameters if asked, to a device of this rank and set their values; all ranks have to
        call."""
        for parameter in model.parameters() if parameters else ():
            if parameter.is_meta:
                put(nn.Parameter(_empty(parameter, device), parameter.requires_grad), into=parameter)
        _replace(model, "_buffers", lambda each: _empty(each, device) if each.is_meta else each.to(device))
        if parameters:
            _keep_identity(model, device)
            model.to(device)
            for parameter in model.parameters():
                note_placed(parameter)
        named = [*model.named_buffers(), *(model.named_parameters() if parameters else ())]
        for name, tensor in named:
            name = self._names.get(name, name)
            if ranks.rank == 0 and name in self._file_of:
                tensor.copy_(self._read(name))
            _broadcast(tensor, ranks)

    @torch.no_grad()
    def fill(self, sharded: FullyShardedModel, former: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Fill each rank's shards, whose memory is allocated; all ranks have to call. ``former`` has the parameters
        before the model was sharded, by name; their memory is freed one by one."""
        for name, parameter in sharded.model.named_parameters():
            layout = sharded.layout_of(parameter)
            shards = [layout.shard(rank) for rank in range(ranks.world_size)]
            if self.path is not None:
                shard = held_part(parameter)
                shard.copy_(self._read_shard(name, parameter, sharded, *shards[ranks.rank]).view(shard.shape))
            elif former:
                _scatter(former[name], parameter, shards, ranks)
            if name in former:
                # Code that still uses the former parameter fails, since its shape fits nothing. In gather() it is
                # whole, and on the meta device it could not get other memory.
                kept, nothing = former[name], torch.empty(0, dtype=parameter.dtype, device=ranks.device)
                note_placed(kept)
                if _takes(kept, nothing):
                    kept.data = nothing
                else:
                    put(nn.Parameter(nothing, kept.requires_grad), into=kept)

    def _read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows ``[start, stop)`` in the file's dtype; a tensor without dimensions is read as a whole."""
        header = self._file_of[name].get_slice(name)
        return header[start:stop] if header.get_shape() else self._file_of[name].get_tensor(name)

    def _read_shard(self, name: str, parameter: Tensor, sharded: FullyShardedModel, offset: int, numel: int) -> Tensor:
        name, layout = self._names[name], sharded.layout_of(parameter)
        if numel == 0:
            return torch.empty(0, dtype=parameter.dtype)
        if layout.dim is not None:  # tensor parallelism may have divided it across rows
            whole = flat(self._read(name))
            return layout.part_of(whole, sharded.tp_rank)[offset : offset + numel].to(parameter.dtype)
        row_numel = parameter.numel() // parameter.shape[0]
        return flat(self._read(name, offset // row_numel, (offset + numel) // row_numel)).to(parameter.dtype)


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no file or folder {path} to read weights from; models on a hub are not fetched: give a folder"
        )
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not a valid index of weights: {error}") from error
        missing = [file.name for file in found if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {joined_names(missing)}, which {path} does not have")
        return found
    found = sorted(path.glob("*.safetensors"))
    if not found:
        others = sorted(each.name for each in path.glob("*.bin"))
        convert = f"; load {others[0]} once and write it with safetensors.torch.save_file" if others else ""
        raise FileNotFoundError(f"{path} has no .safetensors file to read weights from{convert}")
    return found


def first_weights(model: nn.Module, path: str | os.PathLike[str] | None, ranks: Ranks, everywhere: bool) -> Weights:
    """Find and check the first weights of a model that has its final dtype; all ranks have to call.

    They are in files or, without ``path``, in rank 0's model. ``everywhere``: each rank reads its own shards from the
    files; otherwise rank 0 reads everything.

    Raises:
        ValueError, FileNotFoundError: weights, named in the message, are missing; all ranks raise if one does.
    """
    weights = Weights()

    def look() -> None:
        nonlocal weights
        if path is not None and (everywhere or ranks.rank == 0):
            weights = Weights(path)
            weights.check(model)
        elif path is None and ranks.rank == 0:
            _check_there(model)

    try:
        RankGroup(ranks.group).together(look)
    except BaseException:
        weights.close()
        raise
    if ranks.rank == 0 and path is not None:
        weights.warn_about_rest(model)
    return weights


def _check_there(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise ValueError(
                    f"{kind} {name} is on the meta device, and rank 0 has no values for it; give "
                    "initialize(weights=...) safetensors files, or make the model under longshore.Init()"
                )


def _replace(model: nn.Module, kind: str, make: Callable[[Any], Tensor]) -> None:
    """Replace a model's ``_parameters`` or ``_buffers``; a tensor with several names is replaced by a single one."""
    tables: list[dict[str, Tensor | None]] = [getattr(module, kind) for module in model.modules()]
    former = {id(each): each for table in tables for each in table.values() if each is not None}
    made = {key: make(each) for key, each in former.items()}
    for table in tables:
        table.update({name: made[id(each)] for name, each in table.items() if each is not None})


def without_memory(model: nn.Module) -> None:
    """Replace a model's parameters by copies on the meta device; tied ones stay tied."""
    _replace(model, "_parameters", on_meta)


def with_memory(model: nn.Module, device: torch.device, pinned: bool = False) -> None:
    """Allocate uninitialised memory for the parameters of a sharded model that are on the meta device.

    ``pinned``: in pinned memory of the host. FSDP2 would pin each shard by torch, which rounds it up to a power of two;
    it still does so with shards that it pads.
    """

    def allocated(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if not (pinned and is_sharded(tensor)):
            return _empty(tensor, device)
        shard = held_part(tensor)
        return like(tensor, allocate_pinned(shard.nbytes).view(shard.dtype).view(shard.shape))

    if any(parameter.is_meta for parameter in model.parameters()):
        model._apply(allocated)


def _takes(parameter: Tensor, values: Tensor) -> bool:
    """Return whether ``parameter.data = values`` works, which it does not between some types of devices."""
    return torch._has_compatible_shallow_copy_type(parameter, values)  # pyright: ignore[reportPrivateImportUsage]


def _keep_identity(model: nn.Module, device: torch.device) -> None:
    """Move the parameters that ``model.to(device)`` would replace by others, since optimizers hold them already.

    It does so between types of devices of which one is an extension of torch (``PrivateUse1``).
    """
    for parameter in model.parameters():
        moved = parameter.detach().to(device)
        if not _takes(parameter, moved):
            gradient = parameter.grad
            put(nn.Parameter(moved, parameter.requires_grad), into=parameter)
            parameter.grad = None if gradient is None else gradient.to(device)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device)


def _broadcast(tensor: Tensor, ranks: Ranks) -> None:
    """Copy rank 0's values to all ranks."""
    if ranks.world_size == 1 or tensor.numel() == 0:
        return
    # Elements of an expanded buffer (such as a mask) share memory, so it cannot be written as a whole.
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    values = once.detach().contiguous()
    work = dist.broadcast(values.view(-1).view(torch.uint8), src=0, group=ranks.group, async_op=True)
    finish(work, ranks.group, values.device)
    once.copy_(values)


def _scatter(former: Tensor, parameter: Tensor, shards: list[tuple[int, int]], ranks: Ranks) -> None:
    """Send each rank its shard from rank 0. Shards follow each other in the flat parameter, which is on rank 0's device
    for a moment, as in each gather of it."""
    if parameter.numel() == 0:
        return
    mine = held_part(parameter)
    item_bytes, nothing = parameter.element_size(), [0] * ranks.world_size
    received = torch.empty_like(mine, memory_format=torch.contiguous_format, device=ranks.device)
    source, sent = received.new_empty(0), nothing
    if ranks.rank == 0:
        source, sent = flat(former.detach()).to(ranks.device), [item_bytes * numel for _, numel in shards]
        assert sum(sent) == source.nbytes and shards == sorted(shards)
    # One collective of the group: each pair of ranks that sends and receives has a communicator of its own with nccl.
    work = dist.all_to_all_single(
        received.view(-1).view(torch.uint8),
        source.view(torch.uint8),
        [received.nbytes, *nothing[1:]],
        sent,
        group=ranks.group,
        async_op=True,
    )
    finish(work, ranks.group, received.device)
    mine.copy_(received)
