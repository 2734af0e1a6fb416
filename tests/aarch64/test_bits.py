"""The comparison of two processors, on one: what was written agrees, and one other bit is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aarch64 import bits


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bits") / "bits.safetensors"
    bits.write(str(file))
    return file


def test_the_same_processor_has_the_same_bits(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bits.check(str(written))
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["AdamW.8bit.bfloat16.exp_avg_sq.wide", "Lion.fp32.float32.weight.bias"])
def test_one_other_bit_is_found(written: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(written)
    integer = {2: torch.int16, 4: torch.int32}[tensors[f"out.{name}"].element_size()]
    tensors[f"out.{name}"].view(-1).view(integer)[-1] ^= 1
    save_file(tensors, tmp_path / "changed")
    case, _, array = name.rpartition(".")[0].rpartition(".")
    with pytest.raises(AssertionError, match=f"{case}: {array}.* has other bits"):
        bits.check(str(tmp_path / "changed"))
