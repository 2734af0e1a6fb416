"""Functions for models in both strategies: make an engine, evaluate without one, gather, load and save."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore import CheckpointError, Config, Engine, initialize, load
from longshore.engine.config import LoadedConfig
from longshore.seam import (
    counterparts,
    first_weights,
    is_fully_sharded,
    is_sharded,
    join,
    rest_device,
    shard_model,
    stream_model,
)

if TYPE_CHECKING:
    from longshore import Stream
    from longshore.seam import FullyShardedModel


def make_engine(
    model: nn.Module, optimizer: Optimizer | None, loaded: LoadedConfig, extras: Mapping[str, Any], device: torch.device
) -> Engine:
    """Make an engine on ``device``. A schedule that the configuration names is stepped by the caller."""
    made = initialize(model=model, optimizer=optimizer, config=loaded.config, device=device, **extras)
    if made.engine.ranks.rank == 0:
        for note in loaded.notes:
            warnings.warn(note, stacklevel=2)
    return made.engine


class ModelOnly(nn.Module):
    """A model that was set up without an optimizer, which may follow later.

    ``engine`` is None until then.

    Args:
        module: the model, on its device.
        sharded: its FSDP2 hooks, if it has shards, so that it can run without an engine.
        streamed: the stream that copies its parameters to the device, if they rest on the host.
    """

    engine: Engine | None

    def __init__(self, module: nn.Module, sharded: FullyShardedModel | None, streamed: Stream | None = None) -> None:
        super().__init__()
        self.module = module
        self._sharded = sharded
        self._streamed = streamed
        self.train_with(None)

    def close_sharding(self) -> None:
        """Close the model's sharding and streaming, before an engine is made for it."""
        if self._sharded is not None:
            self._sharded.close()
        self.close_streaming()

    def close_streaming(self) -> None:
        """Make a model whose parameters rest on the host a plain one there."""
        if self._streamed is not None:
            self._streamed.close()

    def train_with(self, engine: Engine | None) -> None:
        vars(self)["engine"] = engine  # not as a submodule, since the engine contains the same module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.engine or self.module)(*args, **kwargs)


def place(model: nn.Module, config: Config, extras: Mapping[str, Any], device: torch.device) -> ModelOnly:
    """Put a model that is only evaluated on ``device``, with rank 0's weights; at stage 3 only this rank's shards.

    All ranks have to call it.
    """
    if is_fully_sharded(model):
        return ModelOnly(model, None)
    ranks = join(device=device)
    in_shards = config.stage == 3 and ranks.world_size > 1
    with contextlib.closing(first_weights(model, extras["weights"], ranks, in_shards)) as begin:
        begin.place(model, ranks, rest_device(config, ranks), parameters=not in_shards)
        sharded = shard_model(model, extras["wrap_policy"], config, ranks, begin)
    with contextlib.ExitStack() as undo:
        streamed = stream_model(model, extras["wrap_policy"], config, ranks, undo)
        undo.pop_all()
    return ModelOnly(model, sharded, streamed)


def whole(values: Any, keep: bool) -> Any:
    """Return nested values with sharded tensors replaced by whole ones, on the host. All ranks have to call it.

    ``keep``: if False, put empty tensors in their place, on a rank that only takes part in gathering.
    """

    def gathered(value: Tensor) -> Tensor:
        if not is_sharded(value):
            return value
        there = value.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        return there.cpu() if keep else there.new_empty(0)

    return apply_to_collection(values, Tensor, gathered)


def load_whole(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Call ``load_state_dict`` with whole tensors (or this model's own shards), even if parameters are sharded.

    Raises:
        RuntimeError: names or shapes do not fit; torch raises it.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: _sharded_like(value, own.get(name)) for name, value in state_dict.items()}, strict=strict
    )


def _sharded_like(value: Any, own: Any) -> Any:
    """Return this rank's shard of ``value``, if the model's own tensor is sharded."""
    if not (isinstance(value, Tensor) and isinstance(own, Tensor) and is_sharded(own)) or is_sharded(value):
        return value
    if value.shape != own.shape:
        return value  # load_state_dict() raises
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = own.device_mesh, own.placements  # pyright: ignore[reportAttributeAccessIssue]
    # No communication is needed, since each rank has read the whole tensor.
    return distribute_tensor(value.to(own.device, own.dtype), mesh, placements, src_data_rank=None)


# -- checkpoints: folders written by the engine, which include Lightning's own state -------------

TAG = "checkpoint"
"""The only tag in a folder, whose path Lightning chooses."""
_KEY = "lightning"


def save_folder(engine: Engine, path: Path, rest: Mapping[str, Any]) -> None:
    """Save the engine's checkpoint at ``path``. All ranks have to call it.

    Args:
        engine: between two accumulation windows.
        path: a folder, replaced once the new one is complete.
        rest: Lightning's state, of any type that ``torch.save`` takes; rank 0's is written.

    Raises:
        CheckpointError: the engine is in the middle of a window, or the checkpoint cannot be written.
    """
    # Saved as bytes, since Lightning's callbacks and hyperparameters have any type that torch.save takes.
    buffer = io.BytesIO()
    torch.save(dict(rest), buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with _in_place_of_a_file(path, engine.ranks.rank == 0):
        engine.save_checkpoint(path, tag=TAG, client_state={_KEY: packed})


@contextlib.contextmanager
def _in_place_of_a_file(path: Path, is_first: bool) -> Generator[None, None, None]:
    """Move away a file of that name that another strategy wrote, and delete it once the folder is complete."""
    if not (is_first and path.is_file()):
        yield
        return
    aside = path.with_name(f".{path.name}.replaced-{secrets.token_hex(4)}")
    path.rename(aside)
    try:
        yield
    except BaseException:
        if not path.exists():
            aside.rename(path)
        raise
    aside.unlink()


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether :func:`save_folder` wrote ``path``."""
    return (Path(path) / TAG).is_dir()


def load_into_engine(
    engine: Engine, path: Path, *, optimizer: bool, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_folder`, and return ``rest``; all ranks (any number) have to call it.

    Args:
        optimizer: also load the optimizer's state, counters, loss scale and random states.
        strict: raise if the model or optimizer does not fit.
        weights_only: as in ``torch.load``, for ``rest``.

    Raises:
        CheckpointError: the checkpoint is damaged, or from another model or optimizer; nothing was loaded.
    """
    _, client = engine.load_checkpoint(path, tag=TAG, load_module_only=not optimizer, strict=strict)
    return _rest(client, path, weights_only)


def add_groups(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
    """Add the parameter groups that the saved run had beyond those of ``configure_optimizers()``, in their order.

    A callback added them, such as ``BackboneFinetuning``. Nothing is added if the first groups are not those of this
    optimizer; loading then names the difference.

    Args:
        groups: all groups of the saved run, each with the names of its ``parameters`` and its ``options``.
    """
    optimizer, parameters = engine.optimizer, dict(engine.module.named_parameters(remove_duplicate=False))
    there = counterparts([name for group in groups for name in group["parameters"]], parameters)
    if not all(found in parameters for found in there.values()):
        return
    members = [[parameters[there[name]] for name in group["parameters"]] for group in groups]
    own = [set(map(id, group["params"])) for group in optimizer.param_groups]
    if own != [set(map(id, each)) for each in members[: len(own)]]:
        return
    for group, params in zip(groups[len(own) :], members[len(own) :], strict=True):
        optimizer.add_param_group({**group["options"], "params": params})
        trained = [name for name in group["parameters"] if parameters[there[name]].requires_grad]
        if trained and engine.ranks.rank == 0:
            what = f"{trained[0]} and others" if trained[1:] else trained[0]
            warnings.warn(
                f"the optimizer of the saved run also had {what}, in a group that a callback added to it; "
                "the group is added again, and trained",
                stacklevel=2,
            )


def load_into_model(model: nn.Module, path: Path, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load only weights, into a model without an engine, and return ``rest``; all ranks have to call it."""
    return _rest(load(path, model, tag=TAG, strict=strict), path, weights_only)


def _rest(client: Mapping[str, Any] | None, path: Path, weights_only: bool | None) -> dict[str, Any]:
    packed = (client or {}).get(_KEY)
    if not isinstance(packed, Tensor):
        raise CheckpointError(
            f"{path} is a checkpoint of longshore that was not saved by a Trainer or Fabric; "
            "read it with engine.load_checkpoint or longshore.load"
        )
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=weights_only)


def unchanged(found: Any, user_state: Mapping[str, Any]) -> bool:
    """Return whether a state dict still has the tensors that the module gave; hooks may change it."""
    return (
        isinstance(found, Mapping)
        and found.keys() == user_state.keys()
        and all(found[name] is value for name, value in user_state.items())
    )
