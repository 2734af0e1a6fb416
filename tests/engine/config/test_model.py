"""Our own Config."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import get_args

import pytest

from longshore.engine.config import AdamWConfig, Config, ConfigError, LossScaling, WarmupCosineLRConfig
from longshore.engine.config.model import StatesName
from longshore.layout.formats import StateFormat


def test_defaults_are_the_safe_ones() -> None:
    config = Config()
    assert config.gradient_clipping is None and config.loss_scaling is None and config.communication_dtype is None
    assert config.accumulation_dtype == "fp32"
    assert Config(dtype="fp16").loss_scaling == LossScaling() == Config(autocast="half").loss_scaling
    assert Config(dtype="fp16", loss_scaling=None).loss_scaling is None


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().stage = 1  # type: ignore[misc]


def test_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(stage=4, offload_device="nvme", overlap_comm=1, reduce_bucket_numel="5", stagee=1, threads=0)  # type: ignore
    assert [problem.path for problem in caught.value.problems] == [
        "stagee", "stage", "offload_device", "reduce_bucket_numel", "overlap_comm", "threads"
    ]  # fmt: skip
    assert 'is not a field of Config; did you mean "stage"?' in str(caught.value)
    assert "must be one of 0, 1, 2" in str(caught.value)


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"dtype": "bf16", "autocast": "bf16"}, "choose one"),
        ({"cast_inputs": True}, "set dtype"),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, "leave one of them out"),
        ({"gradient_clipping": 0}, "must be a number above 0"),
        ({"train_batch_size": True}, "must be an integer of at least 1"),
        ({"cpu_set": [0, -1]}, "a list, each an integer of at least 0"),
        ({"optimizer": AdamWConfig}, "optimizer"),
        ({"gradient_clipping": float("inf")}, "must be a number above 0"),
    ],
)
def test_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Config(**fields)  # type: ignore[arg-type]


def test_loss_scaling() -> None:
    with pytest.raises(ConfigError, match="lower it, or raise initial_scale_power"):
        LossScaling(initial_scale_power=2, min_scale=8.0)
    assert LossScaling(scale=2.0, initial_scale_power=2, min_scale=8.0).scale == 2.0
    with pytest.raises(ConfigError, match="scale = 0: must be a number above 0"):
        LossScaling(scale=0)


def test_named() -> None:
    with pytest.raises(ConfigError, match="total_num_steps: is missing"):
        WarmupCosineLRConfig()  # type: ignore[call-arg]
    schedule = WarmupCosineLRConfig(total_num_steps=5, warmup_num_steps=2)
    config = Config(optimizer=AdamWConfig(betas=[0.8, 0.9]), scheduler=schedule)  # type: ignore
    assert config.optimizer is not None and config.optimizer.arguments()["betas"] == (0.8, 0.9)
    assert config.scheduler is not None and config.scheduler.arguments()["total_num_steps"] == 5


def test_pickles() -> None:
    """Spawned ranks get it so."""
    config = Config(dtype="fp16", optimizer=AdamWConfig())
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError) as caught:
        Config(stage=4)  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ConfigError) as missing:
        WarmupCosineLRConfig()  # type: ignore[call-arg]
    assert str(pickle.loads(pickle.dumps(missing.value))) == str(missing.value)


def test_the_configuration_is_made_without_torch() -> None:
    """The optimizers alone are read from their rules, which need it; a door has two names, which are read when used."""
    files = sorted((Path(__file__).parents[3] / "src" / "longshore" / "engine" / "config").glob("*.py"))
    assert {file.stem for file in files} >= {"base", "model", "optimizers", "schedulers", "values"}
    files += [files[0].parents[2] / name for name in ("byte_sizes.py", "layout/formats.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = {name for name in names if name.startswith(("torch", "longshore"))}
            inside = ["longshore.engine.config.", "longshore.byte_sizes", "longshore.layout.formats"]
            more = {
                "optimizers.py": ("longshore.optim.",),
                "__init__.py": ("longshore.compat.config.", "longshore.lazily"),
            }
            allowed = (*inside, *more.get(file.name, ()))
            assert not {name for name in outside if not name.startswith(allowed)}, file


def test_the_type_of_states_names_every_format() -> None:
    assert get_args(StatesName) == tuple(each.value for each in StateFormat)


def test_stepping_ahead_needs_the_state_on_the_host() -> None:
    with pytest.raises(ConfigError, match="offload_device is none; set it to cpu, or leave speculation_memory out"):
        Config(speculation_memory="auto")
    assert Config(speculation_memory="100%", offload_device="cpu").speculation_memory == "100%"
