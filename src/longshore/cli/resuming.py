"""Checkpoints of ``longshore train``: when they are saved, and how a run continues from one."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import nn

from longshore import CheckpointError
from longshore.cli.data import Corpus, TextDocuments
from longshore.cli.model import count_parameters
from longshore.cli.output import CHECKPOINTS
from longshore.cli.settings import DECAYING, TrainSettings
from longshore.cli.steppers import TrainStepper
from longshore.cli.terminal import USAGE, CommandError, one_line, warn, warnings_as_lines
from longshore.seam import BETWEEN_RANKS, OF_EACH_RANK, order_of_sums

_OPTIMIZER = ("lr", "schedule", "warmup", "weight_decay", "clip")
_LOOP = ("seq_len", "batch_size", "seed")
_ENGINE = ("dtype", *OF_EACH_RANK, *BETWEEN_RANKS, "optimizer")
"""Fields of the engine's configuration that change bits. Some of them are options above, too."""

_IN_FILE = " in --config"


class RunCheckpoints:
    """The checkpoints of one run. Every rank has this object, and calls it at the same steps.

    One that cannot be written does not end training: a disk may be full for a while, and the next one is tried.

    Args:
        leads: whether to print warnings.
    """

    def __init__(self, settings: TrainSettings, stepper: TrainStepper, leads: bool = True) -> None:
        self._every = settings.save_every
        self._steps = settings.loop.steps
        self._folder = None if settings.out is None else settings.out / CHECKPOINTS
        self._stepper = stepper
        self._leads = leads
        self._newest_step = self._begun_step = -1
        self._failure: CheckpointError | None = None

    def save(self, step: int, progress: Callable[[], Mapping[str, Any]], last: bool = False) -> None:
        """Save asynchronously after a step, if a checkpoint is due.

        Args:
            step: the number of the step.
            progress: returns the state with which the run continues; saved with the checkpoint.
            last: the run ends here.
        """
        if not self._every or step <= 0 or not (last or step % self._every == 0):
            return
        self.wait()
        if step != self._newest_step:
            assert self._folder is not None
            self._begun_step = step
            try:
                self._stepper.save(self._folder, f"step{step}", {"progress": dict(progress())})
            except CheckpointError as failure:
                self._failed(failure)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun last is on the disk; warn if it could not be written."""
        try:
            self._stepper.wait_for_checkpoint()
        except CheckpointError as failure:
            self._failed(failure)
        else:
            self._newest_step = self._begun_step

    def _failed(self, failure: CheckpointError) -> None:
        self._failure, self._begun_step = failure, self._newest_step
        if self._leads:
            warn(f"{one_line(failure)}; training goes on, and the next checkpoint is tried")

    def check_last(self, step: int) -> None:
        """Raise CommandError if the run's last step, which was saved, is not on the disk."""
        if self._every and 0 < step != self._newest_step:
            assert self._failure is not None
            there = f"is of step {self._newest_step}" if self._newest_step > 0 else "does not exist"
            raise CommandError(
                f"step {step} has no checkpoint, and the newest one {there}: {one_line(self._failure)}; make "
                "room, and end with --resume"
            )

    def load(self) -> Mapping[str, Any] | None:
        """Load the newest whole checkpoint, and return its progress; None if there is no checkpoint.

        Raises:
            CommandError: it is of a step after the last one that ``--steps`` asks for.
        """
        assert self._folder is not None
        with warnings_as_lines():
            values = self._stepper.load(self._folder) if self._folder.is_dir() else None
        if values is None:
            return None
        step = values["progress"]["step"]
        if step > self._steps:
            raise CommandError(
                f"--resume: the run has made {step} steps, and --steps is {self._steps}: give at least {step}", USAGE
            )
        self._newest_step = self._begun_step = step
        return values["progress"]


def describe(
    settings: TrainSettings, text: TextDocuments, corpus: Corpus, model: nn.Module, device: str
) -> dict[str, Any]:
    """Return ``run.json`` as it is at the start of a run on this type of device."""
    return {
        "longshore": metadata.version("longshore"),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": device,
        },
        "settings": to_jsonable_python(settings),
        "data": {
            "files": len(text.documents),
            "bytes": sum(map(len, text.documents)),
            "tokens": corpus.tokens.numel(),
            "sha256": corpus.digest(),
        },
        "parameters": count_parameters(model),
        "status": "running",
    }


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that the run in ``path`` has the settings that are given now; both as in ``run.json``.

    Raises:
        CommandError: settings differ; the message lists them.
    """
    there, here = (_decisive(run.get("settings", {})) for run in (former, now))
    differing = [
        f"{name} {_shown(there[name])} there, {_shown(here[name])} here"
        for name in here
        if there[name] != here[name] and _both_have(name, there, here)
    ]
    device, its_device = now["machine"]["device"], former.get("machine", {}).get("device")
    if its_device not in (None, device):  # runs of older versions do not say
        differing.append(f"--device {its_device} there, {device} here")
    if former.get("data", {}).get("sha256") != now["data"]["sha256"]:
        differing.append("the text differs")
    if differing:
        longer = any(each.startswith("--steps ") for each in differing)
        follows = f" (with --schedule {here['--schedule']} the learning rate of each step follows from --steps)"
        raise CommandError(
            f"--resume: the run in {path} is another one: {'; '.join(differing)}"
            f"{follows if longer else ''}. Give the options that it was begun with, or begin a new run in another "
            f"--out (with its weights: --model {path} in place of --size)",
            USAGE,
        )


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _both_have(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether both runs have this setting. A setting that only one has follows from a setting that differs,
    too."""
    if name.endswith(_IN_FILE) or name == "--release-gradients":
        return there["training"] == here["training"]
    if name == "--steps":
        return there["--schedule"] == here["--schedule"]
    return name != "--states-seed" or there["--states"] == here["--states"]


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings on which the weights at the end depend, by the names that users know."""

    def get(section: str, name: str) -> Any:
        return (settings.get(section) or {}).get(name)

    shape, engine = get("model", "shape") or {}, get("engine", "config") or {}
    options = {name: get("optimizer", name) for name in _OPTIMIZER} | {name: get("loop", name) for name in _LOOP}
    states = get("optimizer", "states") or "fp32"  # of runs from before there was a choice
    ranks, accumulation = get("loop", "ranks") or 0, get("loop", "accumulation") or 0
    predivide = ranks if engine.get("prescale_gradients") else engine.get("gradient_predivide_factor") or 1
    exact = engine.get("communication_dtype") in (None, "fp32") and math.frexp(predivide)[0] == 0.5
    return {
        # Where the rate is constant, a run of more steps begins with the same ones.
        "--steps": get("loop", "steps") if get("optimizer", "schedule") in DECAYING else None,
        "--max-bytes": get("data", "max_bytes"),
        "the model's shape": ", ".join(f"{key} {value}" for key, value in shape.items()) or None,
        "--model": get("model", "path"),
        "--dtype": get("model", "dtype"),
        "--optimizer": get("optimizer", "rule") or "adamw",  # of runs from before there was a choice
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
        "--states": states,
        "--states-seed": get("optimizer", "states_seed") if states != "fp32" else None,  # float32 is not rounded
        "backwards a step (ranks times --accumulation)": ranks * accumulation,
        "order of sums (ranks, --accumulation, --stage)": order_of_sums(
            engine.get("stage") or 0, ranks, accumulation, exact
        ),
        "training": "by the engine (--stage)" if engine else "without the engine",
        # The host adds gradients up in float32, the device in their dtype; the engine's are always on the host.
        "--release-gradients": None if engine else get("optimizer", "release_gradients"),
        **{f"{name}{_IN_FILE}": engine.get(name) for name in _ENGINE},
    }
