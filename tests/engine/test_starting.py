"""Models that begin without their weights: made on rank 0 alone, or read from files part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from safetensors.torch import save_file
from torch import nn

import longshore
from engine import starting_cases as cases
from engine.fully_sharded_cases import config_of


@pytest.mark.quick(0)
@pytest.mark.parametrize("same_state", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rank_0_draws(stage: int, same_state: bool, two_ranks: Ranks) -> None:
    assert two_ranks(cases.drawn, stage, same_state) == [[True, True], [False, True]]


@pytest.mark.parametrize("stage", [0, 2])
def test_what_constructors_do(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.as_without, stage)


@pytest.mark.parametrize("empty", [False, True])
def test_a_rank_that_fails_inside(empty: bool, two_ranks: Ranks) -> None:
    assert two_ranks(cases.failed_inside, empty) == [
        "RankError: rank 1 failed inside longshore.Init (ArithmeticError: on purpose); no rank has a model",
        "ArithmeticError: on purpose",
    ]


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "stage, sharded_before, dtype",
    [
        (0, False, torch.float32),
        (2, False, torch.bfloat16),
        (3, False, torch.float32),
        (3, False, torch.bfloat16),
        (3, True, torch.float32),
    ],
)
def test_weights_are_read(
    stage: int, sharded_before: bool, dtype: torch.dtype, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks(cases.read, str(tmp_path), stage, dtype, sharded_before)


@pytest.mark.parametrize(
    "what, says",
    [
        ("nothing to read", "parameter embedding.weight is on the meta device, and rank 0 has no values for it; give "),
        ("missing", "has not the weights of this model: more.weight is not there"),
        (
            "shape",
            "has not the weights of this model: blocks.1.up.weight is [7, 5] and the model's is [4, 3], bl",
        ),
        ("buffer", "buffer positions is on the meta device, and "),
        ("no folder", "there is no file or folder nowhere to read weights from"),
        ("dtype", "embedding.weight is I8 and the model's is torch.float32"),
        ("no path", "TypeError: "),
        ("broken", "b.safetensors cannot be read as safetensors: "),
    ],
)
def test_refused(what: str, says: str, two_ranks: Ranks, tmp_path: Path) -> None:
    for stage in (3, 2):  # where every rank reads, and where rank 0 does
        for said in two_ranks(cases.refused, what, str(tmp_path / str(stage)), stage):
            assert says in said


def test_weights_that_one_rank_lacks(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(cases.refused, "one rank", str(tmp_path))
    says = "there is no file or folder nowhere to read weights from; models on a hub are not fetched: give a folder"
    assert first == f"FileNotFoundError: rank 1: {says}"
    assert second == f"FileNotFoundError: {says}"


@pytest.mark.needs_torch("stage 3")
def test_memory(two_ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks of a machine together: one copy of the weights and little more, where each made one of its own."""
    for how, most in (("without", None), ("drawn", 1.7), ("files", 1.2)):
        copies = sum(two_ranks(cases.big, str(tmp_path), how))
        assert copies > 2.0 if most is None else copies < most, (how, copies)


def test_a_buffer_that_no_file_has(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with longshore.Init(empty=True):
        model = nn.BatchNorm1d(2)
    with pytest.warns(UserWarning, match=r"has no num_batches_tracked, running_mean, running_var \(3 buffers"):
        longshore.initialize(model=model, config=config_of(), weights=tmp_path).engine.destroy()
    assert model.running_var is not None and model.running_var.tolist() == [1.0, 1.0]


def test_one_rank(tmp_path: Path) -> None:
    """Nothing is shared; weights are read all the same, and what the user has of the model stays the model's."""
    source = nn.Linear(3, 2)
    save_file({**source.state_dict(), "left.over": torch.zeros(1)}, tmp_path / "model.safetensors")
    with longshore.Init():
        assert not nn.Linear(2, 2).weight.is_meta
    with longshore.Init(empty=True), pytest.raises(RuntimeError, match="active already"), longshore.Init():
        pass
    with longshore.Init(empty=True):
        model = nn.Linear(3, 2)
    mine = [model.weight, model.bias]
    with pytest.warns(UserWarning, match=r"1 tensors of .* are in no place of the model and are not read: left"):
        longshore.initialize(model=model, model_parameters=mine, config=config_of(), weights=tmp_path).engine.destroy()
    assert mine[0] is model.weight and torch.equal(model.weight, source.weight) and torch.equal(mine[1], source.bias)
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match=r"parameter weight is on the meta device, .*weights=.*longshore\.Init"):
        longshore.initialize(model=model, config=config_of())
    (tmp_path / "more.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"tensor .* is in two files"):
        longshore.initialize(model=model, config=config_of(), weights=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names gone\.safetensors, which .* does not have"):
        longshore.initialize(model=model, config=config_of(), weights=tmp_path)
