"""Checkpoints that DeepSpeed wrote, met at every door: each says how to import them, and the import fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import PlainLoop
from torch import nn

import longshore
import longshore.compat.deepspeed as deepspeed
from compat.checkpoint_cases import DATA, check_state
from compat.test_routes import AUTO, SCRIPTS, assert_same, run_deepspeed
from compat.write_checkpoint_data import CASES, Model, config_of, groups_of
from longshore.compat.checkpoint.importing import import_deepspeed
from longshore.errors import CheckpointError

ADVICE = r"is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out FOLDER{tag}`"


def advice(root: Path, tag: str = "") -> str:
    return ADVICE.format(root=root, tag=tag)


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def by_one_line(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    model = nn.Linear(2, 2)
    return lambda folder, **tag: longshore.load(folder, model, **tag), lambda: None


def by_engine(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    engine = longshore.initialize(model=nn.Linear(2, 2), config=config).engine
    return engine.load_checkpoint, engine.destroy


def by_deepspeed(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    return engine.load_checkpoint, engine.destroy


@pytest.mark.parametrize("door", [by_one_line, by_engine, by_deepspeed])
def test_the_door_says_how_to_import_it(door: Any, request: pytest.FixtureRequest) -> None:
    root = DATA / "stage1_fp32"
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW"}}
    load, close = door(config)
    request.addfinalizer(close)
    with pytest.raises(CheckpointError, match=advice(root)):
        load(root)
    tagged = advice(root, " --tag global_step3")
    with pytest.raises(CheckpointError, match=tagged):
        load(root, tag="global_step3")
    with pytest.raises(CheckpointError, match=tagged):
        load(root / "global_step3")


@pytest.mark.parametrize("written", ["global_step3\r\n", "  global_step3 \n", "global_step3" + 2000 * " "])
def test_blanks_around_the_tag_hide_no_checkpoint(written: str, tmp_path: Path) -> None:
    """As DeepSpeed and editors write it: a run that should resume must not start afresh."""
    shutil.copytree(DATA / "stage1_fp32", tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest").write_bytes(written.encode())
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=advice(tmp_path)):
        longshore.load(tmp_path, model, longshore.AdamW(model.parameters()))
    assert deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


OPTIMIZERS = {
    "a file's Adam": ("Adam", {}),
    "a file's AdamW": ("AdamW", {}),
    "a file's Adam, not decoupled": ("Adam", {"adam_w_mode": False}),
}


def client_of(name: str, groups: Any) -> Any:
    kinds: dict[str, Any] = {
        "torch's AdamW": torch.optim.AdamW,
        "torch's Adam": torch.optim.Adam,
        "DeepSpeedCPUAdam": deepspeed.ops.adam.DeepSpeedCPUAdam,
        "FusedAdam": deepspeed.ops.adam.FusedAdam,
    }
    return kinds[name](groups, lr=1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case, optimizer, fits",
    [
        ("stage2_bf16", "a file's Adam", True),
        ("stage2_bf16", "a file's AdamW", True),
        ("stage2_bf16", "a file's Adam, not decoupled", False),
        ("stage2_bf16", "torch's AdamW", True),
        ("stage2_bf16", "torch's Adam", False),
        ("stage2_bf16", "DeepSpeedCPUAdam", True),
        ("stage2_bf16", "FusedAdam", True),
        ("stage2_fp16", "a file's Adam, not decoupled", True),
        ("stage2_fp16", "a file's AdamW", False),
        ("stage2_fp16", "torch's Adam", True),
        ("stage2_fp16", "torch's AdamW", False),
    ],
)
def test_the_import_fits_the_optimizer(case: str, optimizer: str, fits: bool, tmp_path: Path) -> None:
    path = import_deepspeed(DATA / case, tmp_path)
    model = Model().to(torch.bfloat16 if CASES[case]["dtype"] == "bf16" else torch.float16)
    config = config_of(CASES[case])
    given: dict[str, Any] = {"model_parameters": groups_of(model)}
    if optimizer in OPTIMIZERS:
        kind, params = OPTIMIZERS[optimizer]
        config["optimizer"] = {"type": kind, "params": {"lr": 1.0, **params}}
    else:
        del config["optimizer"]
        given = {"optimizer": client_of(optimizer, groups_of(model))}
    config.pop("scheduler", None)
    engine = deepspeed.initialize(model=model, config=config, **given)[0]
    try:
        if fits:
            assert engine.load_checkpoint(tmp_path)[0] == str(path)
            check_state(engine, load_file(DATA / case / "expected.safetensors"))
            assert engine.optimizer.param_groups[0]["lr"] != 1.0
        else:
            with pytest.raises(CheckpointError, match=r"decoupled|was saved from"):
                engine.load_checkpoint(tmp_path)
    finally:
        engine.destroy()


# -- the Trainers on two ranks -----------------------------------------------------------------------------------------


def goes_on(case: str, steps: int) -> dict[str, torch.Tensor]:
    """The masters of a plain loop on the mean of two ranks' gradients, from what DeepSpeed says that it saved."""
    expected = load_file(DATA / case / "expected.safetensors")
    model = Model()
    whole = {name: expected[f"{name} weight"] for name, _ in model.named_parameters()}
    if CASES[case].get("dtype") == "bf16":
        model.bfloat16()
    model.load_state_dict(whole, strict=False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    plain = PlainLoop(groups_of(model), **config_of({"stage": 0})["optimizer"]["params"])
    for parameter, master in zip(plain.parameters, plain.masters, strict=True):
        name, state = names[parameter], plain.optimizer.state[master]
        with torch.no_grad():
            master.copy_(plain._padded(expected[f"{name} master"]))
        state["step"] = expected["step"].float()
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = plain._padded(expected[f"{name} {key}"])
    first = int(expected["step"])
    for step in range(first, first + steps):
        sums = [torch.zeros(parameter.shape) for parameter in plain.parameters]
        for rank in range(2):
            model.zero_grad()
            samples = [4 * step + 2 * rank + each for each in range(2)]
            words = [torch.randint(7, (4,), generator=torch.Generator().manual_seed(each)) for each in samples]
            model(torch.stack(words)).backward()
            for total, parameter in zip(sums, plain.parameters, strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
        plain.step(sums, 0.5)
    return {
        names[parameter]: master.detach()[: parameter.numel()].view(parameter.shape)
        for parameter, master in zip(plain.parameters, plain.masters, strict=True)
    }


@pytest.mark.filterwarnings("ignore:left out of the import")
@pytest.mark.parametrize("kind", ["transformers", "longshore"])
@pytest.mark.parametrize(
    "case, stage",
    [
        pytest.param("stage2_fp32_offload_two_ranks", 2, marks=pytest.mark.slow),
        pytest.param("stage2_fp32_offload_two_ranks", 3, marks=pytest.mark.full),
        pytest.param("stage3_bf16_offload_two_ranks", 3, marks=pytest.mark.full),
    ],
)
def test_a_trainer_on_two_ranks_goes_on_from_the_imported_folder(
    case: str, stage: int, kind: str, tmp_path: Path
) -> None:
    from transformers import TrainerState, get_constant_schedule  # here: it takes as long as collecting a third of all

    folder, out, file = tmp_path / "checkpoint-3", tmp_path / "out", tmp_path / "ds.json"
    import_deepspeed(DATA / case, folder)
    TrainerState(global_step=3, max_steps=6, train_batch_size=2).save_to_json(str(folder / "trainer_state.json"))
    schedule = get_constant_schedule(torch.optim.AdamW(groups_of(Model()), lr=2e-3))
    torch.save({**schedule.state_dict(), "last_epoch": 3}, folder / "scheduler.pt")
    bf16 = CASES[case].get("dtype") == "bf16"
    content = {**AUTO, "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    file.write_text(json.dumps({**content, "bf16": {"enabled": "auto"}}))
    out.mkdir()
    script = str(SCRIPTS / "resumed.py")
    run_deepspeed(script, kind, str(folder), str(file), str(out), *(["--bf16"] if bf16 else []), ranks=2)
    found, expected = torch.load(out / "masters.pt"), goes_on(case, 3)
    assert_same(found, expected)
    before = load_file(DATA / case / "expected.safetensors")
    assert all(not torch.equal(each, before[f"{name} master"]) for name, each in found.items())
