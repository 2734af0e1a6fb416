"""``longshore plan``: what it takes for a model, what it writes, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from longshore.engine.config import load_config

GPU = ("--gpu", "h200", "--host-memory", "2TB", "--host-bandwidth", "400GB/s", "--link", "50GB/s")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}


class Small(nn.Module):
    """Also refuses to have weights, where they would take memory."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(160, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 160)


def make_small():
    return Small()


def make_huge():
    with torch.device("meta"):  # 4 TB
        return nn.Sequential(nn.Embedding(1 << 20, 1 << 20))


def make_of_size(size):
    return nn.Linear(size, size)


def make_loudly():
    print("making")
    return Small()


def make_fused():
    model = Small()
    model.qkv = nn.Linear(64, 192)
    return model


def make_number():
    return 7


@pytest.fixture
def llama(tmp_path):
    def write(**changes):
        folder = tmp_path / "tiny-llama"
        folder.mkdir(exist_ok=True)
        folder.joinpath("config.json").write_text(json.dumps({**LLAMA, **changes}))
        return folder

    return write


def planned(cli, *arguments):
    ran = cli("plan", *map(str, arguments), "--json")
    assert (ran.code, ran.err) == (0, ""), ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_of_transformers(cli, llama, tied):
    import transformers

    folder = llama(tie_word_embeddings=tied)
    found = planned(cli, folder, *GPU)
    real = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    assert found["model"]["parameters"] == sum(each.numel() for each in real.parameters())
    assert found["model"]["name"] == "tiny-llama"
    assert planned(cli, folder / "config.json", *GPU) == found
    best = found["recommended"]
    assert best["fits"] and best["step_s"] >= best["exposed_s"] > 0


def test_files_of_weights(cli, llama, tmp_path):
    import transformers

    folder = llama()
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).bfloat16()
    saved = tmp_path / "saved"
    model.save_pretrained(saved, max_shard_size="40KB")
    assert (saved / "model.safetensors.index.json").is_file()
    by_configuration = planned(cli, saved, *GPU)
    saved.joinpath("config.json").unlink()
    by_folder = planned(cli, saved, *GPU)
    assert by_folder["model"]["parameters"] == by_configuration["model"]["parameters"]
    # Of names and shapes alone: the same bytes but for padding, as the order may be another.
    for left, right in zip(by_folder["choices"], by_configuration["choices"], strict=True):
        assert left["device_bytes"]["parameters"] == right["device_bytes"]["parameters"]
    assert "read from a header" in by_folder["model"]["notes"][0]
    by_index = planned(cli, saved / "model.safetensors.index.json", *GPU)
    assert by_index["choices"] == by_folder["choices"]
    whole = tmp_path / "one.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, whole)
    assert planned(cli, whole, *GPU)["choices"] == by_folder["choices"]


def test_a_header_is_enough(cli, tmp_path):
    """A file that ends behind its header, of 2 TB: no weight is read."""
    header = {"w": {"dtype": "BF16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 41]}}
    text = json.dumps(header).encode()
    path = tmp_path / "huge.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    ran = cli("plan", str(path), *GPU)
    assert ran.code == 1 and "huge (1,099,511,627,776 parameters) does not fit on 1 x H200 SXM" in ran.err


def test_a_function(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    found = planned(cli, "my_models:make_small", *GPU)
    assert found["model"]["parameters"] == sum(each.numel() for each in Small().parameters())
    ran = cli("plan", "my_models:make_huge", *GPU)
    assert ran.code == 1 and "more on each device" in ran.err


def test_what_a_function_prints_is_not_in_the_json(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    ran = cli("plan", "my_models:make_loudly", *GPU, "--json")
    assert ran.code == 0 and json.loads(ran.out)["model"]["parameters"] and ran.err == "making\n"


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["AutoModel"], []])
def test_own_dtypes_are_those_of_the_configuration(cli, llama, architectures):
    found = planned(cli, llama(architectures=architectures, dtype="bfloat16"), *GPU, "--dtype", "own")
    assert found["recommended"]["device_bytes"]["parameters"] == 2 * found["model"]["parameters"]


def test_only_streamed_choices_and_what_they_are_called(cli, llama, tmp_path):
    found = planned(cli, llama(), *GPU, "--stream")
    assert {each["param_device"] for each in found["choices"]} == {"cpu"}
    assert found["recommended"]["waited_s"] > 0
    assert found["configuration"]["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert all(each["param_device"] == "none" for each in planned(cli, llama(), *GPU, "--no-stream")["choices"])
    text = cli("plan", llama(), *GPU, "--stream", "--out", str(tmp_path))
    assert text.code == 0 and "recommended: stage 3, offload, streamed" in text.out
    assert "streamed: parameters rest on the host" in text.out and "for parameters\n" in text.out
    assert load_config(tmp_path / "ds_config.json", world_size=1).config.param_device == "cpu"
    wrong = cli("plan", llama(), *GPU, "--stream", "--no-offload")
    assert wrong.code == 2 and "offload and streaming that are asked for exclude each other" in wrong.err


def test_what_a_quantized_configuration_is_planned_as(cli, llama):
    quantized = planned(cli, llama(quantization_config={"quant_method": "fp8"}), *GPU)
    assert any("quantization_config" in note for note in quantized["model"]["notes"])
    assert quantized["choices"] == planned(cli, llama(), *GPU)["choices"]


EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "switch_transformers": {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_experts": 4},
}


def test_experts_of_a_nested_configuration(cli, llama):
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    text |= EXPERTS["qwen3_moe"]
    alone = planned(cli, llama(model_type="qwen3_moe", architectures=[], **EXPERTS["qwen3_moe"]), *GPU)
    kind, vision = "qwen3_vl_moe", {**vision, "deepstack_visual_indexes": [0]}
    inside = planned(cli, llama(model_type=kind, architectures=[], text_config=text, vision_config=vision), *GPU)
    for found in (alone, inside):
        assert "each token uses 0.25 of the experts" in found["model"]["notes"]


def test_experts_of_which_nothing_says_how_many_are_used(cli, llama):
    found = planned(
        cli, llama(model_type="switch_transformers", architectures=[], **EXPERTS["switch_transformers"]), *GPU
    )
    assert "experts are counted as if every token used all of them" in found["model"]["notes"]


def test_the_page_and_the_files(cli, llama, tmp_path):
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    out.mkdir()
    for name in ("plan.json", "ds_config.json", "plan.png"):
        (out / name).symlink_to(theirs)
    ran = cli("plan", llama(), *GPU, "--gpus", "8", "--batch-size", "4", "--seq-len", "128", "--out", out)
    assert (ran.code, ran.err) == (0, "") and not theirs.exists()
    for said in (
        "4,096 tokens a step",
        "recommended: stage",
        "exposed",
        "is hidden",
        "assumed: matrix products",
        "stage 3",
    ):
        assert said in ran.out
    config = load_config(out / "ds_config.json", world_size=8, needs_optimizer=True).config
    content = json.loads((out / "plan.json").read_text())
    assert config.stage == content["recommended"]["stage"]
    assert content["configuration"] == json.loads((out / "ds_config.json").read_text())
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    alone = cli("plan", llama(), *GPU).out
    assert "stages 1, 2 and 3 are as stage 0" in alone and "stage 3, offload, ratio" not in alone
    kinds = {"state", "gradients", "spares", "staging", "accumulators"}
    for choice in content["choices"]:
        resting = {"parameters"} if choice["param_device"] == "cpu" else set()
        assert set(choice["host_bytes"]) == kinds | resting


@pytest.mark.slow
def test_the_configuration_trains(cli, llama, tmp_path):
    import transformers

    import longshore

    out = tmp_path / "out"
    folder = llama()
    ran = cli("plan", folder, "--quick", "--seq-len", "16", "--dtype", "fp32", "--out", out)
    assert (ran.code, ran.err) == (0, ""), ran.err
    content = json.loads((out / "plan.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    engine, *_ = longshore.initialize(model=model, config=out / "ds_config.json")
    tokens = torch.randint(160, (1, 16))
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.optimizer.grad_norm()
        found = engine.explain(False)
        engine.step()
    engine.destroy()
    assert content["recommended"]["host_bytes"] == found.host_bytes
    assert content["recommended"]["device_bytes"] == found.device_bytes


def test_this_machine_is_measured_in_the_models_own_dtype(cli, llama, monkeypatch):
    seen = []

    def measured(job, *arguments, **options):
        seen.append(job.dtype)
        raise ValueError("enough")

    monkeypatch.setattr("longshore.plan.measurement.this_machine", measured)
    for dtype in ("own", "fp16"):
        assert "enough" in cli("plan", str(llama(dtype="bfloat16")), "--dtype", dtype).err
    assert seen == [torch.bfloat16, torch.float16]


@pytest.mark.slow
def test_this_machine_is_measured(cli, llama):
    found = planned(cli, llama(), "--quick", "--seq-len", "32")
    assert found["machine"]["name"].startswith("this machine") and found["machine"]["ranks"] == 1
    assert found["recommended"]["step_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", *GPU), "nowhere does not exist, and nothing is downloaded: give a folder with config.json"),
        (("json:nothing", *GPU), "json has no 'nothing'"),
        (("no_such_package:make", *GPU), "there is no module 'no_such_package' in the current folder"),
        (("my_models:make_smal", *GPU), "did you mean 'make_small'?"),
        (("my_models:make_number", *GPU), "returned a int, not a torch.nn.Module"),
        (("LLAMA", "--gpu", "h20"), "--gpu h20 is not in the table; did you mean 'h200'?"),
        (("LLAMA", "--gpu", "h200"), "give --host-memory"),
        (("LLAMA", *GPU, "--link", "50 parsecs"), "--link '50 parsecs' is not a bandwidth as 400GB/s"),
        (("LLAMA", *GPU, "--host-memory", "256"), "--host-memory 256 would be bytes; write the unit, as in 256GB"),
        (("LLAMA", "--stream", "--quick"), "--stream copies parameters to an accelerator, and this machine has none"),
        (("LLAMA", *GPU, "--device-memory", "much"), "--device-memory 'much' is not a size in bytes"),
        (("LLAMA", "--link", "5GB/s"), "--link describes another machine, and this one is measured: give --gpu too"),
        (("LLAMA", *GPU, "--efficiency", "3"), "efficiency is a share of the peak"),
        (("LLAMA", *GPU, "--batch-size", "0"), "--batch-size must be at least 1, not 0"),
        (("LLAMA", *GPU, "--stage", "4"), "--stage must be at most 3, not 4"),
        (("--layers", str(10**22), *GPU), f"--layers must be at most 10000, not {10**22}"),
        (("--hidden-size", str(2**40), *GPU), f"--hidden-size must be at most {2**20}, not {2**40}"),
        (("LLAMA", *GPU, "--hosts", str(2**63)), f"--hosts must be at most {2**63 - 1}, not {2**63}"),
        (("LLAMA", *GPU, "--link", "1e308GB/s"), "'1e308GB/s' is not a bandwidth"),
        (("LLAMA", *GPU, "--size", "tiny"), "--size and MODEL exclude each other"),
        (("--stage", "2", *GPU), "give MODEL, or --size for a model of longshore train"),
        (("--size", "hug", *GPU), "--size 'hug' is not known; choose from tiny"),
        (("LLAMA", *GPU, "--clip", "inf"), "--clip must be a finite number, not inf"),
        ((".relative:make", *GPU), "'.relative:make': give the module's full name"),
        ((":make", *GPU), "':make': give the module's full name"),
        (
            ("my_models:make_of_size", *GPU),
            "my_models:make_of_size is called without arguments, and needs some (",
        ),
        (("LLAMA", *GPU, "--optimizer", "Lio"), "--optimizer 'Lio' is not known; did you mean 'Lion'?"),
        (("LLAMA", *GPU, "--dtype", "fp8"), "--dtype 'fp8' is not known; choose from fp32, bf16, fp16, own"),
    ],
)
def test_what_is_refused(cli, llama, monkeypatch, arguments, said):
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    folder = llama()
    ran = cli("plan", *(str(folder) if each == "LLAMA" else each for each in arguments))
    assert ran.code in (1, 2) and said in ran.err and "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "is not valid JSON"),
        ("config.json", b"[]", "has no model_type"),
        ("config.json", b'{"model_type": "lama"}', "does not know model_type 'lama'; did you mean"),
        ("x.safetensors", b"\xff" * 30, "is not a safetensors file: its header would have"),
        ("x.safetensors", (10).to_bytes(8, "little") + b"not json at all", "its header is not JSON"),
        ("x.safetensors", (2).to_bytes(8, "little") + b"[]", "its header is a list"),
        ("x.safetensors", (14).to_bytes(8, "little") + b'{"a": {"b":1}}', "tensor a has no valid shape and dtype"),
        ("config.json", b"[" * 100_000, "is not valid JSON"),
        ("config.json", b'{"model_type": ["llama"]}', "does not know model_type ['llama']"),
        ("x.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000, "its header is not JSON"),
        (
            "x.safetensors",
            (34).to_bytes(8, "little") + b'{"a": {"shape":[1],"dtype":["F"]}}',
            "no valid shape and dtype",
        ),
        ("model.safetensors.index.json", b"[" * 100_000, "is not an index of safetensors files"),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "b"}}',
            "names 1 files that are not beside it, b first",
        ),
        ("notes.txt", b"", "is neither JSON nor safetensors"),
    ],
)
def test_files_that_are_none(cli, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    ran = cli("plan", str(path), *GPU)
    assert ran.code == 1 and said in ran.err, ran.err
    assert len(ran.err.strip().splitlines()) == 1
    empty = tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    assert "has neither config.json nor safetensors files" in cli("plan", str(empty), *GPU).err


def test_a_size_of_train(cli):
    """The model that ``longshore train`` trains with the same options."""
    found = planned(cli, "--size", "tiny", *GPU)
    assert found["model"]["parameters"] == 133_440 and found["model"]["name"] == "llama-tiny"
    assert planned(cli, "--size", "tiny", "--layers", "1", *GPU)["model"]["parameters"] < 133_440
    assert planned(cli, "--layers", "1", *GPU)["model"]["parameters"] > 133_440, "one layer of the default size"


@pytest.mark.medium
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_choices_that_are_asked_for(cli, llama, gpus):
    common = (llama(), *GPU, "--gpus", gpus)
    every = planned(cli, *common)["choices"]
    for stage in (None, 0, 2):
        for offload in (None, "none", "cpu"):
            options = [] if stage is None else ["--stage", str(stage)]
            options += {None: [], "none": ["--no-offload"], "cpu": ["--offload"]}[offload]
            found = planned(cli, *common, *options)
            assert found["choices"] == [
                each for each in every if stage in (None, each["stage"]) and offload in (None, each["offload_device"])
            ]
            assert found["recommended"] in found["choices"] != []
            assert "recommended: stage" in cli("plan", *common, *options).out


def test_a_module_of_the_current_folder(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    (tmp_path / "models_of_mine.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(256, 256)\n")
    assert planned(cli, "models_of_mine:make", *GPU)
    monkeypatch.delitem(sys.modules, "models_of_mine")


@pytest.mark.medium
@pytest.mark.parametrize("name", ["Muon", "muon"])
def test_muon(cli, llama, tmp_path, name):
    found = planned(cli, llama(), *GPU, "--optimizer", name)
    usual = planned(cli, llama(), *GPU)
    assert any(note.startswith("Muon steps ") for note in found["model"]["notes"])
    assert found["job"]["optimizer"] == found["configuration"]["optimizer"]["type"] == "Muon"
    for with_muon, with_adamw in zip(found["choices"], usual["choices"], strict=False):
        kind = "host_bytes" if with_muon["offload_device"] == "cpu" else "device_bytes"
        if with_muon["offload_ratio"] == with_adamw["offload_ratio"] == 1.0:
            assert 0 < with_muon[kind]["state"] < with_adamw[kind]["state"]
    out = cli("plan", llama(), *GPU, "--optimizer", name, "--out", tmp_path / "out")
    assert out.code == 0 and "assumed: Muon steps" in out.out and "matrices under way" in out.out
    config = load_config(tmp_path / "out" / "ds_config.json", world_size=1, needs_optimizer=True).config
    assert config.optimizer is not None and config.optimizer.type == "Muon"


def test_the_optimizer_of_a_configuration(cli, llama, tmp_path):
    def file(section, **more):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_batch_size": 12345, **more, "optimizer": section}))
        return path

    params = {"lr": "auto", "muon_lr": 0.01, "ns_method": "standard", "others": ["*.mlp.*"]}
    of_file = planned(cli, llama(), *GPU, "--offload", "--optimizer", file({"type": "muon", "params": params}))
    del params["lr"]
    assert of_file["configuration"]["optimizer"] == {"type": "Muon", "params": params}
    usual = planned(cli, llama(), *GPU, "--offload", "--optimizer", "muon")
    state = [found["choices"][0]["host_bytes"]["state"] for found in (of_file, usual)]
    more = state[0] - state[1]
    assert 0.9 < more / (4 * 3 * 3 * 64 * 96) < 1.1, "the matrices of the MLP have a second moment, too"
    plain = planned(cli, llama(), *GPU, "--offload", "--optimizer", file({"type": "SGD", "params": {"lr": 0.1}}))
    assert plain["choices"][0]["host_bytes"]["state"] < state[1]
    section = file({"type": "AdamW"}, bf16={"enabled": "no"})  # the other sections are not read
    assert planned(cli, llama(), *GPU, "--optimizer", section)["choices"] == planned(cli, llama(), *GPU)["choices"]


def test_a_fused_parameter_is_explained_by_a_configuration(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    ran = cli("plan", "my_models:make_fused", *GPU, "--optimizer", "muon")
    assert ran.code == 2 and "qkv.weight, [192, 64], looks as if it held several matrices" in ran.err
    path = tmp_path / "c.json"
    params = {"ns_method": "standard", "split": {"*qkv.weight": 3}}
    path.write_text(json.dumps({"optimizer": {"type": "Muon", "params": params}}))
    assert planned(cli, "my_models:make_fused", *GPU, "--optimizer", path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "must be JSON, and at line 1"),
        ('{"bf16": {"enabled": true}}', "optimizer: is missing"),
        ('{"optimizer": {"type": "Muon", "params": {"split": 3}}}', "optimizer.params.split"),
        ('{"optimizer": {"type": "Lamb"}}', "looks at shapes or norms of whole parameters"),
        ('{"optimizer": 3}', "optimizer"),
    ],
)
def test_configurations_without_a_usable_optimizer(cli, llama, tmp_path, content, said):
    path = tmp_path / "c.json"
    path.write_text(content)
    ran = cli("plan", llama(), *GPU, "--optimizer", path)
    assert ran.code == 2 and said in ran.err and "--optimizer" in ran.err and "c.json" in ran.err, ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert "there is no such file" in cli("plan", llama(), *GPU, "--optimizer", "nowhere.json").err


def test_a_folder_that_cannot_be_is_found_first(cli, tmp_path):
    """Before the model, which is not there."""
    file = tmp_path / "file"
    file.write_text("mine")
    for out, why in ((file, "is not a folder"), (file / "below", "which is a file")):
        assert why in cli("plan", "nowhere", *GPU, "--out", str(out)).refused()
    assert file.read_text() == "mine"
