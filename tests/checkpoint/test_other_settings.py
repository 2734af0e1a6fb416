"""A run that goes on with other settings than it was saved with says which of them change its weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import longshore
from longshore.engine.config import AdamWConfig, LossScaling, WarmupLRConfig

OTHERS: list[dict[str, Any]] = [
    {"gradient_clipping": 0.5},
    {"autocast": "bf16"},
    {"dtype": "fp32", "cast_inputs": True},
    {"loss_scaling": LossScaling(scale=3.0)},
    {"scheduler": WarmupLRConfig(warmup_num_steps=7)},
]
BETWEEN: list[dict[str, Any]] = [
    {"communication_dtype": "bf16"},
    {"accumulation_dtype": "bf16"},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 3.0},
    {"stage": 2, "gradient_accumulation_steps": 2},
]


@contextmanager
def engine_with(settings: dict[str, Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    given = {"optimizer": AdamWConfig(), "scheduler": WarmupLRConfig(), "gradient_accumulation_steps": 1, **settings}
    engine = longshore.initialize(model=nn.Linear(5, 3), config=longshore.Config(**given)).engine
    try:
        yield engine
    finally:
        engine.destroy()


def saved(settings: dict[str, Any], folder: str) -> None:
    with engine_with(settings) as engine:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 5)).sum())
        engine.step()
        engine.save_checkpoint(folder)


def warned(settings: dict[str, Any], folder: str, **options: Any) -> list[str]:
    with engine_with(settings) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(folder, **options)[0] is not None
        return [str(each.message) for each in caught]


def each_between(folder: str) -> list[tuple[str, list[str], list[str]]]:
    """Returns what was said on this rank for each of ``BETWEEN``, and when nothing was changed."""
    found = []
    for place, settings in enumerate(BETWEEN):
        name, where = next(iter(settings)), f"{folder}/{place}"
        former = {key: value for key, value in settings.items() if key != name}
        saved(former, where)
        dist.barrier()
        found.append((name, warned(settings, where), warned(former, where)))
    return found


def raw_backwards(folder: str) -> list[list[str]]:
    """Returns what another stage is told after windows of one and of two plain ``loss.backward()``, at once and after
    the run went on at its own stage."""
    found = []
    for backwards in (1, 2):
        with engine_with({"stage": 1}) as engine:
            for _ in range(backwards):
                engine(torch.ones(2, 5)).sum().backward()
            engine.step()
            engine.save_checkpoint(f"{folder}/{backwards}")
        found.append(warned({"stage": 2}, f"{folder}/{backwards}"))
        with engine_with({"stage": 0}) as engine:
            engine.load_checkpoint(f"{folder}/{backwards}")
            engine(torch.ones(2, 5)).sum().backward()
            engine.step()
            engine.save_checkpoint(f"{folder}/{backwards} on")
        found.append(warned({"stage": 2}, f"{folder}/{backwards} on"))
    return found


@pytest.mark.parametrize("settings", OTHERS, ids=lambda settings: list(settings)[-1])
def test_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    saved({}, str(tmp_path))
    name = list(settings)[-1]
    (said,) = warned(settings, str(tmp_path))
    assert "was saved with other settings, and the weights will be those of neither run: " in said
    assert f": {name} " in said and " there, " in said and ";" not in said
    assert warned(settings, str(tmp_path), load_module_only=True) == []
    if name == "scheduler":
        assert warned(settings, str(tmp_path), load_lr_scheduler_states=False) == []


def test_all_are_named_at_once(tmp_path: Path) -> None:
    saved({"gradient_clipping": 1.0}, str(tmp_path))
    (said,) = warned({"gradient_clipping": 0.5, "autocast": "bf16"}, str(tmp_path))
    assert "gradient_clipping 1.0 there, 0.5 here" in said and 'autocast null there, "bf16" here' in said


def test_the_accumulation_steps_are_those_of_this_run(tmp_path: Path) -> None:
    """As those of every other setting; the saved run's replaced them without a word."""
    backwards = "backwards a step (ranks times gradient_accumulation_steps)"
    for ranks, steps, said in (
        (1, 1, None),
        (1, 2, "gradient_accumulation_steps 1 there, 2 here"),
        (2, 2, None),
        (2, 1, f"{backwards} 2 * 1 there, 1 * 1 here"),
    ):
        folder = tmp_path / f"{ranks} {steps}"
        saved({}, str(folder))
        _as_if_saved_by(ranks, folder)
        with engine_with({"gradient_accumulation_steps": steps}) as engine, warnings.catch_warnings(record=True) as all:
            warnings.simplefilter("always")
            engine.load_checkpoint(folder)
            assert engine.gradient_accumulation_steps() == steps
        texts = [str(each.message) for each in all if "other settings" in str(each.message)]
        assert len(texts) == (said is not None)
        assert said is None or f": {said}." in texts[0]


def _as_if_saved_by(ranks: int, root: Path) -> None:
    from checkpoint.test_hostile import rehash

    folder = next(path for path in root.iterdir() if path.is_dir())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(files["manifest.json"])
    manifest["world_size"] = ranks
    files["manifest.json"] = json.dumps(manifest).encode()
    rehash(files)
    for name, text in files.items():
        (folder / name).write_bytes(text)


def test_settings_that_change_no_bit(tmp_path: Path) -> None:
    saved({}, str(tmp_path))
    speed = {"offload_device": "cpu", "tile_numel": 3, "threads": 1, "stage": 3, "communication_dtype": "bf16"}
    assert warned(speed, str(tmp_path)) == []  # one rank sends nothing


@pytest.mark.medium
def test_between_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(each_between, str(tmp_path))
    for name, said, unchanged in first:
        assert len(said) == 1 and f" {name} " in said[0] and ";" not in said[0], (name, said)
        assert unchanged == []
    assert [said for _, said, _ in second] == [[]] * len(BETWEEN)  # rank 0 speaks


@pytest.mark.medium
def test_another_stage_after_several_plain_backwards(two_ranks: Ranks, tmp_path: Path) -> None:
    """No setting says how many there were."""
    once, once_on, twice, twice_on = two_ranks(raw_backwards, str(tmp_path))[0]
    assert once == once_on == []
    for (said,) in (twice, twice_on):
        assert "stage 0 or 1 there, 2 or 3 here" in said, said


def test_checkpoints_of_older_versions_load_as_before(tmp_path: Path) -> None:
    from checkpoint.test_hostile import rehash

    saved({}, str(tmp_path))
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    content = json.loads(files["state.json"])
    del content["engine"]["decisive"]
    files["state.json"] = json.dumps(content).encode()
    rehash(files)
    for name, text in files.items():
        (folder / name).write_bytes(text)
    assert warned({"gradient_clipping": 0.5}, str(tmp_path)) == []
