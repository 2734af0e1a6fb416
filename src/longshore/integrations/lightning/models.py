"""What both strategies do with models: give them an engine, evaluate them without one, gather and load weights."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine import Engine, Init, initialize
from longshore.engine.config import Config, LoadedConfig
from longshore.engine.model_sharding import is_fully_sharded, shard_model
from longshore.engine.ranks import join
from longshore.engine.weights import first_weights
from longshore.integrations.lightning.names import EmptyInit
from longshore.optim import Offload
from longshore.optim.shards import is_sharded

if TYPE_CHECKING:
    from longshore.sharding.fsdp import FullyShardedModel


@dataclass(frozen=True)
class Extras:
    """Arguments of :func:`longshore.initialize` that are not part of a configuration."""

    offload: Offload | None = None
    wrap_policy: Any = None
    weights: str | os.PathLike[str] | None = None


def make_engine(
    model: nn.Module, optimizer: Optimizer | None, loaded: LoadedConfig, extras: Extras, device: torch.device
) -> Engine:
    """Make an engine on ``device``. A schedule that the configuration names is stepped by the caller."""
    made = initialize(
        model=model,
        optimizer=optimizer,
        config=loaded.config,
        device=device,
        **vars(extras),
    )
    if made.engine.ranks.rank == 0:
        for note in loaded.notes:
            warnings.warn(note, stacklevel=2)
    return made.engine


class ModelOnly(nn.Module):
    """A model that was set up without an optimizer, which may follow later.

    Args:
        module: on its device.
        sharded: its FSDP2 hooks, if it has shards, so that it can run without an engine.
    """

    def __init__(self, module: nn.Module, sharded: FullyShardedModel | None) -> None:
        super().__init__()
        self.module = module
        self._sharded = sharded
        # In a list, so that it is not a submodule: the engine contains the same module.
        self._engine: list[Engine] = []

    @property
    def engine(self) -> Engine | None:
        return self._engine[0] if self._engine else None

    def close_sharding(self) -> None:
        """Close the model's sharding, before an engine is made for it."""
        if self._sharded is not None:
            self._sharded.close()

    def train_with(self, engine: Engine) -> None:
        self._engine[:] = [engine]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.engine or self.module)(*args, **kwargs)


def place(model: nn.Module, config: Config, extras: Extras, device: torch.device) -> ModelOnly:
    """Put a model that is only evaluated on ``device``, with rank 0's weights; at stage 3 only this rank's shards.

    All ranks have to call it.
    """
    if is_fully_sharded(model):
        return ModelOnly(model, None)
    ranks = join(device=device)
    in_shards = config.stage == 3 and ranks.world_size > 1
    with contextlib.closing(first_weights(model, extras.weights, ranks, in_shards)) as begin:
        begin.place(model, ranks, parameters=not in_shards)
        return ModelOnly(model, shard_model(model, extras.wrap_policy, config, ranks, None, None, begin)[0])


@contextlib.contextmanager
def creation(
    stage: int, extras: Extras, device: torch.device, uninitialized: bool | None
) -> Generator[None, None, None]:
    """Context for making a model on ``device``; at stage 3 on the host of rank 0 only, and if files have the weights,
    without any.

    ``uninitialized``: skip random initialization, for a model that will be loaded.
    """
    from_files = extras.weights is not None
    with contextlib.ExitStack() as stack:
        if stage < 3:
            stack.enter_context(device)
        stack.enter_context(EmptyInit(enabled=bool(uninitialized)))
        stack.enter_context(Init(empty=from_files, enabled=stage == 3 or from_files))
        yield


def whole(values: Any, keep: bool) -> Any:
    """The same nested values with sharded tensors replaced by whole ones, on the host. All ranks have to call it.

    ``keep``: if False, put empty tensors in their place, on a rank that only takes part in gathering.
    """

    def gathered(value: Tensor) -> Tensor:
        if not is_sharded(value):
            return value
        there = value.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        return there.cpu() if keep else there.new_empty(0)

    return apply_to_collection(values, Tensor, gathered)


def load_whole(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Call ``load_state_dict`` with whole tensors (or this model's own shards), also if parameters are sharded.

    Raises:
        RuntimeError: names or shapes that do not fit, from torch.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: _sharded_like(value, own.get(name)) for name, value in state_dict.items()}, strict=strict
    )


def _sharded_like(value: Any, own: Any) -> Any:
    """This rank's shard of ``value``, if the model's own tensor is sharded."""
    if not (isinstance(value, Tensor) and isinstance(own, Tensor) and is_sharded(own)) or is_sharded(value):
        return value
    if value.shape != own.shape:
        return value  # load_state_dict() raises
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = own.device_mesh, own.placements  # pyright: ignore[reportAttributeAccessIssue]
    # Without communication: each rank has read the whole tensor.
    return distribute_tensor(value.to(own.device, own.dtype), mesh, placements, src_data_rank=None)
