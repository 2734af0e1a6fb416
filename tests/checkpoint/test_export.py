"""What was exported loads as the model that was saved, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import longshore
from checkpoint import resume_cases
from longshore.checkpoint import export as export_room
from longshore.checkpoint.export import export
from longshore.checkpoint.files import TensorFile
from longshore.cli import main
from longshore.errors import CheckpointError

CONFIGS = ("config.json", "generation_config.json")
TINY = ("llama", "gpt2", "untied")


def tiny(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of transformers with random weights."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if kind == "gpt2":
        config: Any = GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1
        )
    else:
        config = LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=kind == "llama",
        )
    return AutoModelForCausalLM.from_config(config).to(dtype)


def save(
    model: nn.Module, folder: Path, steps: int = 1, tags: tuple[str | None, ...] = (None,), **options: Any
) -> None:
    """A checkpoint, or several, of a model that has been stepped."""
    config = longshore.Config(stage=0, micro_batch_size=2)
    engine: Any = longshore.initialize(
        model=model,
        optimizer=lambda parameters: longshore.AdamW(parameters, lr=1e-2),
        config=config,
        offload=longshore.Offload(64, threads=1),
    ).engine
    try:
        for tag in tags:
            for _ in range(steps):
                words = torch.randint(0, 40, (2, 8))
                engine.backward(engine(input_ids=words, labels=words).loss)
                engine.step()
            engine.save_checkpoint(folder, tag=tag, **options)
    finally:
        engine.destroy()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def check_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    save(model, folder)
    return folder


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformers_loads_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(kind, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save(model, tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "hf")
    assert names_in(tmp_path / "hf") == {"model.safetensors", *CONFIGS} == set(done.files)
    check_same(loaded(tmp_path / "hf").state_dict(), model.state_dict())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in file.keys()) is (kind == "untied")  # noqa: SIM118
        assert len(file.keys()) == done.num_tensors
    assert done.num_bytes == sum(p.nbytes for p in model.parameters())
    assert (done.tag, done.step) == ("global_step1", 1)


@pytest.mark.parametrize("max_shard_bytes", [1, 1300, 4000])
def test_several_files(max_shard_bytes: int, model: Any, saved: Path, tmp_path: Path) -> None:
    done = export(saved, tmp_path / "hf", max_shard_bytes)
    shards = [name for name in done.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    if max_shard_bytes == 1:
        assert len(shards) == done.num_tensors
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    found = {name: load_file(tmp_path / "hf" / name) for name in shards}
    assert {name: shard for shard, tensors in found.items() for name in tensors} == index["weight_map"]
    sizes = [[value.nbytes for value in tensors.values()] for tensors in found.values()]
    assert all(sum(each) <= max_shard_bytes or len(each) == 1 for each in sizes)
    assert all(sum(one) + sum(other) > max_shard_bytes for one, other in itertools.pairwise(sizes))
    check_same(loaded(tmp_path / "hf").state_dict(), model.state_dict())


def test_in_fp32_it_is_the_masters(tmp_path: Path) -> None:
    """With the digits that bfloat16 has not; a weight that was written after the last step is its own."""
    model = tiny("llama")
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: optimizer.state[parameter]["master"] for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.model.norm.weight.fill_(0.5)
    expected["model.norm.weight"] = torch.full_like(expected["model.norm.weight"], 0.5)
    model.model.embed_tokens.weight.data[0].fill_(0.25)  # torch does not see this
    expected["model.embed_tokens.weight"][0] = 0.25
    longshore.save(tmp_path / "run", model, optimizer)
    export(tmp_path / "run", tmp_path / "hf", dtype=torch.float32)
    found = loaded(tmp_path / "hf").state_dict()
    check_same({name: found[name] for name in expected}, expected)
    assert not torch.equal(found["model.embed_tokens.weight"], model.model.embed_tokens.weight.float())


def test_the_config_names_the_class(saved: Path, tmp_path: Path) -> None:
    export(saved, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_it_generates_as_it_did(model: Any, tmp_path: Path) -> None:
    model.generation_config.eos_token_id = [3, 5]
    model.generation_config.max_new_tokens = 7
    save(model, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    found = loaded(tmp_path / "hf").generation_config
    assert (found.eos_token_id, found.max_new_tokens) == ([3, 5], 7)


@pytest.mark.parametrize("value", [torch.tensor([3]), float("nan")])
def test_what_json_cannot_hold_is_left_out_and_said(value: Any, model: Any, tmp_path: Path) -> None:
    """Training does not end for it."""
    model.generation_config.temperature = value
    with pytest.warns(UserWarning, match=r"no generation_config\.json: GenerationConfig has values that are not JSON"):
        save(model, tmp_path / "run")
    assert set(export(tmp_path / "run", tmp_path / "hf").files) == {"model.safetensors", "config.json"}
    check_same(loaded(tmp_path / "hf").state_dict(), model.state_dict())


def test_a_generation_config_that_is_not_written_again_stays(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    save(model, tmp_path / "new")
    export(tmp_path / "new", out)
    export(tmp_path / "new", out, overwrite=True)
    model.generation_config = None  # as in checkpoints of older versions
    save(model, tmp_path / "old", tags=("old",))
    with pytest.raises(ValueError, match=r"generation_config\.json, which no export wrote"):
        export(tmp_path / "old", out, overwrite=True)
    assert (out / "generation_config.json").is_file()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_cast(dtype: torch.dtype, model: Any, saved: Path, tmp_path: Path) -> None:
    export(saved, tmp_path / "hf", dtype=dtype)
    check_same(loaded(tmp_path / "hf").state_dict(), {k: v.to(dtype) for k, v in model.state_dict().items()})


@pytest.mark.parametrize("stated", [None, torch.float32, torch.float16], ids=str)
def test_the_dtype_is_that_of_most_weights_whatever_the_config_says(stated: torch.dtype | None, tmp_path: Path) -> None:
    model = tiny("untied")
    model.model.norm.float()
    model.model.embed_tokens.float()
    model.lm_head.float()  # the first by name: transformers would guess
    model.config.dtype = stated
    save(model, tmp_path / "run", steps=0)
    config = json.loads((tmp_path / "run" / "global_step0" / "config.json").read_text())
    assert config.get("dtype") == (None if stated is None else str(stated).removeprefix("torch."))
    export(tmp_path / "run", tmp_path / "hf")
    check_same(loaded(tmp_path / "hf").state_dict(), {k: v.bfloat16() for k, v in model.state_dict().items()})
    found = load_file(tmp_path / "hf" / "model.safetensors")
    check_same(found, model.state_dict())


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[1, 3] = 2.0**20
        model.model.norm.weight[0] = torch.inf  # as it is in fp16
    save(model, tmp_path / "run", steps=0)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.weight has the value 1\.05e\+06.*6\.55e\+04"
    ):
        export(tmp_path / "run", tmp_path / "hf", dtype=torch.float16)
    assert names_in(tmp_path) == {"run"}
    export(tmp_path / "run", tmp_path / "hf", dtype=torch.float32)


class Odd(nn.Module):
    """What a checkpoint may have besides matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.same = self.weight
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        for name, value in {
            "counts": torch.arange(3),
            "mask": torch.tensor([True, False, True]),
            "bits": torch.randn(7).to(torch.float8_e4m3fn),
            "wide": torch.randn(2, dtype=torch.float64),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def test_all_kinds_of_tensors(tmp_path: Path) -> None:
    model = Odd()
    save(model, tmp_path / "run", steps=0)
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.files == ("model.safetensors",)  # no config.json: the model has none
    expected = {name: value for name, value in model.state_dict().items() if name != "same"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(bytes_of(found[name]), bytes_of(value)), name
    export(tmp_path / "run", tmp_path / "half", dtype=torch.float16)
    cast = load_file(tmp_path / "half" / "model.safetensors")
    changed = {name for name in cast if cast[name].dtype != expected[name].dtype}
    assert changed == {"weight", "scalar", "empty", "wide"}
    assert all(cast[name].dtype == torch.float16 for name in changed)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    setting = resume_cases.Setting(stage)
    first, _ = two_ranks(resume_cases.save_and_go_on, setting, str(tmp_path / "run"), 2, 0)
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.files == ("model.safetensors",)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in found.items():
        assert torch.equal(value, first["saved"][name]), name
    metadata = json.loads((tmp_path / "run" / done.tag / "metadata.json").read_text())["tensors"]
    assert {name for name in metadata if name.startswith("model.")} == {f"model.{name}" for name in found}
    files = {chunk["file"] for name in found for chunk in metadata[f"model.{name}"]["chunks"]}
    assert len(files) == 2
    if stage == 3:
        assert any(len(metadata[f"model.{name}"]["chunks"]) > 1 for name in found)


PEAK = """
import sys
from pathlib import Path

import torch
from longshore.checkpoint.export import export

torch.set_num_threads(1)


def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))


run, tmp = map(Path, sys.argv[1:])
export(run, tmp / "small", tag="small", dtype=torch.float32)  # whatever is imported, is
before = peak()
done = export(run, tmp / "large", 1 << 26, tag="large", dtype=torch.float32)
print(done.num_bytes, (peak() - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """The most that a process has ever had resident, mapped files and all, as the system counts it."""
    # Large: smaller ones than 64 MiB may wait for their checksum beside the next, and pages of code count too.
    numel, count = 1 << 25, 4
    for tag, model in (
        ("small", nn.Linear(2, 2, dtype=torch.bfloat16)),
        ("large", nn.ModuleList(nn.Linear(numel, 1, False, dtype=torch.bfloat16) for _ in range(count))),
    ):
        for parameter in list(model.parameters())[1:]:
            parameter.requires_grad_(False)  # no optimizer's state
        save(model, tmp_path / "run", steps=0, tags=(tag,))
    # glibc keeps freed blocks of some MiB by default, of a size that it learns, so that what is counted would vary.
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "run"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert done.returncode == 0, done.stderr
    num_bytes, more = map(int, done.stdout.split())
    assert num_bytes == 4 * numel * count
    # In bf16, its cast, and half a tensor for what else there is.
    assert more < 2 * 4 * numel, f"{more / 2**20:.1f} MiB for tensors of {4 * numel / 2**20:.1f}"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", *CONFIGS, "metadata.json", "state.json"])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.filterwarnings("ignore:.*the newest complete checkpoint")
def test_a_damaged_file_is_named(name: str, direct: bool, saved: Path, tmp_path: Path) -> None:
    damage(saved / "global_step1" / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*damaged"):
        export(saved / "global_step1" if direct else saved, tmp_path / "hf")
    assert names_in(tmp_path) == {"run"}


def test_a_damaged_checkpoint_is_passed_over_but_not_where_it_was_asked_for(tmp_path: Path) -> None:
    save(tiny("llama"), tmp_path / "run", tags=("first", "second"))
    damage(tmp_path / "run" / "second" / "model-00000-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="checksum"):
        export(tmp_path / "run", tmp_path / "hf", tag="second")
    with pytest.warns(UserWarning, match="checksum"):
        assert export(tmp_path / "run", tmp_path / "hf").tag == "first"


def test_where_there_is_none(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*empty"):
        export(tmp_path / "empty", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="there are global_step1"):
        export(saved, tmp_path / "hf", tag="global_step7")
    with pytest.raises(ValueError, match="not a valid tag"):
        export(saved, tmp_path / "hf", tag="../run")
    (saved / "global_step1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        export(saved / "global_step1", tmp_path / "hf")
    assert names_in(tmp_path) == {"run"}


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "metadata.json", "state.json"])
def test_nothing_is_read_that_was_not_verified(name: str, saved: Path, tmp_path: Path) -> None:
    manifest = saved / "global_step1" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"][name]
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"does not list {name}"):
        export(saved / "global_step1", tmp_path / "hf")
    assert names_in(tmp_path) == {"run"}


def test_without_frozen_parameters_it_is_no_model(tmp_path: Path) -> None:
    model = tiny("llama")
    model.model.layers[1].requires_grad_(False)
    save(model, tmp_path / "run", exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"without frozen parameters \('model\.layers\.1\..*exclude_frozen"):
        export(tmp_path / "run", tmp_path / "hf")


def test_arguments(saved: Path, tmp_path: Path) -> None:
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            export(saved, tmp_path / "hf", wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"not as torch\.int64"):
        export(saved, tmp_path / "hf", dtype=torch.int64)


def test_a_folder_with_something_in_it_stays(saved: Path, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    export(saved, out)  # an empty one is taken
    first = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="not empty"):
        export(saved, out, 1300)
    assert (out / "model.safetensors").read_bytes() == first
    export(saved, out, 1300, overwrite=True)
    assert "model.safetensors" not in names_in(out)
    check_same(loaded(out).state_dict(), model.state_dict())
    (out / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"thesis\.txt, which no export wrote"):
        export(saved, out, overwrite=True)
    with pytest.raises(ValueError, match="which no export wrote"):
        export(saved, saved, overwrite=True)
    with pytest.raises(ValueError, match="is not a folder"):
        export(saved, out / "thesis.txt", overwrite=True)
    assert names_in(tmp_path) == {"run", "hf"}


class Stopped(BaseException):
    pass


@pytest.mark.quick(0)
@pytest.mark.parametrize("error", [Stopped(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("moment", ["write", "finish", "index", "rename"])
def test_interrupted(
    error: BaseException, moment: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was there is there, and nothing else."""
    out = tmp_path / "hf"
    export(saved, out)
    before = {name: (out / name).read_bytes() for name in names_in(out)}
    calls = [0]

    def fail_later(then: Callable[..., Any], call: int) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                raise error
            return then(*args, **kwargs)

        return called

    if moment in ("write", "finish"):
        monkeypatch.setattr(TensorFile, moment, fail_later(getattr(TensorFile, moment), 3))
    elif moment == "index":
        monkeypatch.setattr(export_room, "write_json", fail_later(export_room.write_json, 1))
    else:
        monkeypatch.setattr(export_room.os, "rename", fail_later(os.rename, 2))
    expected = Stopped if isinstance(error, Stopped) else CheckpointError
    with pytest.raises(expected, match=None if isinstance(error, Stopped) else "hf could not be written: No space"):
        export(saved, out, 1300, overwrite=True)
    monkeypatch.undo()
    assert calls[0] >= 1
    assert {name: (out / name).read_bytes() for name in names_in(out)} == before
    assert names_in(tmp_path) == {"run", "hf"}


def test_progress(saved: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    done = export(saved, tmp_path / "hf", 1300, progress=lambda *counts: told.append(counts))
    assert told[0] == (0, done.num_bytes)
    assert told[-1] == (done.num_bytes, done.num_bytes)
    assert len(told) == done.num_tensors + 1
    assert told == sorted(told)


# -- the command ----------------------------------------------------------------


def test_command(model: Any, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    command = ["export", str(saved), "--out", str(out), "--max-shard-size", "1.3kB"]
    assert main([*command, "--dtype", "fp32", "--tag", "global_step1"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out.startswith("global_step1 (step 1): 20 tensors, ")
    assert str(out) in said.out
    assert "model.safetensors.index.json" in names_in(out)
    masters = loaded(out).state_dict()
    assert {value.dtype for value in masters.values()} == {torch.float32}
    check_same({name: value.bfloat16() for name, value in masters.items()}, model.state_dict())
    assert main(command) == 2
    assert "not empty" in capfd.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    check_same(loaded(out).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--dtype", "int8"], 2, "choose one of fp32, bf16, fp16"),
        (["--max-shard-size", "big"], 2, "--max-shard-size: 'big' is not a size in bytes as 80GB"),
        (["--max-shard-size", "0"], 2, "--max-shard-size: '0' is not above zero"),
        (["--tag", "a/b"], 2, "'a/b' is not a valid tag"),
        (["--tag", "missing"], 1, "there is no checkpoint"),
    ],
)
def test_command_refused(
    options: list[str], code: int, said: str, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved), "--out", str(tmp_path / "hf"), *options]) == code
    err = capfd.readouterr().err
    assert said in err
    assert err.startswith("longshore: ")
    assert len(err.splitlines()) == 1
    assert names_in(tmp_path) == {"run"}


def test_command_tells_of_what_it_passes_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(Odd(), tmp_path / "run", steps=0, tags=("first", "second"))
    damage(tmp_path / "run" / "second" / "model-00000-of-00001.safetensors")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("first (step 0)")
    assert ["checksum" in line for line in said.err.splitlines()] == [True, False]
    assert "no config.json" in said.err
