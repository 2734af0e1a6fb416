"""DeepSpeed-specific behaviour of the engine: values from the JSON file, and calls that DeepSpeed rejects."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from longshore import Engine, LongshoreError, NoCheckpointError
from longshore.compat.configuration import FileConfig
from longshore.compat.stage3_names import ParameterOffload, number, show_status


class CallError(LongshoreError, AssertionError):
    """A call that DeepSpeed asserts against."""


class DeepSpeedEngine(Engine):
    """:class:`longshore.Engine` with the names of the file, which rejects the calls that DeepSpeed rejects."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._inside = ""
        """Name of the context that accumulates gradients now."""

    def _answer_by(self, config: Any, optimizer: Any) -> None:
        """Answer with the values of a file.

        Args:
            config: the argument of ``initialize()``; a mapping has a file's content.
            optimizer: the one that was passed, or None.
        """
        if isinstance(config, Mapping):
            vars(self)["config"] = FileConfig.of(self.config, config)  # scripts cannot assign it
        self._file = config if isinstance(config, Mapping) else {}
        self._client_name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else ""
        if self.config.stage == 3:
            show_status()
            number(self.module.parameters())
            vars(self.optimizer)["parameter_offload"] = ParameterOffload()

    def load_checkpoint(self, load_dir: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:  # pyright: ignore
        """:meth:`longshore.Engine.load_checkpoint`, which returns the path as a string, as DeepSpeed does, and None
        twice if the folder has no checkpoint."""
        try:
            path, client_state = super().load_checkpoint(load_dir, *arguments, **options)
            return str(path), client_state
        except NoCheckpointError:
            if self.global_rank == 0:
                what = "nothing was loaded (if this is not a first start, check the path)"
                warnings.warn(f"{load_dir} has no checkpoint; {what}", stacklevel=2)
            return None, None

    @contextlib.contextmanager
    def _accumulating(self, name: str) -> Iterator[None]:
        if self._inside:
            raise CallError(f"{name}() inside {self._inside}(): DeepSpeed refuses it; leave the inner one out")
        self._inside = name
        try:
            with super().no_sync():
                yield
        finally:
            self._inside = ""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """:meth:`longshore.Engine.no_sync`, with DeepSpeed's restrictions."""
        if self.config.stage >= 2:
            raise CallError(
                f"no_sync() at stage {self.config.stage}: DeepSpeed refuses it, as stages 2 and 3 shard gradients; "
                "leave it out, or use coalesce_grad_reduction(), which works at every stage"
            )
        with self._accumulating("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """:meth:`longshore.Engine.coalesce_grad_reduction`, with DeepSpeed's restrictions."""
        with self._accumulating("coalesce_grad_reduction"):
            yield

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """:meth:`longshore.Engine.step`, with DeepSpeed's restrictions."""
        if self._inside:
            raise CallError(f"step() inside {self._inside}(): DeepSpeed refuses it; call it after the block")
        super().step(lr_kwargs)


class EvaluationEngine(DeepSpeedEngine):
    """An engine that was made without an optimizer, for evaluation and generation only."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise LongshoreError."""
        raise LongshoreError(
            "this engine was made without an optimizer, for evaluation and generation only; name one in the "
            "configuration or pass initialize(optimizer=...)"
        )

    step = backward


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
