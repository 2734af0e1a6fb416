"""``longshore demo``: equal, and it says so; different, and it says so."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch

from longshore.checkpoint.folder import LATEST
from longshore.cli import comparison
from longshore.cli.output import CHECKPOINTS
from longshore.cli.pictures import Compared, comparison_picture

MICRO = ["--size", "tiny", "--steps", "3", "--seq-len", "16", "--batch-size", "2"]
ALONE = ["--no-two-ranks"]


def rows(out: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {line[0]: line[1:] for line in lines}


def alarming_pixels(image):
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
    return int(((red > 180) & (green < 80) & (blue < 80)).sum())


@pytest.mark.full
def test_equal(cli, text, tmp_path, monkeypatch):
    from PIL import Image

    stages = (1, 2, 3)
    monkeypatch.setattr(comparison, "_KILLED", ())
    ran = cli("demo", "--data", text, *MICRO, "--out", tmp_path / "curves.png")
    assert (ran.code, ran.err) == (0, "")
    table = rows(ran.out)
    ranks, exact = [f"fp32, 2 ranks, ZeRO-{stage}" for stage in stages], "fp32, plain, f64 norm"
    assert list(table) == ["fp32, longshore", "fp32, plain", "bf16, longshore", "bf16, plain", *ranks, exact]
    memory = {"fp32": (["8.00", "8.00"], ["16.00", "0.00"]), "bf16": (["4.00", "12.00"], ["20.00", "0.00"])}
    for dtype, (ours, plain) in memory.items():
        one, other = table[f"{dtype}, longshore"], table[f"{dtype}, plain"]
        assert one[:2] == other[:2]
        assert one[-1] == "yes"
        assert (one[2:4], other[2:4]) == (ours, plain)
    assert table["fp32, longshore"][0] != table["bf16, longshore"][0]
    other = table[exact]
    assert other[2:4] == ["16.00", "0.00"]
    for stage in stages:
        device = "4.00" if stage < 3 else "2.00"
        one = table[f"fp32, 2 ranks, ZeRO-{stage}"]
        assert one[:2] == other[:2] and one[-1] == "yes"
        assert one[2:4] == [device, "4.00"], "half of the state on each rank, at stage 3 half of the weights too"
        line = f"steps whose norm is the same number on 2 ranks at stage {stage} and in one process: 3 of 3"
        assert line in ran.out
    places = ("in fp32", "in bf16", *(f"at stage {stage}" for stage in stages))
    where = f"{', '.join(places[:-1])} and {places[-1]}."
    assert f"All weights are equal in every bit: 21 parameters {where}" in " ".join(ran.out.split())
    assert "(f64 norm) it clips by the norm in float64" in " ".join(ran.out.split())
    clipped = re.search(
        "steps with clipped gradients: " + ", ".join(rf"(\d) of 3 {place}" for place in places), ran.out
    )
    assert clipped is not None and min(map(int, clipped.groups())) > 0
    with Image.open(tmp_path / "curves.png") as image:
        assert image.format == "PNG" and alarming_pixels(image) == 0, "the losses of ranks have the same bits, too"


@pytest.mark.parametrize("dtype, other, bits", [("fp32", "bf16", torch.int32), ("bf16", "fp32", torch.int16)])
def test_one_bit_is_different(cli, text, monkeypatch, dtype, other, bits):
    """The last bit of one element of one parameter, after the last step."""
    run = comparison.LocalContestant.run

    def flip(contestant):
        yield from run(contestant)
        if contestant.name == f"{dtype}, longshore":
            weight = contestant.weights["model.layers.1.mlp.up_proj.weight"]
            weight.view(bits)[3, 5] ^= 1

    monkeypatch.setattr(comparison.LocalContestant, "run", flip)
    ran = cli("demo", "--data", text, *MICRO, *ALONE)
    assert ran.code == 1
    assert rows(ran.out)[f"{dtype}, longshore"][-1] == "no: 1 of 21"
    assert rows(ran.out)[f"{other}, longshore"][-1] == "yes"
    assert f"the first is model.layers.1.mlp.up_proj.weight of {dtype}, longshore" in ran.refused()
    assert "All weights are equal" not in ran.out


def test_fits_80_columns_and_says_which_run_is_under_way(cli, text, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli("demo", "--data", text, *MICRO, *ALONE)
    table = [line for line in ran.out.splitlines() if line.startswith(("│", "┃", "┏"))]
    longest = len("fp32, ZeRO-2, resumed") - len("fp32, longshore")  # a name that is not in this table
    assert max(map(len, table)) + longest <= 80 and "…" not in ran.out
    losses = [cell for row in rows(ran.out).values() for cell in row[:2]]
    assert all(re.fullmatch(r"\d\.\d{6}", loss) for loss in losses) and len(losses) == 8, losses
    said = " ".join(ran.out.split())
    assert "runs 1 and 2, step by step in turn, of 4: fp32, longshore and fp32, plain" in said
    assert said.index("the weights in fp32 are equal in every bit of all 21 parameters") < said.index("runs 3 and 4")
    assert "the other 2 runs take about 1 minute" in said


@pytest.mark.parametrize("difference", [0.0, 1e-6])
def test_the_picture_shows_a_difference(difference):
    from PIL import Image

    plain = {1: 2.0, 2: 1.5, 3: 1.25}
    ours = plain | {2: 1.5 + difference}
    content = comparison_picture(
        [Compared("longshore", ours, "plain", plain), Compared("b", plain, "plain", plain)], "x"
    )
    assert (alarming_pixels(Image.open(io.BytesIO(content))) > 50) == (difference > 0)


@pytest.mark.full
def test_killed_and_resumed(cli, text, monkeypatch):
    monkeypatch.setattr(comparison, "_DTYPES", ())
    monkeypatch.setattr(comparison, "_STAGES", ())
    ran = cli("demo", "--data", text, *MICRO, "--steps", "40")
    assert (ran.code, ran.err) == (0, "")
    name = "fp32, ZeRO-2, resumed"
    assert rows(ran.out)[name][-1] == "yes"
    found = re.search(rf"{name}: SIGKILL for rank 0 after step (\d+), and --resume continued after step (\d+)", ran.out)
    assert found is not None
    after, behind = map(int, found.groups())
    assert 20 <= after < 40 and behind in (8, 16, 24, 32)
    assert "in one process: 40 of 40" in ran.out


@pytest.mark.full
def test_killed_before_latest_was_written(cli, text, monkeypatch):
    """Its first checkpoint is whole, and used, though nothing names it yet: no step is lost from the comparison."""
    monkeypatch.setattr(comparison, "_DTYPES", ())
    monkeypatch.setattr(comparison, "_STAGES", ())
    train = comparison.RanksContestant._train

    def forgetful(contestant, out, *further):
        if "--resume" in further:
            (out / CHECKPOINTS / LATEST).unlink()
        yield from train(contestant, out, *further)

    monkeypatch.setattr(comparison.RanksContestant, "_train", forgetful)
    ran = cli("demo", "--data", text, *MICRO, "--steps", "10")
    assert (ran.code, ran.err) == (0, "")
    assert "in one process: 10 of 10" in ran.out
    assert re.search(r"and --resume continued after step [2468]\b", ran.out)


@pytest.mark.full
def test_another_rank_order_is_different(cli, text, monkeypatch):
    """The ranks get the batches of another seed: the row says no, and so does the exit code."""
    original = comparison.RanksContestant.__init__

    def reseeded(contestant, *arguments, **options):
        original(contestant, *arguments, **options)
        contestant._options["seed"] = 1

    monkeypatch.setattr(comparison.RanksContestant, "__init__", reseeded)
    ran = cli("demo", "--data", text, *MICRO)
    assert ran.code == 1
    for name in ("2 ranks, ZeRO-1", "2 ranks, ZeRO-2", "2 ranks, ZeRO-3", "ZeRO-2, resumed"):
        assert rows(ran.out)[f"fp32, {name}"][-1] == "no: 21 of 21"
    assert "of fp32, 2 ranks, ZeRO-1" in ran.refused()


@pytest.mark.full
def test_ranks_that_fail(cli, text, monkeypatch):
    """What they said is the line, and nothing hangs."""
    monkeypatch.setattr(comparison, "_DTYPES", ())
    original = comparison.RanksContestant.__init__

    def wrong(contestant, *arguments, **options):
        original(contestant, *arguments, **options)
        contestant._options["seq-len"] = 0

    monkeypatch.setattr(comparison.RanksContestant, "__init__", wrong)
    refused = cli("demo", "--data", text, *MICRO).refused()
    assert refused == "longshore: the run on 2 ranks failed: --seq-len must be at least 1, not 0\n"


def test_differing_counts_missing_and_nan():
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    assert comparison.differing(one, {"a": torch.ones(2), "b": torch.zeros(2)}) == ["b"]
    assert comparison.differing({"a": one["a"]}, one) == ["b"]
    assert comparison.differing({"a": torch.tensor([torch.nan])}, {"a": torch.tensor([torch.nan])}) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sign_of_zero_is_a_bit(dtype):
    zeros = torch.zeros(2, dtype=dtype)
    assert comparison.differing({"a": zeros}, {"a": -zeros}) == ["a"]
    assert comparison.differing({"a": -zeros}, {"a": -zeros}) == []


@pytest.mark.medium
def test_seconds_choose_the_steps(cli, text, monkeypatch):
    monkeypatch.setattr(comparison.LocalContestant, "seconds_per_step", property(lambda _: 0.5))
    assert (
        "a Llama of size tiny, 5 steps of 2 x 2 x 16 tokens"
        in cli("demo", "--data", text, *MICRO, *ALONE, "--seconds", "10").out
    )


@pytest.mark.full
def test_seconds_count_the_ranks(cli, text, monkeypatch):
    monkeypatch.setattr(comparison.LocalContestant, "seconds_per_step", property(lambda _: 0.5))
    assert "a Llama of size tiny, 3 steps of 2" in cli("demo", "--data", text, *MICRO, "--seconds", "11").out


def test_sizes_with_a_scalar_tail_are_refused(cli, text, monkeypatch):
    from longshore.cli import settings

    monkeypatch.setattr(settings.ModelSettings, "__post_init__", lambda _: None)
    monkeypatch.setitem(settings.SIZES, "tiny", settings.Shape(24, 24, 1, 2))
    refused = cli("demo", "--data", text, *MICRO).refused()
    assert "has 24 elements, not a multiple of 16" in refused


def test_out_is_checked_first(cli, text, tmp_path):
    assert "is a folder: give the name of a file" in cli("demo", "--data", text, *MICRO, "--out", tmp_path).refused()


@pytest.mark.full
def test_the_default_text(cli):
    ran = cli("demo", "--size", "tiny", "--steps", "30")
    assert ran.code == 0
    assert "Python's standard library" in ran.out and "All weights are equal" in ran.out
