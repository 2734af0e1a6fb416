"""What is said of a checkpoint is what is in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import longshore
from checkpoint import resume_cases
from longshore.checkpoint.inspection import Inspection, inspect
from longshore.cli import main
from longshore.errors import CheckpointError

CLIENT_STATE: dict[str, Any] = {"epoch": 3, "best": torch.ones(2)}


class Small(nn.Module):
    """Two parameters in groups of their own, one of them tied, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.last = nn.Linear(6, 2, bias=False, dtype=torch.bfloat16)
        self.again = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(values)).sum()


def save(folder: Path, tags: tuple[str, ...] = ("one", "two"), **options: Any) -> None:
    """A step before each of the tags."""
    model = Small()
    groups = [
        {"params": [model.first.weight], "lr": 0.5, "betas": (0.8, 0.9)},
        {"params": [model.last.weight], "weight_decay": 0.25},
    ]
    config = longshore.Config(stage=0, micro_batch_size=2)
    offload = longshore.Offload(8, threads=1)
    engine: Any = longshore.initialize(
        model=model, optimizer=lambda _: longshore.AdamW(groups), config=config, offload=offload
    ).engine
    try:
        for tag in tags:
            engine.backward(engine(torch.ones(3, 4, dtype=torch.bfloat16)))
            engine.step()
            engine.save_checkpoint(folder, tag=tag, client_state=CLIENT_STATE, **options)
    finally:
        engine.destroy()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "run")
    return tmp_path / "run"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def problems(found: Inspection) -> dict[str, bool]:
    return {each.tag: each.problem is not None for each in found.tags}


def test_one_checkpoint(saved: Path) -> None:
    checkpoint = inspect(saved).checkpoint
    assert checkpoint is not None
    assert (checkpoint.tag, checkpoint.step, checkpoint.world_size) == ("two", 2, 1)
    assert checkpoint.torch == torch.__version__
    assert checkpoint.longshore == longshore.__version__
    on_disk = {path.name: path.stat().st_size for path in (saved / "two").iterdir()}
    del on_disk["manifest.json"]
    assert checkpoint.files == on_disk
    assert checkpoint.num_bytes == sum(on_disk.values())
    assert checkpoint.aliases == {"again.weight": "first.weight"}
    assert checkpoint.client_state == ["epoch", "best"]
    table = {each.name: (each.dtype, each.shape, each.chunks, each.num_bytes) for each in checkpoint.tensors}
    expected = {
        "model.first.weight": ("BF16", (6, 4), 1, 48),
        "model.last.weight": ("BF16", (2, 6), 1, 24),
        "model.frozen.weight": ("F32", (2, 2), 1, 16),
    }
    for name, numel in (("first", 24), ("last", 12)):
        shape = expected[f"model.{name}.weight"][1]
        for state in ("exp_avg", "exp_avg_sq", "master"):
            chunks = table[f"optimizer.{state}.{name}.weight"][2]
            assert chunks > 0
            expected[f"optimizer.{state}.{name}.weight"] = ("F32", shape, chunks, 4 * numel)
    assert table == expected


def test_optimizer(saved: Path) -> None:
    checkpoint = inspect(saved).checkpoint
    assert checkpoint is not None
    state = checkpoint.optimizer
    assert state is not None
    assert (state.kind, state.num_with_state, state.first_step, state.last_step) == ("AdamW", 2, 2, 2)
    first, last = state.groups
    assert (first.options["lr"], first.options["betas"], first.num_parameters) == (0.5, (0.8, 0.9), 1)
    assert (last.options["weight_decay"], last.num_parameters) == (0.25, 1)


def test_steps_of_parameters_that_were_idle(tmp_path: Path) -> None:
    resume_cases.save_and_go_on(resume_cases.Setting(), str(tmp_path), 4, 0)
    checkpoint = inspect(tmp_path).checkpoint
    assert checkpoint is not None
    assert checkpoint.optimizer is not None
    assert (checkpoint.optimizer.first_step, checkpoint.optimizer.last_step) == (1, 4)


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(resume_cases.save_and_go_on, resume_cases.Setting(3), str(tmp_path), 1, 0)
    checkpoint = inspect(tmp_path).checkpoint
    assert checkpoint is not None
    assert checkpoint.world_size == 2
    assert max(each.chunks for each in checkpoint.tensors if each.name.startswith("model.")) == 2
    assert len([name for name in checkpoint.files if name.startswith("model-")]) == 2


def test_tags(saved: Path) -> None:
    found = inspect(saved)
    assert found.latest == "two"
    assert [(each.tag, each.step, each.latest) for each in found.tags] == [("two", 2, True), ("one", 1, False)]
    assert problems(found) == {"one": False, "two": False}
    one = inspect(saved, "one").checkpoint
    assert one is not None
    assert one.step == 1
    alone = inspect(saved / "one")
    assert alone.tags == []
    assert alone.checkpoint == one


def test_one_that_was_being_replaced(saved: Path) -> None:
    """The process ended between taking the name from the former one and giving it to the next."""
    (saved / "two").rename(saved / ".replaced-two-0123abcd")
    found = inspect(saved)
    assert [(each.tag, each.latest, each.problem) for each in found.tags] == [("two", True, None), ("one", False, None)]
    two = inspect(saved, "two").checkpoint
    assert two is not None
    assert (two.tag, two.step) == ("two", 2)


def test_damage(saved: Path) -> None:
    (saved / "two" / "model-00000-of-00001.safetensors").write_bytes(b"short")
    found = inspect(saved)
    assert problems(found) == {"two": True, "one": False}
    assert "model-00000-of-00001.safetensors has 5 bytes" in str(found.tags[0].problem)
    assert found.checkpoint is not None
    assert found.checkpoint.tag == "one"
    with pytest.raises(CheckpointError, match="has 5 bytes"):
        inspect(saved, "two")
    with pytest.raises(CheckpointError, match="has 5 bytes"):
        inspect(saved / "two")
    (saved / "one" / "metadata.json").unlink()
    found = inspect(saved)
    assert found.checkpoint is None
    assert problems(found) == {"two": True, "one": True}


def test_damage_that_only_checksums_show(saved: Path) -> None:
    damage(saved / "two" / "optimizer-00000-of-00001.safetensors")
    assert problems(inspect(saved)) == {"two": False, "one": False}
    found = inspect(saved, verify=True)
    assert problems(found) == {"two": True, "one": False}
    assert "optimizer-00000-of-00001.safetensors is damaged" in str(found.tags[0].problem)
    with pytest.raises(CheckpointError, match="is damaged"):
        inspect(saved / "two", verify=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        inspect(saved, "two", verify=True)


def test_where_there_is_none(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*empty"):
        inspect(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="three; there are two, one"):
        inspect(saved, "three")
    with pytest.raises(ValueError, match="not a valid tag"):
        inspect(saved, "..")
    (saved / "latest").write_text("gone\n")
    found = inspect(saved)
    assert problems(found) == {"gone": True, "two": False, "one": False}
    assert found.tags[0].latest


def test_left_out(tmp_path: Path) -> None:
    save(tmp_path, exclude_frozen_parameters=True)
    checkpoint = inspect(tmp_path).checkpoint
    assert checkpoint is not None
    assert checkpoint.left_out == ["frozen.weight"]


def test_json(saved: Path) -> None:
    found = inspect(saved)
    assert found.checkpoint is not None
    assert found.checkpoint.optimizer is not None
    options = found.checkpoint.optimizer.groups[0].options
    options |= {"infinite": math.inf, "tensor": torch.ones(3)}
    content = json.loads(found.to_json())
    assert content["latest"] == "two"
    assert [each["tag"] for each in content["tags"]] == ["two", "one"]
    checkpoint = content["checkpoint"]
    assert checkpoint["files"] == found.checkpoint.files
    assert checkpoint["tensors"][0] == {
        "name": found.checkpoint.tensors[0].name,
        "dtype": "BF16",
        "shape": list(found.checkpoint.tensors[0].shape),
        "chunks": 1,
        "num_bytes": found.checkpoint.tensors[0].num_bytes,
    }
    assert checkpoint["optimizer"]["kind"] == "AdamW"
    told = checkpoint["optimizer"]["groups"][0]["options"]
    assert (told["betas"], told["infinite"], told["tensor"]) == ([0.8, 0.9], "inf", "a tensor")


# -- the command ----------------------------------------------------------------


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(["inspect", *map(str, arguments)])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_command(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, saved)
    assert (code, err) == (0, "")
    for words in ("latest", "AdamW, 2 steps", "lr 0.5", "weight_decay 0.25", "epoch, best", "again.weight = first.w"):
        assert words in out
    for path in (saved / "two").iterdir():
        assert path.name in out or path.name == "manifest.json"
    assert "optimizer.master.last.weight" not in out
    assert "optimizer.master.last.weight" in run(capfd, saved, "--tensors")[1]
    assert "AdamW, 1 step " in run(capfd, saved, "--tag", "one")[1]


def test_command_json(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, saved, "--json")
    assert code == 0
    assert out == inspect(saved).to_json() + "\n"


def test_command_damage(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage(saved / "two" / "model-00000-of-00001.safetensors")
    assert "damaged" not in run(capfd, saved)[1]
    code, out, _ = run(capfd, saved, "--verify")
    assert code == 0
    assert "latest, damaged" in out
    assert "model-00000-of-00001.safetensors is damaged" in out
    damage(saved / "one" / "model-00000-of-00001.safetensors")
    assert run(capfd, saved, "--verify")[0] == 1
    (tmp_path / "empty").mkdir()
    for arguments, expected, words in (
        ((saved, "--tag", "two", "--verify"), 1, "checksum"),
        ((tmp_path / "gone",), 2, "there is no folder"),
        ((tmp_path / "empty",), 1, "there is no checkpoint in"),
        ((saved, "--tag", "a/b"), 2, "'a/b' is not a valid tag"),
    ):
        code, out, err = run(capfd, *arguments)
        assert (code, out) == (expected, "")
        assert words in err
        assert len(err.splitlines()) == 1
