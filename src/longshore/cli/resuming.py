"""Checkpoints of ``longshore train``: when they are saved, and how a run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from longshore.cli.engine_stepper import EngineStepper
from longshore.cli.failure import USAGE, CommandError, SettingsError
from longshore.cli.optimizers import LongshoreStepper, Stepper
from longshore.cli.output import CHECKPOINTS
from longshore.cli.settings import TrainSettings
from longshore.engine.random_states import random_states, restore_random_states

_KEPT = 2
_SAME = {
    "data": ("max_bytes",),
    "model": ("shape", "path", "dtype"),
    "optimizer": ("lr", "schedule", "warmup", "weight_decay", "clip"),
    "loop": ("seq_len", "steps", "batch_size", "accumulation", "seed", "ranks"),
}
"""Of the settings, those on which the weights at the end depend."""


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

    def save(self, step: int, progress: Callable[[], Mapping[str, Any]], stopping: bool = False) -> None:
        """After a step, where one is due; ``stopping``: the run ends here. ``progress`` is saved with it."""
        due = self._every and step > 0 and (stopping or step % self._every == 0)
        if not due or step == self._saved:
            return
        assert self._folder is not None
        values = {"progress": dict(progress())}
        if isinstance(self._stepper, EngineStepper):
            self._stepper.engine.save_checkpoint(self._folder, f"step{step}", values, keep_last=_KEPT)
        else:
            import longshore

            assert isinstance(self._stepper, LongshoreStepper)
            values["random"] = random_states(_device(self._model))
            optimizer = self._stepper.optimizer
            longshore.save(self._folder, self._model, optimizer, f"step{step}", values, keep_last=_KEPT)
        self._saved = step

    def load(self) -> Mapping[str, Any] | None:
        """The progress of the newest whole checkpoint, which is loaded; None where there is none."""
        assert self._folder is not None
        if not self._folder.is_dir():
            return None
        if isinstance(self._stepper, EngineStepper):
            _, values = self._stepper.engine.load_checkpoint(self._folder)
        else:
            import longshore

            assert isinstance(self._stepper, LongshoreStepper)
            values = longshore.load(self._folder, self._model, self._stepper.optimizer)
            if values is not None:
                restore_random_states(values["random"], _device(self._model))
        if values is None:
            return None
        self._saved = values["progress"]["step"]
        return values["progress"]


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whether the run in ``path`` is the one that is asked for; both as in ``run.json``.

    Raises:
        CommandError: it is not; lists the settings that differ.
    """
    now = json.loads(json.dumps(now))
    differing = [
        f"{section}.{name} {there!r} there, {here!r} here"
        for section, names in _SAME.items()
        for name in names
        if (there := former.get("settings", {}).get(section, {}).get(name)) != (here := now["settings"][section][name])
    ]
    if former.get("data", {}).get("sha256") != now["data"]["sha256"]:
        differing.append("the text is another one")
    if differing:
        raise CommandError(f"--resume: the run in {path} is another one: {'; '.join(differing)}", USAGE)


def _device(model: nn.Module) -> Any:
    return next(model.parameters()).device
