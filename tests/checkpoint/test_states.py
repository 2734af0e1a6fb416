"""Checkpoints of states that are not float32."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat import checkpoint_cases
from compat.test_checkpoint_import import OPTIMIZER_FILE, PLAIN, TAG, base_of, brought, copied, edit
from ranks import Ranks
from safetensors.torch import load_file

from checkpoint import resume_cases
from checkpoint import states_cases as cases
from checkpoint.resume_cases import Setting, check_same
from checkpoint.test_hostile import rehash
from checkpoint.test_resume import check
from longshore.checkpoint.inspection import inspect
from longshore.cli import main
from longshore.errors import CheckpointError

FORMATS = pytest.mark.parametrize("states", ["bf16", "8bit"])
RunOn = Callable[..., list[Any]]


# --- in the same format ---


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "Lion", "Adagrad", "SGD"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ahead", [False, True])
def test_going_on_equals_not_stopping(states: str, optimizer: str, dtype: str, ahead: bool, tmp_path: Path) -> None:
    setting = Setting(2, "simulated" if ahead else "cpu", 100, dtype, ahead, optimizer, states=states)
    check(None, setting, setting._replace(place="cpu", tile_numel=64, ahead=not ahead), tmp_path)


@pytest.mark.medium
@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("place", ["none", "cpu", "simulated", "split"])
def test_going_on_on_two_ranks(states: str, stage: int, place: str, two_ranks: Ranks, tmp_path: Path) -> None:
    first = Setting(stage, place, 100, states=states, states_seed=3)
    check(two_ranks, first, first._replace(place="cpu", tile_numel=64), tmp_path)


PAIRS = [
    pytest.param(*pair, marks=pytest.mark.slow if 4 in pair else [])
    for pair in itertools.permutations((1, 2, 3, 4), 2)
    if pair != (4, 3)
]


@pytest.mark.medium
@pytest.mark.covering(1)
@pytest.mark.parametrize(("saving", "loading"), [*PAIRS, (4, 3)])
@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_other_numbers_of_ranks(states: str, saving: int, loading: int, run_on: RunOn, tmp_path: Path) -> None:
    """Of stages, places and tiles that differ, too."""
    first = Setting((saving + loading) % 4, ("cpu", "simulated", "none")[saving % 3], 100, states=states)
    second = Setting((saving * loading) % 4, ("cpu", "split")[loading % 2], 9 * loading, states=states)
    saved = run_on(saving, cases.save, first, str(tmp_path))
    for found, said in run_on(loading, cases.load, second, str(tmp_path)):
        check_same(found, saved[0], but=("norm",))
        assert said == []


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_a_checkpoint_in_8_bits_can_be_resharded_again_and_again(run_on: RunOn, tmp_path: Path) -> None:
    """What is read and written anew stays as it is."""
    setting = Setting(3, states="8bit")
    saved = run_on(2, cases.save, setting, str(tmp_path / "2"))
    first = run_on(1, cases.load, setting._replace(stage=0), str(tmp_path / "2"), str(tmp_path / "1"))
    again = run_on(3, cases.load, setting._replace(tile_numel=1000), str(tmp_path / "1"), str(tmp_path / "3"))
    last = run_on(2, cases.load, setting._replace(stage=1), str(tmp_path / "3"))
    for found, _ in (*first, *again, *last):
        check_same(found, saved[0], but=("norm",))


# --- in another ---


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("there", "here"), list(itertools.permutations(["fp32", "bf16", "8bit"], 2)))
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("loading", [1, 2])
def test_another_format_is_converted_and_said_once(
    there: str, here: str, stage: int, loading: int, run_on: RunOn, tmp_path: Path
) -> None:
    (saved,) = run_on(1, cases.save, Setting(stage, states=there), str(tmp_path))
    expected = cases.converted(saved, here)
    loaded = run_on(loading, cases.load, Setting(stage, states=here), str(tmp_path))
    for rank, (found, said) in enumerate(loaded):
        check_same(found, expected, but=("norm",))
        if rank == 0:
            (text,) = said
            assert text.startswith("the checkpoint's states were converted from ")
            assert f"{there} to {here}" in text and "each number to the nearest one" in text
        else:
            assert said == []
    changed = sum(not torch.equal(saved[key], expected[key]) for key in saved if saved[key] is not None)
    exact = here == "fp32" or (there, here) == ("8bit", "bf16")  # each has the numbers of the other
    assert (changed == 0) == exact


def test_to_bfloat16_and_back_is_rounding_once(tmp_path: Path) -> None:
    saved = cases.save(Setting(states="fp32"), str(tmp_path / "first"))
    cases.load(Setting(states="bf16"), str(tmp_path / "first"), str(tmp_path / "second"))
    found, said = cases.load(Setting(states="fp32"), str(tmp_path / "second"))
    check_same(found, cases.converted(saved, "bf16"), but=("norm",))
    assert ["bf16 to fp32" in text for text in said] == [True]


@pytest.mark.medium
@FORMATS
def test_a_loaded_state_in_another_format_trains_on(states: str, tmp_path: Path) -> None:
    """As from a checkpoint in that format."""
    cases.save(Setting(states="fp32"), str(tmp_path / "first"))
    setting = Setting(states=states)
    cases.load(setting, str(tmp_path / "first"), str(tmp_path / "second"))
    with pytest.warns(UserWarning, match=rf"fp32 to .*{states}" if states == "bf16" else "fp32 to 8bit"):
        one = cases.go_on(setting, str(tmp_path / "first"), 2)
    check_same(cases.go_on(setting, str(tmp_path / "second"), 2), one)


@pytest.mark.quick(0)
@FORMATS
@pytest.mark.parametrize("other", ["same", "seed", "fp32"])
def test_another_seed_is_said(states: str, other: str, tmp_path: Path) -> None:
    cases.save(Setting(states=states, states_seed=5), str(tmp_path))
    here = {"same": Setting(states=states, states_seed=5), "seed": Setting(states=states), "fp32": Setting()}[other]
    _, said = cases.load(here, str(tmp_path))
    seeds = [text for text in said if "states_seed" in text]
    if other == "seed":
        (text,) = said
        assert text.startswith("the checkpoint is of a run with states_seed=5, and here it is 0")
    assert len(seeds) == (other == "seed") and len(said) == (other != "same")


# --- what is in the files ---


def files_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.is_dir())


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the description says of the optimizer, as a program that writes our format could."""
    where = files_of(folder)
    files = {path.name: path.read_bytes() for path in where.iterdir()}
    content = json.loads(files["state.json"])
    change(content["optimizer"])
    files["state.json"] = json.dumps(content).encode()
    rehash(files)
    for name, text in files.items():
        (where / name).write_bytes(text)


@FORMATS
def test_inspect_shows_dtypes_formats_and_the_seed(
    states: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masters are float32, and states are in the files as bfloat16, which has all numbers of 8 bits."""
    cases.save(Setting(states=states), str(tmp_path))
    checkpoint = inspect(tmp_path).checkpoint
    assert checkpoint is not None
    found = {(each.name.split(".")[1], each.dtype) for each in checkpoint.tensors if each.name.startswith("optimizer.")}
    assert found == {("master", "F32"), ("exp_avg", "BF16"), ("exp_avg_sq", "BF16")}
    content = json.loads((files_of(tmp_path) / "state.json").read_text())["optimizer"]
    formats = {name: entry["format"] for name, entry in content["parameters"].items()}
    assert formats.pop("wide.1.weight") == states
    assert {*formats.values()} == {"bf16"} and content["states_seed"] == 0
    counts = {"bf16": len(formats), "8bit": 1} if states == "8bit" else {"bf16": len(formats) + 1}
    assert checkpoint.optimizer is not None
    assert (checkpoint.optimizer.states, checkpoint.optimizer.states_seed) == (counts, 0)
    assert main(["inspect", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{states} for" in said and "; seed 0" in said


@pytest.mark.quick(0)
@pytest.mark.parametrize("format", ["int4", "", 8, None, ["bf16"], {"bf16": 1}], ids=repr)
def test_an_unknown_format_is_refused(format: Any, tmp_path: Path) -> None:
    cases.save(Setting(states="bf16"), str(tmp_path))
    rewrite(tmp_path, lambda about: about["parameters"]["wide.1.weight"].update(format=format))
    for states in ("fp32", "bf16"):
        with pytest.raises(CheckpointError, match=r"wide.1.weight has states in the format .*, which this version"):
            cases.load(Setting(states=states), str(tmp_path))


@pytest.mark.parametrize("seed", ["0", None, 0.5, [1]], ids=repr)
def test_a_seed_that_is_none_is_refused(seed: Any, tmp_path: Path) -> None:
    cases.save(Setting(states="bf16"), str(tmp_path))
    rewrite(tmp_path, lambda about: about.update(states_seed=seed))
    with pytest.raises(CheckpointError, match="states_seed"):
        cases.load(Setting(states="bf16"), str(tmp_path))


@pytest.mark.quick(0)
@pytest.mark.parametrize(("there", "said"), [("bf16", "fp32"), ("fp32", "bf16"), ("8bit", "bf16"), ("bf16", "8bit")])
@pytest.mark.parametrize("here", ["fp32", "bf16", "8bit"])
def test_a_wrong_format_in_the_description_misreads_no_number(there: str, said: str, here: str, tmp_path: Path) -> None:
    """The dtype is the tensors' own; the description's format is what the warning says."""
    saved = cases.save(Setting(states=there), str(tmp_path))

    def say(about: dict[str, Any]) -> None:
        for entry in about["parameters"].values():
            entry.pop("format", None)
            if said != "fp32":
                entry["format"] = said

    rewrite(tmp_path, say)
    found, _ = cases.load(Setting(states=here), str(tmp_path))
    check_same(found, cases.converted(saved, here), but=("norm",))


# --- other people's ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deepspeeds_bfloat16_states(dtype: torch.dtype, tmp_path: Path) -> None:
    """As its ``bf16_optimizer_states`` writes them: they are imported with their numbers."""
    source = copied(PLAIN, tmp_path)

    def narrow(content: dict[str, Any]) -> None:
        for state in base_of(content)["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16().to(dtype)

    edit(source / TAG / OPTIMIZER_FILE, narrow)
    brought(source, tmp_path / "out")
    expected = load_file(checkpoint_cases.DATA / PLAIN / "expected.safetensors")
    rounded = {
        name: value.bfloat16().float() if name.endswith(("exp_avg", "exp_avg_sq")) else value
        for name, value in expected.items()
    }
    with checkpoint_cases.engine_of(PLAIN, 2) as engine:
        engine.load_checkpoint(tmp_path / "out")
        checkpoint_cases.check_state(engine, rounded)
    assert any(not torch.equal(rounded[name], expected[name]) for name in expected)


@FORMATS
def test_a_folder_that_replaced_one_of_float32(states: str, tmp_path: Path) -> None:
    """Checkpoints of two formats in one folder are told apart."""
    cases.save(Setting(states="fp32"), str(tmp_path), 3)
    saved = cases.save(Setting(states=states), str(tmp_path), 4)
    found, said = cases.load(Setting(states=states), str(tmp_path))
    check_same(found, saved, but=("norm",))
    assert said == []
    with (
        resume_cases.engine_of(Setting(states=states), wide=True) as engine,
        pytest.warns(UserWarning, match="converted from fp32"),
    ):
        engine.load_checkpoint(tmp_path, "global_step3")
