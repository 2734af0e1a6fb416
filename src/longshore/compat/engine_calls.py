"""What an engine answers scripts of DeepSpeed otherwise than those of longshore: names of the file, and calls that
DeepSpeed asserts against."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from longshore.compat.configuration import FileConfig
from longshore.compat.stage3_names import ParameterOffload, show_status
from longshore.engine import Engine
from longshore.errors import LongshoreError, NoCheckpointError


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
    engine._deepspeed = replace(
        engine._deepspeed,
        _file=config if isinstance(config, Mapping) else {},
        _client_name=type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "",
    )
    if engine.config.stage == 3:
        show_status()
        vars(engine.optimizer)["parameter_offload"] = ParameterOffload()
    accumulate, apply, load, inside = engine.no_sync, engine.step, engine.load_checkpoint, [False]

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        """:meth:`longshore.Engine.no_sync`, with DeepSpeed's restrictions."""
        if engine.config.stage >= 2:
            raise CallError(
                f"no_sync() at stage {engine.config.stage}: DeepSpeed refuses it, as stages 2 and 3 shard gradients; "
                "leave it out, or use coalesce_grad_reduction(), which works at every stage"
            )
        if inside[0]:
            raise CallError("no_sync() inside no_sync(): DeepSpeed refuses it; leave the inner one out")
        inside[0] = True
        try:
            with accumulate():
                yield
        finally:
            inside[0] = False

    def step(*arguments: Any, **options: Any) -> None:
        """:meth:`longshore.Engine.step`, with DeepSpeed's restrictions."""
        if inside[0]:
            raise CallError("step() inside no_sync(): DeepSpeed refuses it; call it after the block")
        apply(*arguments, **options)

    def load_checkpoint(load_dir: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """:meth:`longshore.Engine.load_checkpoint`, which returns None twice if the folder has no checkpoint."""
        try:
            return load(load_dir, *arguments, **options)
        except NoCheckpointError:
            if engine.global_rank == 0:
                what = "nothing was loaded (if this is not a first start, check the path)"
                warnings.warn(f"{load_dir} has no checkpoint; {what}", stacklevel=2)
            return None, None

    engine.no_sync, engine.step, engine.load_checkpoint = no_sync, step, load_checkpoint
