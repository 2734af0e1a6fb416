"""``longshore plan --states``: the format of the optimizer's states."""

from __future__ import annotations

import json

import pytest
import torch

from longshore.cli.plan import PlanSettings
from longshore.engine.config import load_config
from longshore.layout.formats import StateFormat

GPU = ("--gpu", "h200", "--host-memory", "2TB", "--host-bandwidth", "400GB/s", "--link", "50GB/s")
FORMATS = tuple(each.value for each in StateFormat)


def planned(cli, *arguments):
    ran = cli("plan", "--size", "small", *map(str, arguments), "--json")
    assert (ran.code, ran.err) == (0, ""), ran.err
    return json.loads(ran.out)


def test_each_format(cli, tmp_path):
    found = {states: planned(cli, *GPU, "--states", states, "--offload") for states in FORMATS}
    assert planned(cli, *GPU, "--offload") == found["fp32"]
    sizes = [found[states]["recommended"]["host_bytes"]["state"] for states in FORMATS]
    steps = [found[states]["recommended"]["step_s"] for states in FORMATS]
    assert sizes == sorted(sizes, reverse=True) and steps == sorted(steps, reverse=True)
    assert sizes[1] == pytest.approx(sizes[0] * 8 / 12) and sizes[0] * 6.125 / 12 < sizes[2] < sizes[0] * 7 / 12
    for states, plan in found.items():
        assert plan["job"]["states"] == states
        offload = plan["configuration"]["zero_optimization"]["offload_optimizer"]
        assert offload.get("states", "fp32") == states
        for other, rows in plan["choices_by_states"].items():
            first = found[other]["choices"][0]
            assert rows[0] == {key: first[key] for key in rows[0]}
    out = tmp_path / "out"
    text = cli("plan", "--size", "small", *GPU, "--states", "8bit", "--out", out)
    assert text.code == 0 and "format of the optimizer's states: 8bit (of small parameters, bf16)" in text.out
    assert load_config(out / "ds_config.json", world_size=1, needs_optimizer=True).config.states == "8bit"


def test_the_page_says_what_each_format_takes(cli):
    out = cli("plan", "--size", "small", *GPU, "--offload").out
    _, _, rest = out.partition("memory that has the optimizer's state (device; with offload: host), by --states")
    header, row = (line for line in rest.splitlines() if "8bit" in line or "stage 0, offload " in line)
    assert [cell.strip() for cell in header.split("┃")[1:-1]] == ["choice", "fp32", "bf16", "8bit"]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["stage 0, offload", "56.6 MiB", "44.0 MiB", "36.7 MiB"]
    assert "by --states" not in cli("plan", "--size", "small", *GPU, "--optimizer", "muon").out


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("sections", "states"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "states": "8bit"}}}, "8bit"),
        ({"zero_optimization": {"stage": 7, "offload_optimizer": {"states": "bf16"}}}, "bf16"),
        ({"zero_optimization": {"offload_optimizer": {"states": "auto"}}}, "fp32"),
        ({"zero_optimization": {"offload_optimizer": None}, "bf16": 3}, "fp32"),
        ({"bf16": {"enabled": "auto", "bf16_optimizer_states": True}}, "bf16"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "fp32_optimizer_states": False}}}, "bf16"),
    ],
)
def test_the_states_of_a_configuration(cli, tmp_path, sections, states):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **sections}))
    found = planned(cli, *GPU, "--offload", "--optimizer", path)
    assert found["job"]["states"] == states
    assert found["choices"] == planned(cli, *GPU, "--offload", "--states", states)["choices"]
    for other in FORMATS:  # the command line decides
        again = planned(cli, *GPU, "--offload", "--optimizer", path, "--states", other)
        loaded = load_config(again["configuration"], world_size=1, needs_optimizer=True)
        assert again["job"]["states"] == loaded.config.states == other
        assert loaded.config.optimizer.lr == 0.01 and not loaded.notes


def test_what_is_refused(cli, tmp_path):
    refused = cli("plan", "--size", "small", *GPU, "--states", "bf16", "--optimizer", "muon").refused()
    assert "states bf16 is for " in refused and "the states of Muon are float32 always: leave it out" in refused
    assert "--states '4bit' is not known" in cli("plan", "--size", "small", *GPU, "--states", "4bit").refused()
    path = tmp_path / "c.json"
    for optimizer, states, said in (("Muon", "8bit", "the states of Muon"), ("AdamW", "4bit", "must be one of")):
        zero = {"offload_optimizer": {"states": states}}
        path.write_text(json.dumps({"optimizer": {"type": optimizer}, "zero_optimization": zero}))
        refused = cli("plan", "--size", "small", *GPU, "--optimizer", path).refused()
        assert f'zero_optimization.offload_optimizer.states = "{states}": ' in refused and said in refused


def test_what_does_not_fit_is_told_which_format_would(cli):
    little = ("--gpu", "h200", "--host-memory", "45GB", "--device-memory", "40GB", "--stage", "0", "--no-stream")
    shape = ("--hidden-size", "4096", "--intermediate-size", "16384", "--layers", "20", "--heads", "32")
    refused = cli("plan", *shape, *little, "--seq-len", "256").refused()
    assert (
        "try --states bf16 (stage 0, offload" in refused
        and "then fits), more memory on each host (--host-memory), more devices" in refused
    )
    assert cli("plan", *shape, *little, "--seq-len", "256", "--states", "bf16").code == 0


def test_the_option_takes_what_there_is():
    for states in FORMATS:
        assert PlanSettings(states=states).job().states == states
    assert PlanSettings().job().states == "fp32"


@pytest.mark.slow
@pytest.mark.parametrize("states", FORMATS)
def test_the_configuration_trains(cli, tmp_path, states):
    import longshore
    from longshore.cli.model import new_llama
    from longshore.cli.settings import BYTE_VOCABULARY, ShapeSettings

    out = tmp_path / "out"
    arguments = ("--size", "small", "--quick", "--seq-len", "16", "--dtype", "fp32", "--states", states)
    ran = cli("plan", *arguments, "--out", out)
    assert (ran.code, ran.err) == (0, ""), ran.err
    content = json.loads((out / "plan.json").read_text())
    model = new_llama(ShapeSettings(size="small").shape(), 16, BYTE_VOCABULARY, None)
    engine, *_ = longshore.initialize(model=model, config=out / "ds_config.json")
    tokens = torch.randint(BYTE_VOCABULARY, (1, 16))
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.optimizer.grad_norm()
        found = engine.explain(False)
        engine.step()
    engine.destroy()
    assert found.states == states
    assert content["recommended"]["host_bytes"] == found.host_bytes
