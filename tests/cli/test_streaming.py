"""``longshore train --stream``: parameters rest on the host, and the weights are those without it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Results
from on_device import device_type
from simulated_device.demo import BUDGET, MODEL, finished, start

STREAMED = [
    ["--release-gradients"],
    ["--release-gradients", "--activation-checkpointing"],
    ["--release-gradients", "--dtype", "bf16", "--accumulation", "3", "--speculation-memory", "100%"],
    ["--stage", "3", "--dtype", "fp16", "--clip", "0.01"],
    ["--stage", "3", "--dtype", "bf16", "--accumulation", "2"],
]


@pytest.mark.medium
@pytest.mark.gpu
@pytest.mark.parametrize("options", STREAMED, ids=" ".join)
def test_weights_are_those_without(options, trained, train, tmp_path, results):
    common = ["--layers", "3", "--device", device_type(), "--eval-every", "2", *options]
    plain = trained(*common)
    out = tmp_path / "streamed"
    ran = train(*common, "--stream", "--out", out)
    assert (ran.code, ran.err) == (0, "")
    assert f"streamed to {device_type()}" in ran.out
    streamed = results(out)
    assert streamed.differing(plain) == []
    assert streamed.run["machine"]["device"] == device_type()
    for kind in ("train", "validation"):
        assert [line["loss"] for line in streamed.metrics(kind)] == [line["loss"] for line in plain.metrics(kind)]


@pytest.mark.gpu
def test_a_run_may_go_on_with_or_without(train, trained, results, tmp_path):
    common = ["--layers", "3", "--device", device_type(), "--schedule", "constant", "--release-gradients"]
    whole = trained(*common, "--steps", "6")
    out = tmp_path / "run"
    for steps, more in (("2", []), ("4", ["--stream", "--resume"]), ("6", ["--resume"])):
        ran = train(*common, "--steps", steps, "--save-every", "2", "--out", out, *more)
        assert (ran.code, ran.err) == (0, "")
    assert results(out).differing(whole) == []


@pytest.mark.gpu
def test_what_does_not_go_together(train):
    on = ["--stream", "--device", device_type()]
    assert "--stream keeps parameters on the host, and --plain the optimizer" in train(*on, "--plain").refused()
    assert "and --no-offload the optimizer state on the device" in train(*on, "--no-offload").refused()
    assert "--stream (offload_param in a file) copies" in train("--stream", "--device", "cpu").refused()
    refused = train(*on, "--stage", "2", "--layers", "2").refused()
    assert "must agree with zero_optimization.stage, which is 2" in refused


RUN = [*MODEL, "--batch-size", "1", "--warmup", "0", "--eval-every", "4", "--eval-batches", "1"]


@pytest.mark.slow
@pytest.mark.simulated
def test_a_model_larger_than_the_device_is_trained_killed_resumed_and_exported(text, tmp_path, cli):
    common = ["train", "--data", text, *RUN, "--steps", "8", "--save-every", "2", "--release-gradients"]
    code, _, errors = finished(start(BUDGET, *common, "--out", tmp_path / "refused"))
    assert code == 1 and "out of memory" in errors
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    assert finished(start(1 << 32, *common, "--out", plain))[::2] == (0, "")

    process = start(BUDGET, *common, "--stream", "--log-every", "1", "--out", streamed)
    metrics, deadline = streamed / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, finished(process)
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert finished(process)[0] == -signal.SIGKILL
    code, out, errors = finished(start(BUDGET, *common, "--stream", "--out", streamed, "--resume"))
    assert (code, errors) == (0, "")
    assert "continuing after step 4" in out or "continuing after step 6" in out

    resumed = Results(streamed)
    assert resumed.differing(Results(plain)) == []
    numel = sum(weight.numel() for weight in resumed.weights.values())
    assert resumed.run["result"]["device_bytes"] <= BUDGET < 2 * numel
    assert resumed.run["result"]["host_bytes"] == (2 + 12) * numel  # the parameters, and masters and moments
    exported = tmp_path / "exported"
    assert cli("export", streamed / "checkpoints", "--out", exported).code == 0
    assert_loads(exported, streamed)


def assert_loads(exported: Path, run: Path) -> None:
    """Weights of a checkpoint are those that transformers loads from the run's folder."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(run)
    files = list(exported.rglob("*.safetensors")) if exported.is_dir() else [exported]
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert weights
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name
