"""Runs of the command line in this process, on a model and a text that take milliseconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from longshore.cli import main

MICRO_MODEL = ["--hidden-size", "16", "--intermediate-size", "32", "--layers", "1", "--heads", "2", "--device", "cpu"]
MICRO_RUN = ["--seq-len", "16", "--steps", "4", "--batch-size", "2", "--eval-every", "0", "--warmup", "0"]
WRITTEN = {"run.json", "metrics.jsonl", "loss.png", "model.safetensors", "config.json", "generation_config.json"}
"""The files of a run's folder."""


class Ran(NamedTuple):
    """``code``: the exit code."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The one line that the user got instead of results."""
        assert self.code != 0, self.out
        assert len(self.err.strip().splitlines()) == 1, self.err
        assert self.err.startswith("longshore: ")
        assert "Traceback" not in self.err
        return self.err


class Results:
    """What a run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.folder.iterdir()}

    @property
    def run(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def differing(self, other: Results) -> list[str]:
        """Names of the weights that are not ``torch.equal``."""
        ours, theirs = self.weights, other.weights
        assert ours.keys() == theirs.keys()
        return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.fixture
def results() -> type[Results]:
    return Results


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """``longshore`` with the arguments."""

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with 12,000 letters and spaces, the same every time."""
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefgh \n", k=12_000)))
    return path


@pytest.fixture
def train(cli: Callable[..., Ran], text: Path) -> Callable[..., Ran]:
    """``longshore train`` on the text with the micro model; later arguments win over the micro ones."""

    def run(*arguments: object) -> Ran:
        return cli("train", "--data", text, *MICRO_MODEL, *MICRO_RUN, *arguments)

    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than the training of the micro model: their files are empty."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, file, **__: file.write(b""))


_KEPT: dict[tuple[str, ...], Results] = {}


@pytest.fixture
def usual(train: Callable[..., Ran], undrawn: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """As ``trained``, once for all tests of this process: for what results are compared with."""

    def run(*options: str) -> Results:
        if options not in _KEPT:
            folder = tmp_path_factory.mktemp("usual") / "run"
            ran = train(*options, "--out", folder)
            assert (ran.code, ran.err) == (0, "")
            _KEPT[options] = Results(folder)
        return _KEPT[options]

    return run


@pytest.fixture
def trained(train: Callable[..., Ran], undrawn: None, tmp_path: Path) -> Callable[..., Results]:
    """Trains in this process with the options into a new folder and returns the results."""
    count = iter(range(1000))

    def run(*options: object) -> Results:
        folder = tmp_path / f"run{next(count)}"
        ran = train(*options, "--out", folder)
        assert (ran.code, ran.err) == (0, "")
        return Results(folder)

    return run
