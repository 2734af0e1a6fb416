"""``longshore demo``: equal, and it says so; different, and it says so."""

from __future__ import annotations

import re

import pytest
import torch

from longshore.cli import comparison

MICRO = ["--size", "tiny", "--steps", "3", "--seq-len", "16", "--batch-size", "2"]


def rows(out: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {line[0]: line[1:] for line in lines}


def test_equal(cli, text, tmp_path):
    from PIL import Image

    ran = cli("demo", "--data", text, *MICRO, "--out", tmp_path / "curves.png")
    assert (ran.code, ran.err) == (0, "")
    table = rows(ran.out)
    assert list(table) == ["fp32, longshore", "fp32, plain", "bf16, longshore", "bf16, plain"]
    memory = {"fp32": (["8.00", "12.00"], ["16.00", "0.00"]), "bf16": (["4.00", "12.00"], ["20.00", "0.00"])}
    for dtype, (ours, plain) in memory.items():
        one, other = table[f"{dtype}, longshore"], table[f"{dtype}, plain"]
        assert one[:2] == other[:2]
        assert one[-1] == "yes"
        assert (one[2:4], other[2:4]) == (ours, plain)
    assert table["fp32, longshore"][0] != table["bf16, longshore"][0]
    assert "All weights are equal: torch.equal over 21 parameters in fp32 and in bf16." in ran.out
    clipped = re.search(r"steps with clipped gradients: (\d) of 3 in fp32, (\d) of 3 in bf16", ran.out)
    assert clipped is not None and min(map(int, clipped.groups())) > 0
    with Image.open(tmp_path / "curves.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("dtype, other, bits", [("fp32", "bf16", torch.int32), ("bf16", "fp32", torch.int16)])
def test_one_bit_is_different(cli, text, monkeypatch, dtype, other, bits):
    """The last bit of one element of one parameter, after the last step."""
    run = comparison.Contestant.run

    def flip(contestant):
        yield from run(contestant)
        if contestant.name == f"{dtype}, longshore":
            weight = contestant.weights["model.layers.1.mlp.up_proj.weight"]
            weight.view(bits)[3, 5] ^= 1

    monkeypatch.setattr(comparison.Contestant, "run", flip)
    ran = cli("demo", "--data", text, *MICRO)
    assert ran.code == 1
    assert rows(ran.out)[f"{dtype}, longshore"][-1] == "no: 1 of 21"
    assert rows(ran.out)[f"{other}, longshore"][-1] == "yes"
    assert f"the first is model.layers.1.mlp.up_proj.weight of {dtype}, longshore" in ran.refused()
    assert "All weights are equal" not in ran.out


def test_differing_counts_missing_and_nan():
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    assert comparison.differing(one, {"a": torch.ones(2), "b": torch.zeros(2)}) == ["b"]
    assert comparison.differing({"a": one["a"]}, one) == ["b"]


def test_seconds_choose_the_steps(cli, text, monkeypatch):
    monkeypatch.setattr(comparison.Contestant, "seconds_per_step", property(lambda _: 0.5))
    assert (
        "a Llama of size tiny, 5 steps of 2 x 2 x 16 tokens"
        in cli("demo", "--data", text, *MICRO, "--seconds", "10").out
    )


def test_sizes_with_a_scalar_tail_are_refused(cli, text, monkeypatch):
    from longshore.cli import settings

    monkeypatch.setattr(settings.ModelSettings, "__post_init__", lambda _: None)
    monkeypatch.setitem(settings.SIZES, "tiny", settings.Shape(24, 24, 1, 2))
    refused = cli("demo", "--data", text, *MICRO).refused()
    assert "has 24 elements, which is no multiple of 16" in refused


def test_out_is_checked_first(cli, text, tmp_path):
    assert "is a folder: give the name of a file" in cli("demo", "--data", text, *MICRO, "--out", tmp_path).refused()


@pytest.mark.slow
def test_the_default_text(cli):
    ran = cli("demo", "--size", "tiny", "--steps", "30")
    assert ran.code == 0
    assert "Python's standard library" in ran.out and "All weights are equal" in ran.out
