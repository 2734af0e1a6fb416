"""tensorboard, wandb and csv_monitor: every step's numbers, read back with the libraries' own readers."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import longshore
from longshore.engine import monitoring

NAMES = {
    "Train/Samples/train_loss",
    "Train/Samples/lr",
    "Train/Samples/loss_scale",
    "Train/Samples/grad_norm",
    "Train/Samples/skipped_steps",
    "Time/step_s",
    "Time/exposed_s",
    "Bandwidth/host_bytes_per_s",
    "Bandwidth/to_host_bytes_per_s",
    "Bandwidth/to_device_bytes_per_s",
    "Speculation/hit_rate",
    "Memory/host_bytes",
    "Memory/process_bytes",
    "Memory/device_bytes",
}


def config_with(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1e6,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **sections,
    }


def train(
    config: dict[str, Any], windows: int = 3, offload: longshore.Offload | None = None
) -> tuple[Any, list[float]]:
    """The engine, destroyed, and the mean loss of each window."""
    torch.manual_seed(0)
    engine = longshore.initialize(model=nn.Linear(16, 24), config=config, offload=offload).engine
    losses = []
    for window in range(windows):
        total = 0.0
        for micro in range(2):
            loss = engine(torch.full((3, 16), 0.1 * (window + micro))).pow(2).mean()
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total / 2)
    engine.destroy()
    return engine, losses


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def check(values: list[dict[str, Any]], losses: list[float], engine: Any) -> None:
    """What was written, against what is known otherwise."""
    numbers = [{name: float(value) for name, value in row.items() if value not in ("", None)} for row in values]
    assert [row["Train/Samples/train_loss"] for row in numbers] == pytest.approx(losses, rel=1e-6)
    for row in numbers:
        assert row["Train/Samples/lr"] == pytest.approx(0.01) and row["Train/Samples/loss_scale"] == 1.0
        assert 0 < row["Time/exposed_s"] < row["Time/step_s"]
        assert row["Memory/host_bytes"] > 12 * 16 * 24 and row["Memory/process_bytes"] > 1 << 20
        assert row["Bandwidth/host_bytes_per_s"] > 0
    assert numbers[-1]["Train/Samples/grad_norm"] == pytest.approx(engine.get_global_grad_norm(), rel=1e-6)


def test_csv_monitor(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    engine, losses = train(config_with(csv_monitor=section))
    path = tmp_path / "mine" / "metrics.csv"
    rows = rows_of(path)
    assert set(rows[0]) == NAMES | {"samples"} and [int(row["samples"]) for row in rows] == [6, 12, 18]
    check([{name: value for name, value in row.items() if name != "samples"} for row in rows], losses, engine)
    assert {row["Memory/device_bytes"] for row in rows} == {""}, "there is no device"
    train(config_with(csv_monitor=section), 1)
    assert len(rows_of(path)) == 4, "a run that goes on appends"
    path.write_text("other,columns\n1,2\n")
    train(config_with(csv_monitor=section), 1)
    assert len(rows_of(path)) == 1 and (path.parent / "metrics.1.csv").read_text().startswith("other")


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        engine, losses = train(config_with(tensorboard={"enabled": True, "job_name": "mine"}))
        read = EventAccumulator(str(tmp_path / "runs" / "mine"))
        read.Reload()
    written = {name: read.Scalars(name) for name in read.Tags()["scalars"]}
    assert set(written) == NAMES - {"Memory/device_bytes", "Speculation/hit_rate"}
    assert [event.step for event in written["Train/Samples/lr"]] == [6, 12, 18]
    check([{name: events[at].value for name, events in written.items()} for at in range(3)], losses, engine)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the three calls: the real one starts a service of its own, see below."""
    told: list[Any] = []

    class Stand:
        __spec__ = object()
        run = None

        def init(self, **options: Any) -> None:
            told.append(options)

        def log(self, values: dict[str, float]) -> None:
            told.append(values)

        def finish(self) -> None:
            told.append("finished")

    monkeypatch.setitem(__import__("sys").modules, "wandb", Stand())
    section = {"enabled": True, "project": "p", "team": "t", "group": "g"}
    engine, losses = train(config_with(wandb=section))
    assert told[0] == {"project": "p", "entity": "t", "group": "g"} and told[-1] == "finished"
    assert [row.pop("Train/Samples") for row in told[1:-1]] == [6, 12, 18]
    check(told[1:-1], losses, engine)


@pytest.mark.slow
def test_the_real_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb

        run = wandb.init(project="outer")
        _, losses = train(config_with(wandb={"enabled": True}))
        assert run.summary["Train/Samples/train_loss"] == pytest.approx(losses[-1], rel=1e-6)
        assert wandb.run is run, "a run of the user's own is not ended"
        run.finish()
        wandb.teardown()  # it would stay offline in this process
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_what_is_stepped_ahead_is_counted(tmp_path: Path) -> None:
    offload = longshore.Offload(tile_numel=100, transfer=longshore.SimulatedTransfer(seed=1), speculation_memory="100%")
    train(config_with(csv_monitor={"enabled": True, "output_path": str(tmp_path)}), 4, offload)
    rows = rows_of(tmp_path / "longshore" / "metrics.csv")
    assert 0 <= float(rows[-1]["Speculation/hit_rate"]) <= 1
    step_s = float(rows[-1]["Time/step_s"])
    copied = float(rows[-1]["Bandwidth/to_device_bytes_per_s"]) * step_s
    assert copied == pytest.approx(4 * (16 * 24 + 24)), "every parameter once a step"
    assert float(rows[-1]["Bandwidth/to_host_bytes_per_s"]) * step_s == pytest.approx(2 * 4 * (16 * 24 + 24))


def test_the_loss_is_that_of_the_window(tmp_path: Path) -> None:
    """Of backwards that were discarded nothing is told; of a step that was skipped, everything."""
    config = config_with(
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
        fp16={"enabled": True, "initial_scale_power": 32, "hysteresis": 1, "auto_cast": True},
    )
    engine = longshore.initialize(model=nn.Linear(16, 24), config=config).engine
    for loss, backwards in ((7.0, 1), (3.0, 2)):
        for _ in range(backwards):
            engine.backward(engine(torch.ones(3, 16)).float().mean() * 0 + loss)
            engine.step()
        if backwards == 1:
            engine.zero_grad()
    engine.backward(engine(torch.ones(3, 16)).float().sum() * 1e9)
    engine.backward(engine(torch.ones(3, 16)).float().sum() * 1e9)
    engine.step()
    assert engine.skipped_steps == 1
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert float(rows[0]["Train/Samples/train_loss"]) == 3.0
    assert abs(float(rows[1]["Train/Samples/train_loss"])) > 1e6 and rows[1]["Train/Samples/skipped_steps"] == "1"
    engine.destroy()


def test_a_loss_that_the_optimizer_stepped_alone(tmp_path: Path) -> None:
    config = config_with(
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
        gradient_accumulation_steps=1,
        gradient_clipping=0,
    )
    engine = longshore.initialize(model=nn.Linear(16, 24), config=config).engine
    for loss, step in ((7.0, engine.optimizer.step), (3.0, engine.step)):
        engine.backward(engine(torch.ones(3, 16)).mean() * 0 + loss)
        step()
    assert [float(row["Train/Samples/train_loss"]) for row in rows_of(tmp_path / "run" / "metrics.csv")] == [3.0]
    engine.destroy()


def test_the_weights_are_the_same(tmp_path: Path) -> None:
    def weights(config: dict[str, Any]) -> list[torch.Tensor]:
        return [each.detach().clone() for each in train(config)[0].module.parameters()]

    section = {"enabled": True, "output_path": str(tmp_path)}
    assert all(map(torch.equal, weights(config_with(csv_monitor=section)), weights(config_with())))


def test_a_writer_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk does not end training."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(monitoring.CsvWriter, "write", full)
    section = {"enabled": True, "output_path": str(tmp_path)}
    with caplog.at_level(logging.WARNING, logger="longshore"):
        engine, _ = train(config_with(csv_monitor=section))
    assert engine.global_steps == 3
    assert [record.message for record in caplog.records if "gets no more numbers" in record.message] == [
        "csv_monitor failed (OSError: [Errno 28] No space left on device) and gets no more numbers; training goes on"
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "csv_monitor"])
def test_a_writer_that_cannot_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training begins without it, and the other writers write."""

    class NoKey:
        __spec__ = object()
        run = None

        def init(self, **_: Any) -> None:
            raise RuntimeError("api_key not configured (no-tty). Run wandb login")

    monkeypatch.setitem(__import__("sys").modules, "wandb", NoKey())
    taken = tmp_path / "a file"
    taken.write_text("where a folder would be")
    section = {"enabled": True} if name == "wandb" else {"enabled": True, "output_path": str(taken)}
    other = "csv_monitor" if name != "csv_monitor" else "tensorboard"
    working = {"enabled": True, "output_path": str(tmp_path / "runs")}
    with caplog.at_level(logging.WARNING, logger="longshore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tensorboard's
        engine, _ = train(config_with(**{name: section, other: working}))
    assert engine.global_steps == 3
    (told,) = [record.message for record in caplog.records if "cannot start" in record.message]
    assert told.startswith(f"{name} cannot start (") and told.endswith(") and gets no numbers; training goes on")
    assert list((tmp_path / "runs" / "longshore").iterdir()), "the other one writes"


@pytest.mark.slow
def test_the_real_wandb_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, logger="longshore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, _ = train(config_with(wandb={"enabled": True}))
    assert engine.global_steps == 3
    assert any("wandb cannot start" in record.message for record in caplog.records)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="enables tensorboard, and tensorboard is not installed: pip install"):
        longshore.initialize(model=nn.Linear(2, 2), config=config_with(tensorboard={"enabled": True}))


def on_ranks(folder: str) -> list[str]:
    train(config_with(csv_monitor={"enabled": True, "output_path": folder}), 2)
    return sorted(each.name for each in Path(folder).rglob("*.csv"))


def test_rank_0_alone_writes(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(on_ranks, str(tmp_path))
    assert [int(row["samples"]) for row in rows_of(tmp_path / "longshore" / "metrics.csv")] == [12, 24]
