"""``longshore train`` from the command to its files: every option does something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.conftest import WRITTEN


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_same_command_gives_the_same_weights(trained):
    assert trained("--dtype", "bf16").differing(trained("--dtype", "bf16")) == []


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "options",
    [
        ["--lr", "0.01"],
        ["--schedule", "linear"],
        ["--schedule", "constant"],
        ["--warmup", "3"],
        ["--weight-decay", "0.5"],
        ["--clip", "0.1"],
        ["--clip", "0"],
        ["--seed", "1"],
        ["--batch-size", "3"],
        ["--accumulation", "2"],
        ["--seq-len", "8"],
        ["--steps", "3"],
        ["--max-bytes", "6000"],
        ["--dtype", "bf16"],
    ],
    ids=" ".join,
)
def test_options_that_change_the_weights(trained, usual, options):
    assert trained(*options).differing(usual())


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [["--no-offload"], ["--plain"], ["--eval-every", "1"], ["--log-every", "1"], ["--activation-checkpointing"]],
    ids=" ".join,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_options_that_do_not(trained, usual, options, dtype):
    assert trained("--dtype", dtype, *options).differing(usual("--dtype", dtype)) == []


def test_activation_checkpointing_calls_each_block_again(train, tmp_path, monkeypatch):
    calls = []
    import transformers.modeling_utils as utils

    former = utils.checkpoint
    monkeypatch.setattr(utils, "checkpoint", lambda *args, **kwargs: calls.append(args) or former(*args, **kwargs))
    for options, called in (([], False), (["--activation-checkpointing"], True)):
        calls.clear()
        assert train("--steps", "1", "--out", tmp_path / str(called), *options).code == 0
        assert bool(calls) == called


@pytest.mark.parametrize("where", [[], ["--stage", "0"]], ids=["alone", "engine"])
def test_offload_decides_where_the_state_is(trained, where):
    """With and without an engine: the same bytes in the other place."""
    host, device = (trained(*where, option).run["result"] for option in ("--offload", "--no-offload"))
    assert host["host_bytes"] > 0 == device["host_bytes"]
    assert device["device_bytes"] == host["device_bytes"] + host["host_bytes"]


def test_released_gradients_take_no_device_memory(trained, usual):
    kept, released = usual(), usual("--release-gradients")
    assert released.run["result"]["device_bytes"] * 2 == kept.run["result"]["device_bytes"]
    assert trained("--release-gradients", "--clip", "0").differing(trained("--clip", "0")) == []


@pytest.mark.parametrize("memory", ["100%", "auto", "1000000"])
def test_stepping_ahead_takes_host_memory_and_changes_no_bit(trained, usual, memory):
    without, ahead = (
        run("--release-gradients", "--speculation-memory", given) for run, given in ((usual, "0"), (trained, memory))
    )
    assert ahead.run["result"]["host_bytes"] > 1.5 * without.run["result"]["host_bytes"]
    assert ahead.differing(without) == []


@pytest.mark.parametrize("options", [("--release-gradients",), ("--stage", "2")], ids=" ".join)
def test_where_gradients_are_added_changes_no_bit(trained, usual, options):
    without = usual("--accumulation", "2", *options)
    for place in ("device", "host"):
        assert trained("--accumulation", "2", *options, "--accumulate", place).differing(without) == []


def test_norms_do_not_decay(trained):
    """With a rate of 1e-30 only the decay, if its factor lr * weight_decay is large, moves a weight."""
    one = trained("--lr", "1e-30", "--weight-decay", "1e29", "--schedule", "constant")
    start = trained("--lr", "0")
    assert start.differing(one)
    assert all("norm" not in name for name in start.differing(one))
    assert sum("norm" in name for name in one.weights) == 3


def test_shape_options(trained):
    from transformers import LlamaConfig

    results = trained("--hidden-size", "48", "--intermediate-size", "64", "--layers", "2", "--heads", "3")
    config = LlamaConfig.from_pretrained(results.folder)
    assert (config.hidden_size, config.intermediate_size) == (48, 64)
    assert (config.num_hidden_layers, config.num_attention_heads) == (2, 3)
    assert results.weights["model.layers.1.mlp.up_proj.weight"].shape == (64, 48)


def test_size(cli, text, results, tmp_path):
    run = ("train", "--data", text, "--steps", "1", "--batch-size", "1", "--seq-len", "8", "--eval-every", "0")
    for size, numel in (("tiny", 133_440), (None, 3_295_488)):
        assert cli(*run, *(["--size", size] if size else []), "--out", tmp_path / str(size)).code == 0
        assert results(tmp_path / str(size)).run["parameters"] == numel


@pytest.mark.parametrize("kept", [True, False])
def test_that_nothing_is_kept_is_said_at_the_start(kept, train, tmp_path):
    ran = train("--steps", "1", *(["--out", tmp_path / "run"] if kept else []))
    found = [number for number, line in enumerate(ran.out.splitlines()) if "the trained weights are not kept" in line]
    assert len(found) == (not kept) and all(number < 3 for number in found)


def test_every_size_has_parameters_of_a_multiple_of_16():
    from transformers import LlamaConfig, LlamaForCausalLM

    from longshore.cli.settings import SIZES

    counts = {}
    for size, shape in SIZES.items():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        assert all(parameter.numel() % 16 == 0 for parameter in model.parameters())
        counts[size] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2)
    assert counts == {"tiny": 0.13, "small": 3.3, "medium": 25.57, "large": 121.59}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_loads_with_equal_logits(trained, dtype, monkeypatch):
    from longshore.cli import job

    models = []
    prepare = job._prepare
    monkeypatch.setattr(job, "_prepare", lambda *given: models.append(prepare(*given)) or models[0])
    results = trained("--dtype", {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
    assert results.names == WRITTEN
    loaded, own = load(results.folder), models[0].model.eval()
    assert loaded.dtype == dtype
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, own(input_ids=tokens).logits)
    assert loaded.generate(tokens, max_new_tokens=2, do_sample=False).shape[1] <= 18
    assert loaded.config.eos_token_id == 0


def test_modes_follow_the_umask(trained):
    assert {entry.stat().st_mode & 0o777 for entry in trained().folder.iterdir()} == {0o644}


def test_metrics(trained):
    results = trained(
        "--steps", "5", "--log-every", "2", "--eval-every", "3", "--eval-batches", "1", "--accumulation", "2"
    )
    steps = results.metrics("train")
    assert [record["step"] for record in steps] == [2, 4, 5]
    assert [record["tokens"] for record in steps] == [128, 256, 320]
    assert [record["step"] for record in results.metrics("validation")] == [0, 3, 5]
    for record in steps:
        assert 1 < record["loss"] < 7 and record["grad_norm"] > 0 and record["tokens_per_second"] > 0
    each = trained("--steps", "5", "--log-every", "1", "--accumulation", "2").metrics("train")
    assert steps[0]["loss"] == pytest.approx((each[0]["loss"] + each[1]["loss"]) / 2)
    assert [record["lr"] for record in steps] == [each[index]["lr"] for index in (1, 3, 4)]
    assert not trained("--eval-every", "0").metrics("validation")


def test_eval_batches(trained):
    few, many = (trained("--eval-every", "4", "--eval-batches", count) for count in (1, 3))
    assert few.metrics("validation")[0]["loss"] != many.metrics("validation")[0]["loss"]


def test_training_lowers_the_loss(trained):
    losses = [
        record["loss"]
        for record in trained("--steps", "60", "--lr", "0.01", "--eval-every", "60").metrics("validation")
    ]
    assert losses[1] < 0.7 * losses[0]


def test_the_curve_is_a_picture(train, tmp_path):
    from PIL import Image

    assert train("--eval-every", "2", "--out", tmp_path / "run").code == 0
    with Image.open(tmp_path / "run" / "loss.png") as image:
        image.load()
        assert image.format == "PNG"
        assert image.size[0] > 500
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20


def test_run_json(trained, text):
    run = trained("--steps", "3").run
    assert run["status"] == "finished"
    assert run["settings"]["data"]["paths"] == [str(text)]
    assert run["settings"]["loop"]["steps"] == run["result"]["steps"] == 3
    assert run["data"]["bytes"] == 12_000 and len(run["data"]["sha256"]) == 64


def test_the_terminal(train, text, tmp_path):
    ran = train("--out", tmp_path / "run", "--eval-every", "4")
    assert "parameters in fp32 on cpu, optimizer state on the host" in ran.out
    assert f"{text}: 1 file, 12 k tokens, 713 sequences to train on, 37 to validate on" in ran.out
    assert "step 4/4  validation loss" in ran.out
    for row in ("training loss", "validation loss", "speed", "device memory", "host memory", "written to"):
        assert row in ran.out
    assert ran.err == ""
    assert "optimizer state on the device\n" in train("--no-offload").out
    assert "optimizer state on the device, by plain PyTorch\n" in train("--plain").out


def test_without_out_nothing_is_written(train, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert train().code == 0
    assert set(tmp_path.iterdir()) == before


def test_several_data(cli, tmp_path, results, text):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one").write_text("one " * 100)
    (folder / "picture").write_bytes(b"\0\1")
    ran = cli(
        "train", "--data", folder, "--data", text, "--size", "tiny", "--seq-len", "8", "--steps", "1",
        "--eval-every", "0", "--out", tmp_path / "run",
    )  # fmt: skip
    assert "2 files (1 that are not text left out)" in ran.out
    assert results(tmp_path / "run").run["data"]["bytes"] == 12_400


class TestModel:
    def test_goes_on_from_the_weights(self, trained, cli, text, tmp_path, results):
        """With a rate of 0 they stay what they were."""
        first = trained("--steps", "3")
        again = tmp_path / "again"
        run = ["train", "--data", text, "--model", first.folder, "--seq-len", "16", "--batch-size", "2"]
        assert cli(*run, "--steps", "2", "--lr", "0", "--weight-decay", "0", "--out", again).code == 0
        assert results(again).differing(first) == []
        other = tmp_path / "other"
        assert cli(*run, "--steps", "2", "--out", other).code == 0
        assert results(other).differing(first)

    def test_no_folder(self, cli, text):
        assert "--model /nowhere is not a folder" in cli("train", "--data", text, "--model", "/nowhere").refused()

    @pytest.mark.parametrize(
        "config", [None, "{", "{}", '{"model_type": "nonsense"}', '{"model_type": "llama"}', '{"model_type": "vit"}']
    )
    def test_no_model(self, cli, text, tmp_path, config):
        folder = tmp_path / "model"
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(config)
        refused = cli("train", "--data", text, "--model", folder).refused()
        assert f"cannot load a causal language model from --model {folder}: " in refused

    def test_missing_weights(self, trained, cli, text):
        from safetensors.torch import save_file

        results = trained()
        weights = results.weights
        del weights["lm_head.weight"]
        save_file(weights, results.folder / "model.safetensors", {"format": "pt"})
        refused = cli("train", "--data", text, "--model", results.folder).refused()
        assert "has no usable weights for lm_head.weight (1 such)" in refused

    def test_damaged_weights(self, trained, cli, text):
        results = trained()
        path = results.folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "cannot load" in cli("train", "--data", text, "--model", results.folder).refused()

    def test_too_short_for_the_sequences(self, trained, cli, text):
        refused = cli("train", "--data", text, "--model", trained().folder, "--seq-len", "17").refused()
        assert "--seq-len 17 is longer than the 16 positions of --model" in refused


class TestTokenizer:
    @pytest.fixture
    def tokenizer(self, tmp_path) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {"<end>": 0, **{letter: index + 1 for index, letter in enumerate("abcdefghĠĊ")}, "ab": 11}
        tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return path

    def test_file(self, train, tokenizer, tmp_path, results):
        folder = tmp_path / "run"
        assert train("--tokenizer", tokenizer, "--out", folder).err == ""
        run = results(folder)
        assert run.weights["lm_head.weight"].shape == (16, 16)  # 12 tokens, up to a multiple of 16
        assert run.run["data"]["tokens"] < run.run["data"]["bytes"] == 12_000
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder)
        assert loaded("abba", add_special_tokens=False)["input_ids"] == [11, 2, 1]

    def test_folder_and_model_with_its_own(self, train, cli, text, tokenizer, tmp_path, results):
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<end>")
        wrapped.save_pretrained(tmp_path / "tokenizer")
        assert train("--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "one").err == ""
        one = results(tmp_path / "one")
        assert json.loads((one.folder / "config.json").read_text())["eos_token_id"] == 0
        ran = cli(
            "train", "--data", text, "--model", one.folder, "--seq-len", "16", "--steps", "1", "--out", tmp_path / "two"
        )
        assert ran.err == ""
        assert results(tmp_path / "two").run["data"]["tokens"] == one.run["data"]["tokens"]

    def test_a_model_with_fewer_tokens(self, train, cli, text, tokenizer, tmp_path):
        assert train("--tokenizer", tokenizer, "--out", tmp_path / "model").code == 0
        for path in (tmp_path / "model").glob("tokenizer*"):
            path.unlink()
        refused = cli("train", "--data", text, "--model", tmp_path / "model", "--seq-len", "16").refused()
        assert "the text has token 104, but --model" in refused
        assert "knows only 16 tokens: give its --tokenizer" in refused

    def test_missing(self, train):
        assert "--tokenizer /nowhere does not exist" in train("--tokenizer", "/nowhere").refused()

    def test_no_tokenizer(self, train, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("{}")
        for name in ("folder", "file"):
            assert "cannot load a tokenizer from" in train("--tokenizer", tmp_path / name).refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_no_cuda(train):
    assert "--device cuda: torch finds no CUDA device here; use --device cpu" in train("--device", "cuda").refused()
    assert "on cpu" in train("--device", "auto").out


@pytest.mark.gpu
def test_cuda_is_deterministic(trained):
    one = trained("--device", "cuda", "--dtype", "bf16")
    assert one.differing(trained("--device", "cuda", "--dtype", "bf16")) == []
    assert one.run["result"]["device_bytes"] > 0


@pytest.mark.parametrize("package", ["transformers", "matplotlib"])
def test_without_the_extra(train, monkeypatch, package, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "run"
    refused = train("--out", out).refused()
    assert f"{package} cannot be imported" in refused
    assert "pip install 'longshore[train]'" in refused
    assert not out.exists()


def test_out_of_memory(train, monkeypatch):
    def refuse(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte\nmore lines")

    monkeypatch.setattr("longshore.cli.job.make_stepper", refuse)
    assert "out of memory" in train().refused()


def test_bugs_show_a_traceback(train, monkeypatch):
    monkeypatch.setattr("longshore.cli.job.make_stepper", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()


def test_version_and_help(cli):
    assert cli("--version").out.startswith("longshore 0.")
    assert "--release-gradients" in cli("train", "--help").out
    assert "demo" in cli("--help").out


def test_help_does_not_wait_for_transformers():
    code = (
        "import sys; from longshore.cli import main; main(['train', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('transformers', 'matplotlib', 'longshore.cli.job')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "arguments", [["train", "--data"], ["train", "--model"], ["train", "--tokenizer"], ["demo", "--data"]], ids=" ".join
)
def test_a_wrong_path_does_not_wait_for_torch(arguments):
    code = (
        f"import sys; from longshore.cli import main; code = main({[*arguments, '/nowhere']}); "
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "/nowhere" in ran.stderr
