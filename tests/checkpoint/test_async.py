"""``async_save``: what is written is what was there when it was asked for, whatever training does meanwhile."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, forking_context
from torch import nn

import longshore
from checkpoint import async_cases as cases
from checkpoint import one_line_cases, resume_cases
from checkpoint.resume_cases import Setting, check_same
from longshore.engine import checkpoints
from longshore.errors import CheckpointError, LongshoreError

SETTINGS = [
    Setting(0),
    Setting(2, dtype="fp32"),
    Setting(2, "none"),
    Setting(2, "simulated"),
    Setting(2, "split"),
    Setting(2, ahead=True),
    Setting(2, "simulated", ahead=True),
    Setting(2, "split", ahead=True, tile_numel=7),
    Setting(2, optimizer="RMSprop"),
    Setting(2, "simulated", states="bf16"),
    Setting(2, states="8bit"),
    Setting(2, ahead=True, states="8bit"),
]
quiet = pytest.mark.filterwarnings("ignore:torch.optim.* has no kernel")


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@quiet
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_goes_on(setting: Setting, tmp_path: Path) -> None:
    found = cases.train_while_writing(setting, str(tmp_path), cases.PLENTY)
    check_same(found["end"], cases.undisturbed(setting, 7))
    check_same(resume_cases.load_whole(setting, str(tmp_path)), found["saved"], but=("norm",))
    assert not found["waits"]
    buffers = found["state"]
    assert buffers["after"] == buffers["before"]
    if setting.ahead and setting.place != "split":
        assert buffers["during"] == buffers["before"]  # there are spare buffers already
    else:
        assert buffers["before"] < buffers["during"] <= 2 * buffers["before"]  # a head was idle in that step


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(1),
        Setting(2, "split"),
        Setting(3),
        Setting(3, "simulated", ahead=True),
        Setting(3, "simulated", states="8bit"),
    ],
)
def test_on_two_ranks(setting: Setting, two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks(cases.train_while_writing, setting, str(tmp_path), cases.PLENTY)
    expected = two_ranks(cases.undisturbed, setting, 7)
    loaded = two_ranks(resume_cases.load_whole, setting, str(tmp_path))
    for rank in range(2):
        check_same(found[rank]["end"], expected[rank])
        check_same(loaded[rank], found[rank]["saved"], but=("norm",))


@pytest.mark.covering(1)
@pytest.mark.parametrize("setting", [Setting(0), Setting(2, "split", tile_numel=7), Setting(0, ahead=True)])
@pytest.mark.parametrize("buffers", [0, 1, 2])
def test_no_more_memory_than_granted(setting: Setting, buffers: int, tmp_path: Path) -> None:
    """Beyond it a step waits for buffers that have been written."""
    buffer_bytes = 3 * 4 * 48  # the largest: 40 elements, and what aligns them
    found = cases.train_while_writing(setting, str(tmp_path), buffers * buffer_bytes)
    check_same(found["end"], cases.undisturbed(setting, 7))
    check_same(resume_cases.load_whole(setting, str(tmp_path)), found["saved"], but=("norm",))
    before, during = found["state"]["before"], found["state"]["during"]
    assert before <= during <= before + 2 * buffers * buffer_bytes  # split: twice, host and device
    assert bool(found["waits"]) != setting.ahead


@pytest.mark.quick(0)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    "setting",
    [Setting(0), Setting(0, "simulated", ahead=True), Setting(0, "split"), Setting(0, states="8bit")],
)
def test_writes_to_state(setting: Setting, optimizer: str, tmp_path: Path) -> None:
    setting = setting._replace(optimizer=optimizer)
    saved = cases.write_state_while_writing(setting, str(tmp_path))
    check_same(resume_cases.load_whole(setting, str(tmp_path)), saved, but=("norm",))


@pytest.mark.parametrize("next_call", ["save", "load", "wait", "destroy"])
def test_what_fails_is_raised_by_the_next_call(
    next_call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(0)
    with caplog.at_level(logging.ERROR, "longshore"):
        check_same(cases.fail_to_write(setting, str(tmp_path), next_call), cases.undisturbed(setting, 4))
    assert "No space left on device" in caplog.text
    kept = {"global_step2", "latest"} | (set() if next_call == "destroy" else {"next"})
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.medium
def test_the_filters_of_warnings_stay(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.save_under_other_filters, str(tmp_path))


@pytest.mark.slow
def test_ctrl_c_in_destroy(two_ranks: Ranks, tmp_path: Path) -> None:
    """The save goes on in its own group, beside what the user does in the default one."""
    two_ranks(cases.interrupted_destroy, str(tmp_path))
    found = two_ranks(resume_cases.load_whole, Setting(2), str(tmp_path))
    assert [int(state["steps"][0]) for state in found] == [1, 1]


@pytest.mark.medium
@pytest.mark.parametrize("next_call", [pytest.param("save", marks=pytest.mark.slow), "destroy"])
def test_on_whichever_rank(next_call: str, two_ranks: Ranks, tmp_path: Path) -> None:
    setting = Setting(2)
    found = two_ranks(cases.fail_to_write, setting, str(tmp_path), next_call)
    for one, other in zip(found, two_ranks(cases.undisturbed, setting, 4), strict=True):
        check_same(one, other)


def test_one_after_the_other(tmp_path: Path) -> None:
    """A second one waits for the first; both are whole."""
    with resume_cases.engine_of(Setting(0)) as engine:
        states = []
        for step in range(3):
            resume_cases.train(engine, 1)
            engine.save_checkpoint(tmp_path, f"step{step}", async_save=True)
            states.append(resume_cases.state_of(engine))
    with resume_cases.engine_of(Setting(0), seed=1) as engine:
        for step, state in enumerate(states):
            engine.load_checkpoint(tmp_path, f"step{step}")
            check_same(resume_cases.state_of(engine), state, but=("norm",))


def test_a_loop_without_an_engine(tmp_path: Path) -> None:
    model, optimizer = one_line_cases.make()
    one_line_cases.train(model, optimizer, 3)
    with cases.slow_writer() as writer:
        longshore.save(tmp_path, model, optimizer, async_save=True)
        saved = [parameter.detach().clone() for parameter in model.parameters()]
        one_line_cases.train(model, optimizer, 3)
        writer.go_on.set()
        longshore.wait_for_checkpoint()
    other, its = one_line_cases.make(seed=1)
    longshore.load(tmp_path, other, its)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.parameters(), saved, strict=True))
    one_line_cases.train(other, its, 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loop_hears_of_a_failure(tmp_path: Path) -> None:
    model, optimizer = one_line_cases.make()
    one_line_cases.train(model, optimizer, 1)
    longshore.save(tmp_path, model, optimizer)
    (tmp_path / "file").touch()
    longshore.save(tmp_path / "file", model, optimizer, async_save=True)
    with pytest.raises(CheckpointError, match="file/last could not be written"):
        longshore.load(tmp_path, model, optimizer)
    assert longshore.load(tmp_path, model, optimizer) == {}


SCRIPT = """
import sys, threading
import torch, longshore
from longshore.tiles.states import StateSnapshot

model = torch.nn.Linear(64, 64)
optimizer = longshore.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
read, ended = StateSnapshot.read_range, threading.main_thread().join
StateSnapshot.read_range = lambda *arguments: (ended(), read(*arguments))[1]  # only then
longshore.save(sys.argv[1], model, optimizer, "one", async_save=True)
if len(sys.argv) > 2:
    raise RuntimeError("training failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["fails"]])
def test_a_process_that_ends_waits_for_it(how: list[str], tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), *how], capture_output=True, text=True)
    assert ran.returncode == len(how), ran.stderr
    assert "could not be written" not in ran.stderr
    model = nn.Linear(64, 64)
    optimizer = longshore.AdamW(model.parameters())
    assert longshore.load(tmp_path, model, optimizer) == {}
    assert optimizer._core.members.records[0].step == 2


@pytest.mark.slow
def test_a_process_that_ends_without_its_checkpoint_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "file")], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "could not be written" in ran.stderr
    assert "the program ends with exit code 1: its last checkpoint was not written" in ran.stderr


def test_destroy_process_group_does_not_end_a_save(tmp_path: Path) -> None:
    context = forking_context()
    arguments = (str(tmp_path / "store"), str(tmp_path / "saved"))
    ranks = [context.Process(target=cases.destroy_at_once, args=(rank, *arguments)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert longshore.load(tmp_path / "saved", model, longshore.AdamW(model.parameters())) == {}


def test_ctrl_c_ends_a_wait_and_not_the_write(tmp_path: Path) -> None:
    with resume_cases.engine_of(Setting(0)) as engine, cases.slow_writer() as writer:
        resume_cases.train(engine, 1)
        engine.save_checkpoint(tmp_path, async_save=True)
        with cases.interrupted_soon():
            engine.wait_for_checkpoint()
        assert not (tmp_path / "global_step1").exists()
        threading.Timer(0.2, writer.go_on.set).start()
        engine.wait_for_checkpoint()
        assert (tmp_path / "global_step1").exists()


def test_a_thread_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model, optimizer = one_line_cases.make()
    with resume_cases.engine_of(Setting(0)) as engine:
        resume_cases.train(engine, 1)
        one_line_cases.train(model, optimizer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                engine.save_checkpoint(tmp_path, async_save=True)
            with pytest.raises(RuntimeError, match="can't start"):
                longshore.save(tmp_path / "other", model, optimizer, async_save=True)
        for _ in range(2):
            engine.save_checkpoint(tmp_path, async_save=True)
            longshore.save(tmp_path / "other", model, optimizer, async_save=True)
        longshore.wait_for_checkpoint()


def test_a_refused_snapshot_holds_nothing(tmp_path: Path) -> None:
    """Only what is on the host is read already."""
    with resume_cases.engine_of(Setting(0, "split")) as engine:
        resume_cases.train(engine, 1)
        store = engine.optimizer._core.members.store
        device, host = store.tiles.tiers
        key = next(key for key, parts in host.parts.items() if parts and not device.parts[key])
        store.states.ranges.snapshot([(key, "master")], 0).close()
        held = store.states.ranges.snapshot([(key, "master")], 0)
        everything = [
            (index, "master")
            for index in range(len(engine.optimizer._core.members.records))
            if index in store.ownership
        ]
        with pytest.raises(LongshoreError, match="wait for it first"):
            store.states.ranges.snapshot(everything, 0)
        held.close()
        store.states.ranges.snapshot(everything, 0).close()


def test_what_a_failed_write_held_is_let_go_of(tmp_path: Path) -> None:
    with resume_cases.engine_of(Setting(0)) as engine, pytest.MonkeyPatch.context() as patch:
        resume_cases.train(engine, 1)
        held: list[weakref.ref[Any]] = []
        prepare = checkpoints.prepare

        def seen(*arguments: Any) -> Any:
            content = prepare(*arguments)
            (weights,) = content.boxes[0].read.__self__  # the list of what was copied
            (buffer, *_) = content.snapshot._buffers.values()
            held.extend([weakref.ref(weights), weakref.ref(buffer)])
            return content

        patch.setattr(checkpoints, "prepare", seen)
        (tmp_path / "file").touch()
        engine.save_checkpoint(tmp_path / "file", async_save=True)
        engine._checkpoints._background._done.wait()
        resume_cases.train(engine, 1)
        gc.collect()
        assert held[0]() is None
        assert held[1]() is None or any(held[1]() is tile.buffer for tile in engine.optimizer._core.members.store.tiles)
        with pytest.raises(CheckpointError, match="could not be written"):
            engine.wait_for_checkpoint()


def test_state_that_was_set_before_the_first_step(tmp_path: Path) -> None:
    for async_save in (False, True):
        model, optimizer = one_line_cases.make()
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": 5}
        longshore.save(tmp_path, model, optimizer, async_save=async_save)
        other, its = one_line_cases.make(seed=1)
        longshore.load(tmp_path, other, its)
        assert [record.step for record in its._core.members.records] == [5] * 4


def test_two_checkpoints_of_one_optimizer_at_once(tmp_path: Path) -> None:
    with resume_cases.engine_of(Setting(0)) as engine, cases.slow_writer():
        resume_cases.train(engine, 1)
        engine.save_checkpoint(tmp_path / "one", async_save=True)
        with pytest.raises(LongshoreError, match="wait for it first"):
            longshore.save(tmp_path / "other", nn.ModuleList([engine.module]), engine.optimizer, async_save=True)
