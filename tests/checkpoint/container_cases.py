"""A stand-in for torchtitan's containers of optimizers and schedulers, run on every rank.

An optimizer for each part of the model; their states are saved and loaded by torch.distributed.checkpoint, flattened:
by the names of parameters and not by part, so that ranks and parts may be others when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from optim.distributed_cases import LAYOUTS, OPTIONS, local
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR

import longshore

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
TORCH = {"AdamW": torch.optim.AdamW}
OURS = {"AdamW": longshore.AdamW}
"""The one changed entry."""


class Optimizers(torch.optim.Optimizer, Stateful):
    def __init__(self, parts: Sequence[nn.Module], kind: Any, options: dict[str, Any]) -> None:
        self.parts = parts
        self.optimizers = [kind(list(part.parameters()), **options) for part in parts]
        super().__init__([each for part in parts for each in part.parameters()], options)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            found.update(get_optimizer_state_dict(part, optimizer, options=_FLAT))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=_FLAT)


class Weights(Stateful):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


class Training:
    def __init__(self, layout: str, kinds: dict[str, Any], **options: Any) -> None:
        self.parts, self._run = LAYOUTS[layout]()
        both = {"fused": True, "foreach": False, **OPTIONS, **options}
        self.optimizers = Optimizers(self.parts, kinds["AdamW"], both)
        self.schedulers = [LambdaLR(each, lambda step: 1.0 / (1 + step)) for each in self.optimizers.optimizers]
        self.state: dict[str, Any] = {"model": Weights(self.parts), "optimizer": self.optimizers}

    def train(self, steps: range) -> None:
        for step in steps:
            self._run(step, 1)
            self.optimizers.step()
            self.optimizers.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    def weights(self) -> list[Tensor]:
        return [local(each.detach()).clone() for part in self.parts for each in part.parameters()]


def saved_and_loaded(layout: str, folder: Path, released: bool) -> None:
    """Two steps, a checkpoint, two steps in another training: torch's weights, which it would have in one go."""

    def write(training: Training) -> None:
        save(training.state, checkpoint_id=folder)

    def read(training: Training) -> None:
        load(training.state, checkpoint_id=folder)

    _continued(layout, write, read, {"release_gradients": released} if released else {})


def saved_and_loaded_by_longshore(layout: str, folder: Path) -> None:
    """The same with ``longshore.save`` and ``longshore.load`` of each part."""

    def write(training: Training) -> None:
        for number, pair in enumerate(zip(training.parts, training.optimizers.optimizers, strict=True)):
            longshore.save(folder / f"part{number}", *pair)

    def read(training: Training) -> None:
        for number, pair in enumerate(zip(training.parts, training.optimizers.optimizers, strict=True)):
            longshore.load(folder / f"part{number}", *pair)

    _continued(layout, write, read, {"release_gradients": True})


def _continued(
    layout: str, write: Callable[[Training], None], read: Callable[[Training], None], options: dict[str, Any]
) -> None:
    plain = Training(layout, TORCH)
    plain.train(range(4))
    first = Training(layout, OURS, **options)
    first.train(range(2))
    write(first)
    second = Training(layout, OURS, **options)
    read(second)
    for old, new in zip(first.schedulers, second.schedulers, strict=True):
        new.load_state_dict(old.state_dict())
    second.train(range(2, 4))
    first.train(range(2, 4))
    for one in (first, second):
        assert all(map(torch.equal, one.weights(), plain.weights()))
        for optimizer in one.optimizers.optimizers:
            optimizer.close()
