"""What both strategies do with models: give them an engine, evaluate them without one, gather and load weights."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine import Engine, Init, initialize
from longshore.engine.config import Config, LoadedConfig
from longshore.engine.model_sharding import is_fully_sharded, shard_model
from longshore.engine.ranks import join
from longshore.engine.weights import first_weights
from longshore.errors import LongshoreError
from longshore.integrations.lightning.names import EmptyInit, Trainer
from longshore.optim import Offload
from longshore.optim.shards import is_sharded

if TYPE_CHECKING:
    from longshore.sharding.fsdp import FullyShardedModel


_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
"""Class names of Lightning's callbacks; not every version has both."""


@dataclass(frozen=True)
class Extras:
    """Arguments of :func:`longshore.initialize` that are not part of a configuration."""

    offload: Offload | None = None
    wrap_policy: Any = None
    weights: str | os.PathLike[str] | None = None


def only(optimizers: list[Any]) -> Any:
    """The optimizer, or None. Raises ValueError if there are several."""
    if len(optimizers) > 1:
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"configure_optimizers() returned {len(optimizers)} optimizers ({names}), and an "
            "engine steps one; return one with a parameter group for each of them (groups may have their own lr, "
            "betas and weight decay, and parameters without a gradient are not stepped)"
        )
    return optimizers[0] if optimizers else None


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


def check_averaging(callbacks: Iterable[object]) -> None:
    """Raise ValueError for callbacks that would average shards with whole weights."""
    for callback in callbacks:
        if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and at stage 3 each of several ranks has shards; "
                "use stage 2, or a callback of yours that reads longshore.gather(module)"
            )


class ModuleClaim:
    """A strategy's claim to a module: only the engine of the last strategy that fitted it may take its gradients.

    Args:
        close: a method of the strategy that destroys its engine, if it has one.
    """

    _last: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleClaim]]] = weakref.WeakKeyDictionary()
    """The last claim to each module."""

    def __init__(self, close: Callable[[], None]) -> None:
        # Weak: a cycle with the strategy would keep the engine's memory until the garbage collector runs.
        self._close = weakref.WeakMethod(close)
        self._lost = False

    def take(self, module: nn.Module) -> None:
        """Claim a module for a fit, and close the engine of another strategy that fitted it before."""
        found = self._last.get(module)
        former = None if found is None else found()
        if former is not None and former is not self:
            former._lost = True
            close = former._close()
            if close is not None:
                close()
        self._last[module] = weakref.ref(self)
        self._lost = False

    def check(self) -> None:
        """Raise LongshoreError if another strategy has claimed the module since."""
        if self._lost:
            raise LongshoreError(
                "another Trainer with longshore has fitted this module since, and has the optimizer's state; save and "
                "step with that Trainer"
            )


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
        return ModelOnly(model, shard_model(model, extras.wrap_policy, config, ranks, begin))


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


def batch_size_of(trainer: Trainer) -> int | None:
    """The batch size of a loader that was passed to ``fit``; None for loaders that a hook makes."""
    source = trainer.fit_loop._data_source.instance
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) and isinstance(source, torch.utils.data.DataLoader) else None
