"""Checkpoints of ``longshore train``: when they are saved, and how a run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import longshore
from longshore.cli.engine_stepper import EngineStepper
from longshore.cli.failure import USAGE, CommandError, SettingsError
from longshore.cli.optimizers import LongshoreStepper, Stepper
from longshore.cli.output import CHECKPOINTS
from longshore.cli.settings import TrainSettings
from longshore.cli.terminal import told_warnings
from longshore.engine.random_states import random_states, restore_random_states

_KEPT = 2
_OPTIMIZER = ("lr", "schedule", "warmup", "weight_decay", "clip")


class RunCheckpoints:
    """Of one run; every rank has one, and calls it at the same steps.

    Args:
        settings: of the run.
        model: that is trained.
        stepper: steps it.
    """

    def __init__(self, settings: TrainSettings, model: nn.Module, stepper: Stepper) -> None:
        self._every = settings.save_every
        self._folder = None if settings.out is None else settings.out / CHECKPOINTS
        self._model = model
        self._stepper = stepper
        self._saved = -1
        """The step of the newest one."""
        if (settings.save_every or settings.resume) and not isinstance(stepper, (EngineStepper, LongshoreStepper)):
            raise SettingsError(
                "--save-every and --resume are for runs of longshore, and --no-offload trains by plain PyTorch: add "
                "--stage 0, or leave --no-offload out"
            )

    def save(self, step: int, progress: Callable[[], Mapping[str, Any]], last: bool = False) -> None:
        """After a step, where one is due, beside the next ones; ``last``: the run ends here. ``progress`` is saved
        with it."""
        due = self._every and step > 0 and (last or step % self._every == 0)
        if not due or step == self._saved:
            return
        assert self._folder is not None
        values = {"progress": dict(progress())}
        if isinstance(self._stepper, EngineStepper):
            self._stepper.engine.save_checkpoint(self._folder, f"step{step}", values, keep_last=_KEPT, async_save=True)
        else:
            assert isinstance(self._stepper, LongshoreStepper)
            values["random"] = random_states(_device(self._model))
            optimizer = self._stepper.optimizer
            longshore.save(
                self._folder, self._model, optimizer, f"step{step}", values, keep_last=_KEPT, async_save=True
            )
        self._saved = step

    def wait(self) -> None:
        """Until what was saved is on the disk."""
        if isinstance(self._stepper, EngineStepper):
            self._stepper.engine.wait_for_checkpoint()
        else:
            longshore.wait_for_checkpoint()

    def load(self) -> Mapping[str, Any] | None:
        """The progress of the newest whole checkpoint, which is loaded; None where there is none."""
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
        assert isinstance(self._stepper, LongshoreStepper)
        values = longshore.load(folder, self._model, self._stepper.optimizer)
        if values is not None:
            restore_random_states(values["random"], _device(self._model))
        return values


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whether the run in ``path`` is the one that is asked for; both as in ``run.json``.

    Raises:
        CommandError: it is not; lists the settings that differ.
    """
    there, here = (_decisive(run.get("settings", {})) for run in (former, json.loads(json.dumps(now))))
    differing = [f"{name} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name]]
    if former.get("data", {}).get("sha256") != now["data"]["sha256"]:
        differing.append("the text is another one")
    if differing:
        raise CommandError(
            f"--resume: the run in {path} is another one: {'; '.join(differing)}. Give what it was begun with, or "
            f"begin a new one in another --out (with its weights: --model {path})",
            USAGE,
        )


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """On what the weights at the end depend, by the words that people have for it. Ranks and accumulation do not
    matter by themselves."""

    def get(section: str, name: str) -> Any:
        return (settings.get(section) or {}).get(name)

    shape = get("model", "shape") or {}
    ranks, accumulation = get("loop", "ranks") or 0, get("loop", "accumulation") or 0
    return {
        "--max-bytes": get("data", "max_bytes"),
        "the model's shape": ", ".join(f"{key} {value}" for key, value in shape.items()) or None,
        "--model": get("model", "path"),
        "--dtype": get("model", "dtype"),
        **{f"--{name.replace('_', '-')}": get("optimizer", name) for name in _OPTIMIZER},
        **{f"--{name.replace('_', '-')}": get("loop", name) for name in ("seq_len", "steps", "batch_size", "seed")},
        "backwards a step (ranks times --accumulation)": ranks * accumulation,
        "training": "by the engine (--stage)" if settings.get("engine") else "without the engine",
    }


def _device(model: nn.Module) -> Any:
    return next(model.parameters()).device
