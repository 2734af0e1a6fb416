"""The contest on one device, tiny and on the CPU: same text, same losses, and a contestant that fails stays a row."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import llama
from benchmarks.gpu import contest, contestants, figures, one_run, rows
from benchmarks.gpu.__main__ import _chosen
from benchmarks.gpu.contest import Contest, Point, Scale, Settings, largest_difference
from benchmarks.gpu.contestants import (
    AHEAD,
    AHEAD_HOST_SUMS,
    BY_HAND,
    ENGINE,
    ENGINE_HOST_SUMS,
    ONE_LINE,
    RESIDENT,
    TORCHAO,
    Training,
)
from benchmarks.gpu.one_run import Run, attempt
from benchmarks.llama import LlamaSize
from benchmarks.memory import PeakResident
from benchmarks.report import MET, MISSED

OURS = (RESIDENT, ENGINE, ENGINE_HOST_SUMS, AHEAD, AHEAD_HOST_SUMS, ONE_LINE)
SIZE = LlamaSize(hidden_size=64, layers=1, intermediate_size=64, max_tokens=16)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Prepared: the text and the weights are there."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(llama, "VOCABULARY", 256)
    text = torch.randint(256, (12, SIZE.max_tokens), generator=torch.Generator().manual_seed(1))
    torch.save(text, tmp_path / "text.pt")
    made = Run(BY_HAND, SIZE, "cpu", 1, 1e-3, 1, 0, 2, 0, str(tmp_path / "text.pt"), str(tmp_path / "weights.pt"))
    assert len(one_run.prepare_weights(made)["grad_norms"]) == 2
    return replace(made, first_row=2, warmups=1)


@pytest.fixture
def deterministic() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_ours_are_the_same_bits_and_nobody_starts_elsewhere(run: Run) -> None:
    run = replace(run, deterministic=True)
    results = {name: one_run.train(replace(run, contestant=name)) for name in (BY_HAND, *OURS)}
    ours = [results[name] for name in OURS]
    assert len({result["weights_sha256"] for result in ours}) == 1
    assert all(result["losses"] == ours[0]["losses"] for result in ours)
    assert results[BY_HAND]["losses"][0] == ours[0]["losses"][0]  # same weights, same text
    assert len(set(ours[0]["losses"])) == 3  # and they are trained, each step on other text
    for result in results.values():
        assert len(result["steps_s"]) == 2 and len(result["losses"]) == 3
        assert all(norm > contestants.MAX_NORM for norm in result["grad_norms"])  # it was really clipped
    assert results[AHEAD]["stepped_ahead"] is not None and results[ENGINE]["stepped_ahead"] is None
    assert sum(results[ENGINE]["host_counted_bytes"].values()) >= 12 * results[ENGINE]["parameters"]


def test_each_step_gets_its_own_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        batches.append(batch)
        return torch.zeros(())

    monkeypatch.setattr(one_run, "start", lambda *_: Training(step))
    one_run.train(replace(run, backwards=3))
    text = torch.load(run.text_path)
    assert torch.equal(torch.cat(batches), text[2:11])
    assert [len(batch) for batch in batches] == [3, 3, 3]


@pytest.mark.parametrize("name", [BY_HAND, ENGINE, ONE_LINE])
def test_backwards_of_a_step_are_averaged(run: Run, name: str) -> None:
    """Three times the same sequence is that sequence; a sum would have three times the norm."""
    text = torch.load(run.text_path)
    torch.save(text[2:3].expand(12, -1).clone(), run.text_path)
    one = one_run.train(replace(run, contestant=name, steps=0))
    three = one_run.train(replace(run, contestant=name, steps=0, backwards=3))
    assert three["losses"] == pytest.approx(one["losses"])
    assert three["grad_norms"] == pytest.approx(one["grad_norms"], rel=0.02)  # bf16 sums


@pytest.mark.parametrize(
    "error, said",
    [(torch.OutOfMemoryError("9 GiB\nmore"), "out of memory: 9 GiB"), (KeyError("x"), "KeyError: 'x'")],
)
def test_whatever_a_contestant_raises_is_its_result(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def start(*_: object) -> Training:
        raise error

    monkeypatch.setattr(one_run, "start", start)
    assert attempt("train", run) == {"failed": said}


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: None if name == "torchao" else name)
    assert attempt("train", replace(run, contestant=TORCHAO)) == {"failed": "not installed: pip install torchao"}


# -- the contest ------------------------------------------------------------------


@pytest.fixture
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contest.SCALES, "tiny", Scale(SIZE, (Point(1, 1, 2), Point(2, 1, 1)), 2, 3, 0.5))


def make_contest(names: tuple[str, ...], outcomes: Callable[[str, Run], dict[str, Any]]) -> Contest:
    made = Contest(Settings("tiny", "cpu", 1, contestants=names), lambda _: None, lambda _: None)
    made._in_process = outcomes  # type: ignore[method-assign]
    return made


def outcome(job: str, run: Run) -> dict[str, Any]:
    if run.contestant == TORCHAO:
        return {"failed": "not installed"}
    seconds = 0.5 if run.contestant == BY_HAND else 1.0
    return {
        "parameters": 10**9, "steps_s": [seconds] * run.steps, "losses": [3.0, 2.0, 1.0], "grad_norms": [0.5, 1.5],
        "host_grown_bytes": 2**31, "host_taken_from_machine_bytes": 2**30, "host_counted_bytes": {"state": 2**30},
        "stepped_ahead": {"kept": 3} if run.contestant == AHEAD else None, "weights_sha256": "a",
        "device_allocated_bytes": 2**33, "device_reserved_bytes": 2**34,
    }  # fmt: skip


@pytest.mark.usefixtures("small_scale")
@pytest.mark.slow
def test_a_failure_is_a_row_and_the_others_go_on() -> None:
    results = make_contest((TORCHAO, BY_HAND, AHEAD), outcome).measure()
    assert [(run["contestant"], run["tokens_per_step"]) for run in results["runs"]] == [
        (TORCHAO, 16), (BY_HAND, 16), (AHEAD, 16), (BY_HAND, 32), (AHEAD, 32)
    ]  # fmt: skip
    table = {row.what: row for row in rows.rows(results)}
    failed = table[f"16 tokens a step: {TORCHAO}"]
    assert failed.value is None and failed.note == "not installed"
    ahead = table[f"16 tokens a step: {AHEAD}"]
    assert ahead.value == 1000.0
    for said in ("2.00 x no offload", "device 8.0 GiB (16.0 reserved)", "2.0 GiB resident", "1.0 counted",
                 "norm above 1.0 in 1 of 2 steps", "3 tiles kept"):  # fmt: skip
        assert said in ahead.note
    assert [row.verdict for row in table.values() if row.goal] == [MET, MET]


@pytest.mark.medium
@pytest.mark.usefixtures("small_scale")
@pytest.mark.parametrize(
    "key, value", [("losses", [3.0, 2.0, 1.5]), pytest.param("weights_sha256", "b", marks=pytest.mark.slow)]
)
def test_curves_that_differ_miss_the_goal(key: str, value: object) -> None:
    def different(job: str, run: Run) -> dict[str, Any]:
        return {**outcome(job, run), **({key: value} if run.contestant == AHEAD else {})}

    results = make_contest((), different).measure()
    assert [row.verdict for row in rows.rows(results) if row.goal].count(MISSED) == 1


@pytest.mark.medium
@pytest.mark.usefixtures("small_scale")
def test_without_weights_nothing_is_measured() -> None:
    results = make_contest((BY_HAND,), lambda job, run: {"failed": "no transformers"}).measure()
    assert [row.note for row in rows.rows(results)] == ["no transformers"]
    assert figures.draw(results) == ({}, "nothing to draw: see the table")


def test_largest_difference() -> None:
    assert largest_difference({"losses": [1.0, 2.0, 3.0]}, {"losses": [1.0, 2.5, 2.75]}) == 0.5
    assert largest_difference({"losses": [1.0]}, {"failed": "x"}) is None


@pytest.mark.usefixtures("small_scale")
@pytest.mark.slow
def test_text_is_the_same_every_time_and_enough() -> None:
    made = Contest(Settings("tiny", "cpu", 1), lambda _: None, lambda _: None)
    text = made._text()
    assert text.shape == (2 + 4, 16) and torch.equal(text, made._text())


@pytest.mark.usefixtures("small_scale")
def test_a_process_that_does_not_end_is_ended(run: Run) -> None:
    made = Contest(Settings("tiny", "cpu", 1), lambda _: None, lambda _: None)
    assert made._in_process("train", run) == {"failed": "did not end within 0 s"}


@pytest.mark.slow
def test_a_process_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Contest(Settings("tiny", "cpu", 1), lambda _: None, lambda _: None)
    monkeypatch.setattr(made, "_scale", replace(made._scale, limit_s=300.0))
    failed = made._in_process("train", replace(run, weights_path="nowhere.pt"))["failed"]
    assert failed.startswith("FileNotFoundError") and "nowhere.pt" in failed


@pytest.mark.medium
@pytest.mark.usefixtures("deterministic")
def test_without_preparation_all_begin_from_the_same_random_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contest.SCALES, "tiny", Scale(SIZE, (Point(1, 0, 2),), 0, 2, 0.5))
    made = make_contest((BY_HAND, RESIDENT), lambda job, asked: attempt(job, replace(asked, text_path=run.text_path)))
    results = made.measure()
    assert "preparation" not in results
    by_hand, resident = (each["losses"] for each in results["runs"])
    assert by_hand[0] == resident[0]
    assert results["largest_loss_difference"][AHEAD] == 0.0
    assert [row.what for row in rows.rows(results)][:2] == [f"16 tokens a step: {name}" for name in (BY_HAND, RESIDENT)]


def test_chosen_contestants_run_in_the_order_asked_for() -> None:
    assert _chosen(["torchao", "by hand"]) == [TORCHAO, BY_HAND]
    with pytest.raises(typer.BadParameter, match=r"--only 'deep freeze' is in no name; the names: no offload"):
        _chosen(["by hand", "deep freeze"])


# -- pictures and memory ----------------------------------------------------------


@pytest.mark.usefixtures("small_scale")
@pytest.mark.slow
def test_two_pictures() -> None:
    pytest.importorskip("matplotlib")
    pictures, reason = figures.draw(make_contest((BY_HAND, TORCHAO, AHEAD), outcome).measure())
    assert sorted(pictures) == ["loss", "time-memory"] and reason == ""
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())


@pytest.mark.medium
@pytest.mark.usefixtures("small_scale")
def test_without_matplotlib_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    pictures, reason = figures.draw(make_contest((BY_HAND,), outcome).measure())
    assert pictures == {} and "matplotlib cannot be imported" in reason


@pytest.mark.slow
def test_peak_resident_counts_what_is_held() -> None:
    """And not the processes that were there at the beginning."""
    program = "import torch, time; held = torch.ones(1 << 24); print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(2):  # from the second time on malloc keeps what is freed below something still in use
        freed = [torch.ones(1 << 18) for _ in range(100)]
        in_use = freed.pop()
        del freed
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        peak = PeakResident()
        held = torch.ones(1 << 24)  # 64 MiB
        peak.look()
        del held, in_use
        assert 60 << 20 <= peak.grown_bytes < 200 << 20
    finally:
        child.kill()
        child.communicate()
