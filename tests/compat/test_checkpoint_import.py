"""Checkpoints of DeepSpeed's own, and what its utilities say was in them. ``write_checkpoint_data.py`` made both."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file

from compat.checkpoint_cases import DATA, check_state, engine_of, load_on_ranks
from compat.write_checkpoint_data import CASES
from longshore import utils
from longshore.checkpoint.values import read_values
from longshore.cli import main
from longshore.compat.checkpoint.importing import import_deepspeed
from longshore.errors import CheckpointError

TAG = "global_step3"
MODEL_FILE, OPTIMIZER_FILE = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
PLAIN, TWO_RANKS, STAGE_3 = "stage2_bf16", "stage2_bf16_two_ranks", "stage3_bf16_two_ranks"


def brought(source: Path, out: Path, tag: str | None = None) -> Path:
    """Every checkpoint of these has one value that ours cannot hold."""
    with pytest.warns(UserWarning, match=r"words is a builtins\.set"):
        return import_deepspeed(source, out, tag)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_all_of_it_is_there(name: str, stage: int, tmp_path: Path) -> None:
    source, steps = DATA / name, CASES[name].get("steps", 3)
    path = brought(source, tmp_path)
    assert path == tmp_path / f"global_step{steps}"
    expected = load_file(source / "expected.safetensors")
    saved = read_values(path, "state")
    assert saved["model"]["aliases"] == {"head.weight": "embedding.weight"}
    for entry in saved["optimizer"]["parameters"].values():
        assert ("master" in entry["arrays"]) is ("dtype" in CASES[name])
    with engine_of(name, stage) as engine:
        loaded, client = engine.load_checkpoint(tmp_path)
        assert loaded == path
        assert client.keys() == {"epoch", "best", "names"}
        assert (
            client["epoch"] == 2 and client["names"] == ("a", "b") and torch.equal(client["best"], torch.tensor([0.25]))
        )
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (steps, 2 * steps, 0)
        check_state(engine, expected)
        if CASES[name].get("dtype") == "fp16":
            assert engine.loss_scaling.state_dict()["windows"] == 3
        for _ in range(2):
            engine.backward(engine(torch.arange(6).view(2, 3)))
            engine.step()
        assert engine.global_steps == steps + 1
        assert engine.was_step_applied()
        assert not torch.equal(utils.safe_get_full_fp32_param(engine.module.norm.bias), expected["norm.bias master"])


@pytest.mark.parametrize(
    ("name", "stage"),
    [(TWO_RANKS, 3), (STAGE_3, 2), pytest.param("stage2_fp32_offload_two_ranks", 1, marks=pytest.mark.slow)],
)
def test_on_two_ranks(name: str, stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    brought(DATA / name, tmp_path)
    two_ranks(load_on_ranks, name, stage, str(tmp_path))


def test_masters_have_digits_that_the_weights_have_not() -> None:
    expected = load_file(DATA / PLAIN / "expected.safetensors")
    assert not torch.equal(expected["inner.weight master"], expected["inner.weight weight"].float())


def test_two_ranks_really_shared_it() -> None:
    for name in (TWO_RANKS, STAGE_3):
        files = sorted(path.name for path in (DATA / name / TAG).glob("*optim_states.pt"))
        assert len(files) == 2, files


# -- what was edited ----------------------------------------------------------


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / name, tmp_path / "source"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Without the objects of DeepSpeed's, which only DeepSpeed can write."""
    from longshore.compat.checkpoint.files import _read

    content = _read(path).content
    state = content.get("optimizer_state_dict", {})
    for key in ("loss_scaler", "zero_stage", "param_slice_mappings"):
        state.pop(key, None)
    change(content)
    replace(path, content)


def replace(path: Path, content: Any, **how: Any) -> None:
    """Its tensors may still be in the file."""
    torch.save(content, path.with_suffix(".new"), **how)
    path.with_suffix(".new").rename(path)


def base_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["optimizer_state_dict"]["base_optimizer_state"]


def shorten(content: dict[str, Any]) -> None:
    groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-1].clone()


def shorten_3(content: dict[str, Any]) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[1] = groups[1][:-1].clone()


OTHERS = {
    "a short group": (PLAIN, OPTIMIZER_FILE, shorten, "group 0: the master has 64 elements on 1 ranks, and .* have 65"),
    "a short group, stage 3": (
        STAGE_3,
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        shorten_3,
        "group 1: the master has 12, 11 elements",
    ),
    "another optimizer": (
        PLAIN,
        MODEL_FILE,
        lambda content: content["ds_config"]["optimizer"].update(type="Lion"),
        "is of the optimizer Lion",
    ),
    "amsgrad": (
        PLAIN,
        OPTIMIZER_FILE,
        lambda content: base_of(content)["param_groups"][0].update(amsgrad=True),
        "amsgrad=True",
    ),
    "a third state": (
        PLAIN,
        OPTIMIZER_FILE,
        lambda content: base_of(content)["state"][0].update(max_exp_avg_sq=base_of(content)["state"][0]["exp_avg"]),
        "has the states exp_avg, exp_avg_sq, max_exp_avg_sq",
    ),
    "other steps": (
        TWO_RANKS,
        OPTIMIZER_FILE,
        lambda content: base_of(content)["state"][0].update(step=7),
        r"has made \[3, 7\] steps on different ranks",
    ),
    "stage 0": (PLAIN, MODEL_FILE, lambda content: content.update(param_shapes=None), "without ZeRO"),
    "experts": (PLAIN, MODEL_FILE, lambda content: content.update(num_experts=[4]), "with experts"),
    "a split model": (PLAIN, MODEL_FILE, lambda content: content.update(mp_world_size=2), "has a model-parallel model"),
    "no steps": (PLAIN, MODEL_FILE, lambda content: content.pop("global_steps"), "global_steps is not a number"),
    "odd shapes": (
        PLAIN,
        MODEL_FILE,
        lambda content: content["param_shapes"][0].update({"inner.weight": torch.Size([5, 3])}),
        "inner.weight is stepped, and the model has no such parameter of that shape",
    ),
    "subgroups": (
        PLAIN,
        OPTIMIZER_FILE,
        lambda content: content["optimizer_state_dict"].update(partition_count=[2, 2]),
        "subgroups of ranks",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    name, file, change, match = OTHERS[case]
    source = copied(name, tmp_path)
    edit(source / TAG / file, change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=match):
            import_deepspeed(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def old_steps(content: dict[str, Any]) -> None:
    """As the fused Adam of older versions counted."""
    for number, group in enumerate(base_of(content)["param_groups"]):
        group["step"] = base_of(content)["state"][number].pop("step")


def elastic(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]
    state["base_optimizer_state"] = [base_of(content)["state"][number] for number in range(2)]


def test_tied_weights_that_no_list_names(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    edit(source / TAG / MODEL_FILE, lambda content: content.pop("shared_params"))
    path = brought(source, tmp_path / "out")
    assert read_values(path, "state")["model"]["aliases"] == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("change", [lambda content: None, old_steps, elastic])
def test_older_layouts(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    edit(source / TAG / OPTIMIZER_FILE, change)
    old_name = OPTIMIZER_FILE.removeprefix("bf16_").replace("_optim", "optim")
    (source / TAG / OPTIMIZER_FILE).rename(source / TAG / old_name)
    brought(source, tmp_path / "out")
    expected = load_file(source / "expected.safetensors")
    with engine_of(PLAIN, 0) as engine:
        engine.load_checkpoint(tmp_path / "out")
        if change is elastic:  # which has no options of groups
            expected["lr"] = torch.tensor(engine.get_lr(), dtype=torch.float64)
        check_state(engine, expected)


def test_numbers_of_numpy_are_left_out_and_named(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    edit(source / TAG / MODEL_FILE, lambda content: content.update(words=np.float64(0.5), rate=[np.float32(1.0)]))
    with pytest.warns(UserWarning, match="left out of the import") as told:
        import_deepspeed(source, tmp_path / "out")
    assert [str(each.message).split(" is a ")[0].rpartition(" ")[2] for each in told] == ["words", "rate[0]"]


# -- what may be anything -----------------------------------------------------


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._does = (function, arguments)

    def __reduce__(self) -> Any:
        return self._does


def hostile(tmp_path: Path) -> dict[str, tuple[Hostile, str]]:
    mark = str(tmp_path / "was here")
    return {
        "os.system": (Hostile(os.system, f"touch '{mark}'"), "posix.system"),
        "eval": (Hostile(eval, f"open({mark!r}, 'w')"), "eval"),
        "Path.touch": (Hostile(Path.touch, Path(mark)), "getattr"),
        "torch.save": (Hostile(torch.save, 1, mark), "torch.serialization.save"),
    }


@pytest.mark.covering(2)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
@pytest.mark.parametrize("kind", ["os.system", "eval", "Path.touch", "torch.save"])
def test_nothing_is_run(kind: str, file: str, zipped: bool, tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    evil, named = hostile(tmp_path)[kind]
    path = source / TAG / file
    from longshore.compat.checkpoint.files import _read

    content = {**_read(path).content, "epoch": evil}
    content.pop("optimizer_state_dict", None)
    replace(path, content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=rf"{file} needs {named}.* to be loaded, and an import runs no code"):
        import_deepspeed(source, tmp_path / "out")
    assert not (tmp_path / "was here").exists()
    assert not (tmp_path / "out").exists()
    if kind == "os.system" and zipped:  # it would have been run
        torch.load(path, weights_only=False)
        assert (tmp_path / "was here").exists()


def test_a_bare_pickle_is_not_run(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    (source / TAG / MODEL_FILE).write_bytes(pickle.dumps(hostile(tmp_path)["os.system"][0], protocol=2))
    with pytest.raises(CheckpointError, match=MODEL_FILE):
        import_deepspeed(source, tmp_path / "out")
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
def test_files_that_end_early(file: str, tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    content = (source / TAG / file).read_bytes()
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (source / TAG / file).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=f"{file} is damaged"):
            import_deepspeed(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
def test_files_with_other_bytes(file: str, tmp_path: Path) -> None:
    """A checkpoint of ours, or our error."""
    source = copied(PLAIN, tmp_path)
    path = source / TAG / file
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for number in range(40):
        changed = bytearray(content)
        for place in random.integers(0, len(content), 4):
            changed[place] = random.integers(256)
        path.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import_deepspeed(source, tmp_path / str(number))
            except CheckpointError:
                refused += 1
    assert 0 < refused < 40


def nested() -> Any:
    value: Any = [1] * 100
    for _ in range(30):
        value = [value] * 100
    return value


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (nested, "more than 3000000 values"),
        (lambda: torch.zeros(1).expand(1 << 40), "and not its elements"),
        (lambda: torch.zeros(1 << 40, device="meta"), "and not its elements"),
    ],
)
def test_short_files_that_would_be_long(make: Callable[[], Any], match: str, tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    edit(source / TAG / MODEL_FILE, lambda content: content.update(words=make()))
    assert (source / TAG / MODEL_FILE).stat().st_size < 20_000
    with pytest.raises(CheckpointError, match=match):
        import_deepspeed(source, tmp_path / "out")


# -- what is not there --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "match"),
    [
        (TWO_RANKS, OPTIMIZER_FILE, "lacks the optimizer states of rank 0: 2 ranks saved it, and files of 1 are there"),
        (TWO_RANKS, OPTIMIZER_FILE.replace("rank_0_", "rank_1_"), "lacks the optimizer states of rank 1"),
        (STAGE_3, "zero_pp_rank_1_mp_rank_00_model_states.pt", "lacks the model states of rank 1"),
        (PLAIN, OPTIMIZER_FILE, "lacks the optimizer states of rank 0"),
        (PLAIN, MODEL_FILE, "has no file with a model"),
    ],
)
def test_missing_files_are_named(name: str, file: str, match: str, tmp_path: Path) -> None:
    source = copied(name, tmp_path)
    (source / TAG / file).unlink()
    with pytest.raises(CheckpointError, match=match):
        import_deepspeed(source, tmp_path / "out")


def test_more_files_than_ranks(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    shutil.copy(source / TAG / OPTIMIZER_FILE, source / TAG / OPTIMIZER_FILE.replace("rank_0_", "rank_1_"))
    with pytest.raises(CheckpointError, match="of 2 ranks, and 1 saved it"):
        import_deepspeed(source, tmp_path / "out")
    shutil.copy(source / TAG / OPTIMIZER_FILE, source / TAG / OPTIMIZER_FILE.removeprefix("bf16_"))
    with pytest.raises(CheckpointError, match="the same rank's"):
        import_deepspeed(source, tmp_path / "out")
    (source / TAG / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="one shard of a model-parallel model"):
        import_deepspeed(source, tmp_path / "out")
    (source / TAG / "layer_01-model_states.pt").touch()
    with pytest.raises(CheckpointError, match="belongs to a pipeline or to experts"):
        import_deepspeed(source, tmp_path / "out")


def test_tags(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint .*global_step9; there are global_step3"):
        import_deepspeed(source, tmp_path / "out", "global_step9")
    with pytest.raises(ValueError, match="not a valid tag"):
        import_deepspeed(source, tmp_path / "out", "../source")
    with pytest.raises(CheckpointError, match="give the folder that contains it, and its name"):
        import_deepspeed(source / TAG, tmp_path / "out")
    with pytest.raises(CheckpointError, match="there is no folder"):
        import_deepspeed(tmp_path / "nowhere", tmp_path / "out")
    (source / "latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        import_deepspeed(source, tmp_path / "out")
    (source / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"has no file `latest`.*give a tag; there are global_step3"):
        import_deepspeed(source, tmp_path / "out")
    assert brought(source, tmp_path / "out", TAG) == tmp_path / "out" / TAG


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    before = sorted(path.name for path in source.rglob("*"))
    with pytest.raises(CheckpointError, match="exists already"):
        import_deepspeed(source, source)
    assert sorted(path.name for path in source.rglob("*")) == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["import-deepspeed", str(DATA / STAGE_3), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{out / TAG}" in said.out.replace("\n", "")
    assert "words is a builtins.set" in said.err
    assert main(["import-deepspeed", str(DATA / STAGE_3), "--out", str(out), "--tag", TAG]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["import-deepspeed", str(DATA / STAGE_3), "--out", str(out), "--tag", ".."]) == 2
    with engine_of(STAGE_3, 1) as engine:
        engine.load_checkpoint(out)
        check_state(engine, load_file(DATA / STAGE_3 / "expected.safetensors"))


def test_no_file_names_a_folder_of_the_machine_that_wrote_it() -> None:
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert len(files) > 30
    for path in files:
        content = path.read_bytes()
        assert not any(word in content for word in (b"/home/", b"/root/", b"/tmp/", b"/work/", b"/usr/")), path
    assert sum(path.stat().st_size for path in files) < 1_500_000
