"""What an engine answers scripts of DeepSpeed otherwise than those of longshore: names of the file, and calls that
DeepSpeed asserts against."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from longshore import Engine, LongshoreError, NoCheckpointError
from longshore.compat.configuration import FileConfig
from longshore.compat.stage3_names import ParameterOffload, number, show_status


class CallError(LongshoreError, AssertionError):
    """A call that DeepSpeed asserts against."""


def answer_as_deepspeed(engine: Engine, config: Any, optimizer: Any) -> None:
    """Have an engine answer with what the file says, and raise where DeepSpeed does.

    Args:
        engine: made by ``longshore.initialize()``.
        config: what it was given; a mapping has a file's content.
        optimizer: the one that was passed, or None.
    """
    if isinstance(config, Mapping):
        vars(engine)["config"] = FileConfig.of(engine.config, config)  # scripts cannot assign it
    engine._file = config if isinstance(config, Mapping) else {}
    engine._client_name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else ""
    if engine.config.stage == 3:
        show_status()
        number(engine.module.parameters())
        vars(engine.optimizer)["parameter_offload"] = ParameterOffload()
    _restrict(engine)
    load = engine.load_checkpoint

    def load_checkpoint(load_dir: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        """:meth:`longshore.Engine.load_checkpoint`, which returns the path as a string, as DeepSpeed does, and None
        twice if the folder has no checkpoint."""
        try:
            path, client_state = load(load_dir, *arguments, **options)
            return str(path), client_state
        except NoCheckpointError:
            if engine.global_rank == 0:
                what = "nothing was loaded (if this is not a first start, check the path)"
                warnings.warn(f"{load_dir} has no checkpoint; {what}", stacklevel=2)
            return None, None

    vars(engine)["load_checkpoint"] = load_checkpoint


def _restrict(engine: Engine) -> None:
    """Have the engine's contexts and ``step()`` raise where DeepSpeed's do."""
    accumulate, apply = engine.no_sync, engine.step
    inside: list[str] = []

    @contextlib.contextmanager
    def entered(name: str) -> Iterator[None]:
        if inside:
            raise CallError(f"{name}() inside {inside[0]}(): DeepSpeed refuses it; leave the inner one out")
        inside.append(name)
        try:
            with accumulate():
                yield
        finally:
            inside.clear()

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        """:meth:`longshore.Engine.no_sync`, with DeepSpeed's restrictions."""
        if engine.config.stage >= 2:
            raise CallError(
                f"no_sync() at stage {engine.config.stage}: DeepSpeed refuses it, as stages 2 and 3 shard gradients; "
                "leave it out, or use coalesce_grad_reduction(), which works at every stage"
            )
        with entered("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction() -> Iterator[None]:
        """:meth:`longshore.Engine.coalesce_grad_reduction`, with DeepSpeed's restrictions."""
        with entered("coalesce_grad_reduction"):
            yield

    def step(*arguments: Any, **options: Any) -> None:
        """:meth:`longshore.Engine.step`, with DeepSpeed's restrictions."""
        if inside:
            raise CallError(f"step() inside {inside[0]}(): DeepSpeed refuses it; call it after the block")
        apply(*arguments, **options)

    engine.no_sync, engine.coalesce_grad_reduction, engine.step = no_sync, coalesce_grad_reduction, step


def refuse_leaves_without_gradients(engine: Engine, leaves: Iterable[nn.Module]) -> None:
    """Raise, as DeepSpeed does, in the forward of a leaf module whose output needs a gradient and none of whose inputs
    does: there its gradients are reduced from a hook on the inputs."""
    reference = weakref.ref(engine)

    def check(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        alive = reference()
        if alive is None or alive._destroyed:
            return
        if _needs_gradient(output) and not _needs_gradient((inputs, named)):
            raise CallError(
                f"{type(module).__name__} is a leaf module (set_z3_leaf_modules(), or leaf_module in the file), and no "
                "input of it requires a gradient, while its output does: DeepSpeed refuses it. Let an input require "
                "one, or do not set the module as a leaf (longshore.initialize() trains it either way)"
            )

    for leaf in leaves:
        leaf.register_forward_hook(check, with_kwargs=True)


def _needs_gradient(values: Any) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(values))
