"""``longshore train --trace``: which steps, which files, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from cli.conftest import MICRO_MODEL, MICRO_RUN
from cli.rank_cases import command

from longshore.cli.loop import traced_steps
from longshore.cli.settings import LoopSettings


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """The engine trains on CUDA where there is CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def chrome(page: Path) -> list[dict]:
    return json.loads(page.with_suffix(".json").read_text())["traceEvents"]


def steps_in(page: Path) -> int:
    return sum(event["ph"] == "X" and event["name"] == "step" for event in chrome(page))


@pytest.mark.parametrize(
    "steps, eval_every, traced",
    [
        (1, 0, [1]),
        (2, 0, [2]),
        (3, 0, [2, 3]),
        (4, 0, [2, 3, 4]),
        (5, 0, [2, 3, 4]),
        (9, 0, [4, 5, 6]),
        (500, 100, [249, 250, 251]),
        (10**12, 0, [499_999_999_999, 500_000_000_000, 500_000_000_001]),
    ],
)
def test_the_middle(steps, eval_every, traced):
    assert list(traced_steps(LoopSettings(steps=steps, eval_every=eval_every))) == traced


@pytest.mark.parametrize("steps", [*range(1, 9), 12, 13, 29])  # from 6 on there are enough: other remainders
@pytest.mark.parametrize("eval_every", range(5))
def test_no_validation_between_them(steps, eval_every):
    traced = traced_steps(LoopSettings(steps=steps, eval_every=eval_every))
    assert 1 <= traced[0] <= traced[-1] <= steps and (traced[0] > 1 or steps == 1)
    assert not eval_every or all(step % eval_every for step in traced[:-1])
    possible = min(3, max(1, steps - 1), eval_every or 3)
    assert len(traced) == possible or steps < 6, "fewer than there could be"
    assert abs(traced[len(traced) // 2] - (steps + 1) / 2) <= 3


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--no-offload"],
        ["--release-gradients"],
        ["--stage", "0"],
        ["--stage", "2", "--no-offload"],
        ["--stage", "2"],
    ],
    ids=" ".join,
)
def test_both_files_and_the_summary(train, tmp_path, options):
    page = tmp_path / "trace.html"
    ran = train(*options, "--steps", "7", "--trace", page)
    assert (ran.code, ran.err) == (0, "")
    assert {"trace.html", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
    assert steps_in(page) == 3
    text = page.read_text()
    assert "<title>longshore trace, rank 0</title>" in text and text.count('class="exposed"') >= 3
    told = ran.out[ran.out.index("traced: ") :]
    assert told.startswith("traced: 3 steps from step 3, rank 0\n")
    assert re.search(r"time of a step +[\d.]+ ms\n", told) and re.search(r"host passes +[\d.]+ GB/s\n", told)
    assert told.endswith(f"written to {page} and {page.with_suffix('.json')}\n")


def test_stepping_ahead_is_seen(train, tmp_path):
    page = tmp_path / "trace.html"
    options = ["--release-gradients", "--clip", "0", "--steps", "7", "--trace", page]
    assert re.search(r"spare buffers used +0 of 0\n", train(*options).out)
    names = [event["name"] for event in chrome(page)]
    assert "step ahead" not in names
    ahead = train(*options, "--speculation-memory", "100%")
    assert "step ahead" in [event["name"] for event in chrome(page)]
    assert re.search(r"stepped ahead and kept +100%\n", ahead.out)


@pytest.mark.parametrize("accumulation", ["1", "3"])
def test_the_traced_steps_are_whole(train, tmp_path, accumulation):
    """As many arrivals as backwards, and the block begins with the forward of its first step."""
    page = tmp_path / "trace.html"
    assert train("--release-gradients", "--accumulation", accumulation, "--trace", page).code == 0
    events = [event for event in chrome(page) if event["ph"] == "X"]
    first, again = (sum(event["name"] == name for event in events) for name in ("arrive", "arrive again"))
    assert first % 3 == 0 and again == (int(accumulation) - 1) * first > -1 < first
    assert min(event["ts"] for event in events) > 0


def test_the_weights_are_the_same(trained, tmp_path):
    assert trained("--trace", tmp_path / "trace.html").differing(trained()) == []


def test_its_folder_is_made(train, tmp_path):
    page = tmp_path / "a" / "b" / "trace.html"
    assert train("--trace", page).code == 0
    assert {path.name for path in page.parent.iterdir()} == {"trace.html", "trace.json"}


def test_into_the_folder_of_the_run(train, tmp_path, results):
    out = tmp_path / "run"
    assert train("--out", out, "--trace", out / "trace.html").code == 0
    assert {"trace.html", "trace.json", "model.safetensors"} <= results(out).names
    assert results(out).run["settings"]["trace"] == str(out / "trace.html")


@pytest.fixture
def stop_after(monkeypatch):
    """Makes a signal come when the loop has asked ``steps`` times whether one came."""
    from longshore.cli.group import RunGroup

    def patch(steps: int) -> None:
        asked = itertools.count()
        monkeypatch.setattr(RunGroup, "largest", lambda *_: signal.SIGUSR1 if next(asked) >= steps else 0)

    return patch


def test_a_run_that_ends_before(train, tmp_path, stop_after):
    stop_after(0)
    ran = train("--steps", "40", "--trace", tmp_path / "trace.html")
    assert "nothing was traced: the run ended before step 19" in ran.out
    assert not (tmp_path / "trace.html").exists()


def test_a_run_that_ends_in_the_middle(train, tmp_path, stop_after):
    stop_after(20)
    ran = train("--steps", "40", "--trace", tmp_path / "trace.html")
    assert "traced: 2 steps from step 19" in ran.out
    assert steps_in(tmp_path / "trace.html") == 2


def test_a_loss_that_is_no_number_in_the_middle(train, tmp_path):
    """What was traced before it is written."""
    page = tmp_path / "trace.html"
    ran = train("--lr", "1e30", "--schedule", "constant", "--steps", "3", "--trace", page)
    assert ran.code == 1 and "so this step was not applied" in ran.err
    assert "from step 2" in ran.out and page.exists()


class TestRefused:
    @pytest.fixture(autouse=True)
    def _before_anything_is_read(self, monkeypatch):
        monkeypatch.setattr("longshore.cli.job.read_text", lambda *_: pytest.fail("read the data"))

    @pytest.mark.parametrize(
        "name, message",
        [
            (".", "is a folder: give the name of a file"),
            ("text.txt/trace.html", "text.txt is not a folder: choose another"),
            ("text.txt/a/trace.html", "text.txt is not a folder: choose another"),
            ("trace.json", "trace.json is for JSON beside it: name it .html"),
            ("taken.html", "taken.json is a folder: give the name of a file"),
        ],
    )
    def test_paths(self, train, tmp_path, name, message):
        (tmp_path / "taken.json").mkdir()
        (tmp_path / "text.txt").touch()
        before = set(tmp_path.iterdir())
        ran = train("--trace", tmp_path / name)
        assert ran.code == 2 and message in ran.refused() and "--trace" in ran.refused()
        assert set(tmp_path.iterdir()) == before

    def test_a_folder_that_cannot_be_written(self, train, tmp_path, monkeypatch):
        def deny(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.mkdtemp", deny)
        refused = train("--trace", tmp_path / "trace.html").refused()
        assert f"cannot write --trace {tmp_path / 'trace.html'}: Permission denied" in refused

    @pytest.mark.parametrize("name", ["run", "run/run.html", "run/config.html", "run/loss.png"])
    def test_what_the_run_needs(self, train, tmp_path, name):
        out = tmp_path / "run"
        if "/" in name:
            out.mkdir()
        ran = train("--out", out, "--trace", tmp_path / name)
        assert ran.code == 2 and f"which the run in --out {out} needs: choose another name" in ran.refused()

    def test_plain_pytorch(self, train, tmp_path):
        ran = train("--plain", "--trace", tmp_path / "trace.html")
        assert ran.code == 2 and "--plain trains without it: leave one out" in ran.refused()


def test_a_disk_that_is_full_at_the_end(train, tmp_path, monkeypatch, results):
    """The weights are there, and the run says what is not."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longshore.tracing.Trace.save_chrome", full)
    ran = train("--out", tmp_path / "run", "--trace", tmp_path / "trace.html")
    assert ran.code == 1 and f"cannot write --trace {tmp_path / 'trace.json'}: the disk is full" in ran.refused()
    assert results(tmp_path / "run").weights and not (tmp_path / "trace.json").exists()


@pytest.mark.slow
def test_the_leading_rank_writes(two_ranks, text, tmp_path):
    page = tmp_path / "trace.html"
    micro = ["train", "--data", str(text), *MICRO_MODEL, *MICRO_RUN, "--stage", "2", "--trace", str(page)]
    ranks = two_ranks(command, micro)
    assert [rank[0] for rank in ranks] == [0, 0]
    assert "traced: 3 steps from step 2, rank 0" in ranks[0][1] and ranks[1][1] == ""
    assert {event["pid"] for event in chrome(page)} == {0} and steps_in(page) == 3
