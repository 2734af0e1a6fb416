"""Models on their way to an engine, to an evaluation without one, and to a file of whole weights."""

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
"""Callbacks of Lightning, by name: not every version has all."""


@dataclass(frozen=True)
class Extras:
    """Arguments of :func:`longshore.initialize` that no configuration holds."""

    offload: Offload | None = None
    wrap_policy: Any = None
    weights: str | os.PathLike[str] | None = None


def only(optimizers: list[Any]) -> Any:
    """The one optimizer that there is, or None. Raises ValueError where there are several."""
    if len(optimizers) > 1:
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"configure_optimizers() returned {len(optimizers)} optimizers ({names}), and an "
            "engine steps one; return one with a parameter group for each of them (groups may have their own lr, "
            "betas and weight decay, and what got no gradient is left alone)"
        )
    return optimizers[0] if optimizers else None


def make_engine(
    model: nn.Module, optimizer: Optimizer | None, loaded: LoadedConfig, extras: Extras, device: torch.device
) -> Engine:
    """An engine on ``device``; the schedule that the configuration may name is left to the caller to step."""
    made = initialize(
        model=model,
        optimizer=optimizer,
        config=loaded.config,
        offload=extras.offload,
        wrap_policy=extras.wrap_policy,
        weights=extras.weights,
        device=device,
    )
    if made.engine.ranks.rank == 0:
        for note in loaded.notes:
            warnings.warn(note, stacklevel=2)
    return made.engine


def check_averaging(callbacks: Iterable[object]) -> None:
    """Raises ValueError for callbacks that would average shards with the whole weights of a copy."""
    for callback in callbacks:
        if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and at stage 3 each of several ranks has shards; "
                "use stage 2, or a callback of yours that reads longshore.gather(module)"
            )


class Holder:
    """A strategy, as the one whose engine takes the gradients of a module.

    Args:
        close: lets go of its engine, if it has one.
    """

    _last: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Holder]]] = weakref.WeakKeyDictionary()
    """Who made the last engine of a module."""

    def __init__(self, close: Callable[[], None]) -> None:
        # The strategy has this; a reference back would keep both, and an engine's memory, until they are collected.
        self._close = weakref.WeakMethod(close)
        self._lost = False

    def take(self, module: nn.Module) -> None:
        """A fit begins; the engine of another strategy's fit, which stayed when it was over, lets go of the module."""
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
        """Raises LongshoreError where another strategy took the module since."""
        if self._lost:
            raise LongshoreError(
                "another Trainer with longshore fitted this module since, and the optimizer's state is with that one; "
                "save and step with it"
            )


class ModelOnly(nn.Module):
    """A model that was set up without an optimizer, which may come later.

    Args:
        module: on its device.
        sharded: what was made of it so that it can run without an engine, if it has shards.
    """

    def __init__(self, module: nn.Module, sharded: FullyShardedModel | None) -> None:
        super().__init__()
        self.module = module
        self._sharded = sharded
        # Not as a submodule: the engine holds the same module.
        self._engine: list[Engine] = []

    @property
    def engine(self) -> Engine | None:
        return self._engine[0] if self._engine else None

    def make_way(self) -> None:
        """An engine is about to be made for the model."""
        if self._sharded is not None:
            self._sharded.close()

    def go_on_with(self, engine: Engine) -> None:
        self._engine[:] = [engine]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.engine or self.module)(*args, **kwargs)


def place(model: nn.Module, config: Config, extras: Extras, device: torch.device) -> ModelOnly:
    """Put a model that is not trained on ``device``, with rank 0's weights; at stage 3 only this rank's shards.

    All ranks have to call.
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
    """Around the making of a model: on ``device``; at stage 3 on the host of rank 0 alone, and nowhere where files
    have the weights.

    ``uninitialized``: what would be drawn at random is not, for a model that is going to be loaded.
    """
    from_files = extras.weights is not None
    with contextlib.ExitStack() as stack:
        if stage < 3:
            stack.enter_context(device)
        stack.enter_context(EmptyInit(enabled=bool(uninitialized)))
        stack.enter_context(Init(empty=from_files, enabled=stage == 3 or from_files))
        yield


def whole(values: Any, keep: bool) -> Any:
    """The same nested values with whole tensors, on the host, where there were shards; all ranks have to call.

    ``keep``: false: empty ones in their places, for a rank that only helps to gather.
    """

    def gathered(value: Tensor) -> Tensor:
        if not is_sharded(value):
            return value
        there = value.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        return there.cpu() if keep else there.new_empty(0)

    return apply_to_collection(values, Tensor, gathered)


def load_whole(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """``load_state_dict`` of whole tensors (or of this model's own shards), also where parameters are sharded.

    Raises:
        RuntimeError: names or shapes that do not fit, as torch says it.
    """
    own = model.state_dict()
    model.load_state_dict({name: _cut(value, own.get(name)) for name, value in state_dict.items()}, strict=strict)


def _cut(value: Any, own: Any) -> Any:
    """This rank's part of ``value``, where the model's own tensor is a part."""
    if not (isinstance(value, Tensor) and isinstance(own, Tensor) and is_sharded(own)) or is_sharded(value):
        return value
    if value.shape != own.shape:
        return value  # and load_state_dict() says so
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = own.device_mesh, own.placements  # pyright: ignore[reportAttributeAccessIssue]
    # No rank sends anything: each has read the whole.
    return distribute_tensor(value.to(own.device, own.dtype), mesh, placements, src_data_rank=None)


def batch_size_of(trainer: Trainer) -> int | None:
    """Of a loader that was passed to ``fit``; hooks that make one are not called for it."""
    source = trainer.fit_loop._data_source.instance
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) and isinstance(source, torch.utils.data.DataLoader) else None
