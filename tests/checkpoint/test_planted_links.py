"""Whatever is written under a name that somebody planted a link at leaves the link's target alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import longshore
from longshore.checkpoint.files import replace_file
from longshore.checkpoint.folder import write_latest
from longshore.cli.output import MetricsFile
from longshore.engine.config import CsvConfig
from longshore.engine.monitoring import CsvWriter
from longshore.tracing import Trace


def traced() -> Trace:
    model = nn.Linear(4, 4)
    optimizer = longshore.AdamW(model.parameters())
    with longshore.trace(optimizer) as trace:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return trace


def write_metrics(path: Path) -> None:
    metrics = MetricsFile(path, -1)
    metrics.write({"step": 1})
    metrics.close()


def write_csv(path: Path) -> None:
    writer = CsvWriter(CsvConfig(output_path=str(path.parent.parent), job_name=path.parent.name))
    writer.write(1, {"loss": 0.5})
    writer.close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "page.html": lambda path: traced().save_html(path),
    "trace.json": lambda path: traced().save_chrome(path),
    "latest": lambda path: write_latest(path.parent, "tag"),
    "metrics.jsonl": write_metrics,
    "metrics.csv": write_csv,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dangling", [False, True])
def test_links_are_not_followed(name: str, dangling: bool, tmp_path: Path) -> None:
    theirs, path = tmp_path / "theirs", tmp_path / "mine" / name
    path.parent.mkdir()
    if not dangling:
        theirs.write_text("theirs")
    path.symlink_to(theirs)
    WRITERS[name](path)
    assert not path.is_symlink() and path.stat().st_size > 0
    assert not theirs.exists() if dangling else theirs.read_text() == "theirs"
    WRITERS[name](path)  # also over the file of its own
    assert {each.name for each in path.parent.iterdir()} <= {name, "metrics.1.csv"}


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("a" * 255)
    replace_file(path, b"former")
    (tmp_path / "plain").write_text("plain")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"former" and len([*tmp_path.iterdir()]) == 2
