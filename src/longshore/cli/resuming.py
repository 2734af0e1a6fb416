"""Checkpoints of ``longshore train``: when they are saved, and how a run continues from one."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

import longshore
from longshore.cli.data import Corpus, TextDocuments
from longshore.cli.failure import USAGE, CommandError
from longshore.cli.model import count_parameters
from longshore.cli.output import CHECKPOINTS
from longshore.cli.settings import TrainSettings
from longshore.cli.steppers import EngineStepper, TrainStepper
from longshore.cli.terminal import told_warnings
from longshore.engine.random_states import random_states, restore_random_states

_KEPT = 2
_OPTIMIZER = ("lr", "schedule", "warmup", "weight_decay", "clip")
_LOOP = ("seq_len", "steps", "batch_size", "seed")


class RunCheckpoints:
    """The checkpoints of one run. Every rank has this object, and calls it at the same steps."""

    def __init__(self, settings: TrainSettings, model: nn.Module, stepper: TrainStepper) -> None:
        self._every = settings.save_every
        self._folder = None if settings.out is None else settings.out / CHECKPOINTS
        self._model = model
        self._stepper = stepper
        self._saved = -1
        """The step of the newest one."""

    def save(self, step: int, progress: Callable[[], Mapping[str, Any]], last: bool = False) -> None:
        """Save asynchronously after a step, if a checkpoint is due.

        Args:
            step: the number of the step.
            progress: returns what the run needs in order to continue; saved with the checkpoint.
            last: the run ends here.
        """
        due = self._every and step > 0 and (last or step % self._every == 0)
        if not due or step == self._saved:
            return
        assert self._folder is not None
        values = {"progress": dict(progress())}
        if isinstance(self._stepper, EngineStepper):
            self._stepper.engine.save_checkpoint(self._folder, f"step{step}", values, keep_last=_KEPT, async_save=True)
        else:
            values["random"] = random_states(_device(self._model))
            optimizer = self._stepper.optimizer
            longshore.save(
                self._folder, self._model, optimizer, f"step{step}", values, keep_last=_KEPT, async_save=True
            )
        self._saved = step

    def wait(self) -> None:
        """Wait until what was saved is on the disk."""
        if isinstance(self._stepper, EngineStepper):
            self._stepper.engine.wait_for_checkpoint()
        else:
            longshore.wait_for_checkpoint()

    def load(self) -> Mapping[str, Any] | None:
        """Load the newest whole checkpoint, and return its progress; None if there is no checkpoint."""
        assert self._folder is not None
        if not self._folder.is_dir():
            return None
        with told_warnings():
            values = self._load(self._folder)
        if values is None:
            return None
        self._saved = values["progress"]["step"]
        return values["progress"]

    def _load(self, folder: Path) -> Mapping[str, Any] | None:
        if isinstance(self._stepper, EngineStepper):
            return self._stepper.engine.load_checkpoint(folder)[1]
        values = longshore.load(folder, self._model, self._stepper.optimizer)
        if values is not None:
            restore_random_states(values["random"], _device(self._model))
        return values


def describe(settings: TrainSettings, text: TextDocuments, corpus: Corpus, model: nn.Module) -> dict[str, Any]:
    """Return ``run.json`` as it is at the start of a run."""
    asked = dataclasses.asdict(settings, dict_factory=lambda items: {key: _plain(value) for key, value in items})
    return {
        "longshore": metadata.version("longshore"),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "settings": asked,
        "data": {
            "files": len(text.documents),
            "bytes": text.num_bytes,
            "tokens": corpus.tokens.numel(),
            "sha256": corpus.digest(),
        },
        "parameters": count_parameters(model),
        "status": "running",
    }


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that the run in ``path`` has the settings that are given now; both as in ``run.json``.

    Raises:
        CommandError: it has others; lists those that differ.
    """
    there, here = (_decisive(run.get("settings", {})) for run in (former, json.loads(json.dumps(now))))
    differing = [f"{name} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name]]
    if former.get("data", {}).get("sha256") != now["data"]["sha256"]:
        differing.append("the text differs")
    if differing:
        raise CommandError(
            f"--resume: the run in {path} is another one: {'; '.join(differing)}. Give the options that it was begun "
            f"with, or begin a new run in another --out (with its weights: --model {path})",
            USAGE,
        )


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings on which the weights at the end depend, by the names that users know.

    Of ranks and accumulation only the product matters.
    """

    def get(section: str, name: str) -> Any:
        return (settings.get(section) or {}).get(name)

    shape = get("model", "shape") or {}
    ranks, accumulation = get("loop", "ranks") or 0, get("loop", "accumulation") or 0
    options = {name: get("optimizer", name) for name in _OPTIMIZER} | {name: get("loop", name) for name in _LOOP}
    return {
        "--max-bytes": get("data", "max_bytes"),
        "the model's shape": ", ".join(f"{key} {value}" for key, value in shape.items()) or None,
        "--model": get("model", "path"),
        "--dtype": get("model", "dtype"),
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
        "backwards a step (ranks times --accumulation)": ranks * accumulation,
        "training": "by the engine (--stage)" if settings.get("engine") else "without the engine",
    }


def _device(model: nn.Module) -> Any:
    return next(model.parameters()).device


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON: paths as strings, models of pydantic as dictionaries."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
