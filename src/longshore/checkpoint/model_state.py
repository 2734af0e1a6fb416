"""A model's parameters and buffers in a checkpoint, by their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from longshore.checkpoint.boxes import SavedBoxes, WantedBoxes
from longshore.errors import CheckpointError
from longshore.layout.boxes import Box, boxes_of_range
from longshore.optim.dtensor import counterparts, flat, held_part, is_sharded, unwrapped

MODEL = "model"
"""First part of the names of the model's tensors in a checkpoint, and the model's key among the shared values."""
_EXTRA = "_extra_state"
"""Last part of the name that torch gives a module's extra state."""
_LEAST_NUMEL = 1 << 16
"""Elements for each process; a tensor with fewer is written by one process."""


class ModelState:
    """Saves and restores a model.

    Args:
        model: the model, after its parameters were moved, converted and sharded.
        rank, world_size: this process's rank, and the number of processes that have the same model.
    """

    def __init__(self, model: nn.Module, rank: int = 0, world_size: int = 1) -> None:
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "_get_fsdp_state"):  # FSDP2 may have left it gathered
                module.reshard()  # pyright: ignore[reportCallIssue]
        self.model = model
        self._rank, self._world_size = rank, world_size
        self.tensors: dict[str, Tensor] = {}
        """Parameters and persistent buffers, each once."""
        self.aliases: dict[str, str] = {}
        """First names of tied tensors, by their further names."""
        self.to_write: Set[str] | None = None
        """Names of the tensors, among those that are not sharded, that this process writes alone; None: all processes
        have the same ones, and divide them."""
        self._names: dict[int, str] = {}
        for name, tensor in _named_tensors(model):
            first = self._names.setdefault(id(tensor), name)
            if first == name:
                self.tensors[name] = tensor
            else:
                self.aliases[name] = first

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the first name of a parameter; None if the model does not have it."""
        return self._names.get(id(parameter))

    def extra_state(self) -> dict[str, Any]:
        """Return the results of the modules' ``get_extra_state()``, by the modules' names."""
        return {
            unwrapped(f"{name}.{_EXTRA}").removesuffix(_EXTRA).removesuffix("."): module.get_extra_state()
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        modules = {
            f"{name}.{_EXTRA}".removeprefix("."): module
            for name, module in self.model.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state
        }
        theirs = {f"{name}.{_EXTRA}".removeprefix("."): value for name, value in state.items()}
        for name, source in counterparts(modules, theirs).items():
            if source in theirs:
                modules[name].set_extra_state(theirs[source])

    def saved(self, names: Sequence[str]) -> list[SavedBoxes]:
        """Return the boxes of these tensors that this process writes."""
        found = [self._saved(f"{MODEL}.{name}", self.tensors[name], place) for place, name in enumerate(names)]
        return [each for each in found if each.boxes]

    def _saved(self, name: str, tensor: Tensor, place: int) -> SavedBoxes:
        shape = tuple(tensor.shape)
        if is_sharded(tensor):
            box, first = box_of_shard(tensor, name)
            here = first and (box.numel > 0 or (math.prod(shape) == 0 and not any(_place_in_mesh(tensor))))
            return SavedBoxes(name, tensor.dtype, shape, [box] if here else [], held_part(tensor).detach)
        if tensor.numel() == 0 or self.to_write is not None:
            here = self._rank == 0 if self.to_write is None else name.removeprefix(f"{MODEL}.") in self.to_write
            return SavedBoxes(name, tensor.dtype, shape, [Box.whole(shape)] if here else [], tensor.detach)
        start, numel = self._share(tensor, place)
        boxes = boxes_of_range(shape, start, numel)
        return SavedBoxes(name, tensor.dtype, shape, boxes, lambda: flat(tensor)[start : start + numel])

    def _share(self, tensor: Tensor, place: int) -> tuple[int, int]:
        """Return the range (start, numel) that this process writes, for a tensor that all processes have."""
        numel = tensor.numel()
        if not isinstance(tensor, nn.Parameter):
            # A buffer's values may differ between processes, such as statistics of the batches that each one saw. One
            # process writes them, since the mean of one would not fit the variance of another.
            return (0, numel) if self._rank == 0 else (0, 0)
        if numel < _LEAST_NUMEL * self._world_size:
            return (0, numel) if place % self._world_size == self._rank else (0, 0)
        first, last = (numel * rank // self._world_size for rank in (self._rank, self._rank + 1))
        return first, last - first

    def wanted(self, name: str, source: str) -> WantedBoxes:
        """Return the boxes of a tensor that this process loads; ``source`` is the tensor's name in the checkpoint."""
        tensor = self.tensors[name]
        shape = tuple(tensor.shape)
        box = box_of_shard(tensor, name)[0] if is_sharded(tensor) else Box.whole(shape)

        def take(values: Tensor) -> None:
            with torch.no_grad():
                held_part(tensor).detach().copy_(values.view(held_part(tensor).shape))
                torch.autograd.graph.increment_version(tensor)

        return WantedBoxes(f"{MODEL}.{source}", shape, [box], take)


def box_of_shard(tensor: Any, name: str) -> tuple[Box, bool]:
    """Return the box of a ``DTensor`` that this process has, and whether it is the first process that has the box.

    Raises:
        CheckpointError: the local shard is not a box.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f"{name} is placed as {placements}: a partial sum cannot be saved; reduce it first")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    here = mesh.get_coordinate()
    if here is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim), False
    first = all(place == 0 for place, placement in zip(here, placements, strict=True) if placement.is_replicate())
    if tuple(shape) != tuple(tensor._local_tensor.shape):
        raise CheckpointError(f"{name} is placed as {placements} on {mesh}, which longshore cannot save as boxes")
    return Box(tuple(offset), tuple(shape)), first


def _place_in_mesh(tensor: Any) -> Sequence[int]:
    return tensor.device_mesh.get_coordinate()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield unwrapped(name), parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield unwrapped(f"{prefix}.{name}" if prefix else name), buffer
