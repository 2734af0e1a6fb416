"""Whatever is refused is refused before anything is read, by name, in one line and with exit code 2."""

from __future__ import annotations

import pytest

REFUSED = [
    (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
    (["--seq-len", "0"], "--seq-len must be at least 1, not 0"),
    (["--steps", "0"], "--steps must be at least 1, not 0"),
    (["--accumulation", "0"], "--accumulation must be at least 1, not 0"),
    (["--eval-every", "-1"], "--eval-every must be at least 0, not -1"),
    (["--eval-batches", "0"], "--eval-batches must be at least 1, not 0"),
    (["--log-every", "0"], "--log-every must be at least 1, not 0"),
    (["--warmup", "-1"], "--warmup must be at least 0, not -1"),
    (["--seed", "-1"], "--seed must be at least 0, not -1"),
    (["--seed", str(2**63)], "--seed must be at most"),
    (["--max-bytes", "0"], "--max-bytes must be at least 1, not 0"),
    (["--lr", "-1"], "--lr must be at least 0, not -1.0"),
    (["--lr", "nan"], "--lr must be a finite number, not nan"),
    (["--lr", "inf"], "--lr must be a finite number, not inf"),
    (["--weight-decay", "-0.1"], "--weight-decay must be at least 0, not -0.1"),
    (["--clip", "-1"], "--clip must be at least 0, not -1.0"),
    (["--stage", "-1"], "--stage must be at least 0, not -1"),
    (["--schedule", "cosin"], "did you mean cosine? choose from constant, linear, cosine"),
    (["--size", "smal"], "--size 'smal' is not known; did you mean small? choose from tiny, small, medium, large"),
    (["--dtype", "fp16"], "--dtype fp16 is not supported: fp16 gradients need loss scaling"),
    (["--dtype", "float"], "--dtype 'float' is not known; choose from fp32, bf16"),
    (["--device", "tpu"], "--device tpu: torch finds no TPU device here; use --device cpu"),
    (["--layers", "0"], "--layers must be at least 1, not 0"),
    (["--layers", str(10**22)], f"--layers must be at most 10000, not {10**22}"),
    (["--steps", str(10**22)], f"--steps must be at most {2**63 - 1}, not {10**22}"),
    (["--states", "bf16", "--states-seed", str(2**63)], f"--states-seed must be at most {2**63 - 1}"),
    (["--heads", "0"], "--heads must be at least 1, not 0"),
    (["--hidden-size", "40"], "--hidden-size must be a multiple of 16, not 40"),
    (["--intermediate-size", "0"], "--intermediate-size must be at least 16, not 0"),
    (["--heads", "3"], "does not split into 3 heads"),
    (["--heads", "32", "--hidden-size", "32"], "does not split into 32 heads of an even size"),
    (["--model", "somewhere", "--size", "tiny"], "--size and --model exclude each other"),
    (["--model", "somewhere", "--hidden-size", "64"], "--hidden-size and --model exclude each other"),
    (["--model", "somewhere", "--out", "./somewhere"], "is the folder of --model: choose another"),
    (["--model", "somewhere", "--size", "small"], "--size and --model exclude each other"),
    (["--no-offload", "--release-gradients"], "--no-offload keeps the optimizer state on the device: leave one out"),
    (["--plain", "--release-gradients"], "--plain keeps the optimizer state on the device: leave one out"),
    (["--plain", "--offload"], "--plain keeps the optimizer state on the device, and --offload on the host"),
    (["--plain", "--stage", "0"], "--plain trains without longshore, and --stage and --config with its engine"),
    (["--plain", "--config", "ds.json"], "--plain trains without longshore, and --stage and --config"),
    (["--no-overwrite"], "No such option: --no-overwrite"),
    (["--speculation-memory", "1"], 'must be "auto", a percentage such as "25%"'),
    (["--speculation-memory", "-1"], 'must be "auto"'),
    (["--speculation-memory", "1.5"], 'must be "auto"'),
    (["--speculation-memory", "nan"], 'must be "auto"'),
    (["--speculation-memory", "some"], 'must be "auto"'),
    (["--speculation-memory", "50%"], "add --release-gradients, --stream, --stage or --config"),
    (["--speculation-memory", "auto", "--no-offload"], "--speculation-memory is for stepping on the host"),
    (["--accumulate", "gpu"], "choose from auto, device, host"),
    (["--accumulate", "host"], "--accumulate is for adding while backward copies gradients to the host, and here they"),
    (["--accumulate", "device", "--no-offload"], "--accumulate is for gradients on their way to the host"),
    (["--states", "bf61"], "--states 'bf61' is not known; did you mean bf16? choose from fp32, bf16, 8bit"),
    (["--states", "fp16"], "choose from fp32, bf16, 8bit"),
    (["--states-seed", "-1"], "--states-seed must be at least 0, not -1"),
    (["--states", "bf16", "--plain"], "--states bf16 is for longshore's AdamW, and --plain trains with torch.optim"),
    (["--states", "8bit", "--optimizer", "muon"], "the states of --optimizer muon are fp32 always: leave one out"),
    (["--overwrite"], "--overwrite needs --out DIR"),
    (["--dtype", "int8"], "--dtype 'int8' is not known; choose from fp32, bf16"),
    (["--stps", "3"], "No such option: --stps"),
    (["--steps", "many"], "Invalid value for '--steps'"),
    (["more"], "unexpected extra argument"),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize("arguments, message", REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_refused(cli, arguments, message, monkeypatch):
    monkeypatch.setattr("longshore.cli.job.read_text", lambda *_: pytest.fail("read the data"))
    ran = cli("train", *arguments)
    assert message in ran.refused()
    assert ran.code == 2
    assert ran.out == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["--size", "hug"], "--size 'hug' is not known; choose from"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--seq-len", "0"], "--seq-len must be at least 1"),
    ],
)
def test_refused_by_demo(cli, arguments, message):
    assert message in cli("demo", *arguments).refused()


def test_unknown_command(cli):
    said = cli("trian").refused()
    assert "No such command 'trian'. Did you mean 'train'? (the commands are train, launch, demo," in said


def test_no_command(cli):
    assert "Missing command (the commands are train, " in cli().refused()
