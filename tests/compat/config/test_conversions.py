"""Values that DeepSpeed converts, and keys that it ignores."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from longshore.engine.config import ConfigError, load_config

BATCH = {"train_batch_size": 1, "gradient_clipping": 0.0}


def section(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: section(rest, value) if rest else value}


def notes(data: dict[str, Any]) -> list[str]:
    return list(load_config({**BATCH, **data}).notes)


@pytest.mark.parametrize("value", [1, 1.0, "1", "true", "True", "yes", "on", " TRUE "])
def test_booleans(value: Any) -> None:
    loaded = load_config({**BATCH, "wall_clock_breakdown": value, "prescale_gradients": 0})
    assert loaded.config.wall_clock_breakdown is True and loaded.config.prescale_gradients is False
    (note,) = loaded.notes
    assert note.startswith("longshore reads these as true or false") and "prescale_gradients = 0 is false" in note
    assert re.search(r"wall_clock_breakdown = \S.* is true", note)


@pytest.mark.parametrize(
    ("path", "value", "field", "read"),
    [
        ("train_batch_size", "4", "train_batch_size", 4),
        ("gradient_clipping", "0.5", "gradient_clipping", 0.5),
        ("steps_per_print", "inf", "steps_per_print", None),
        ("zero_optimization.stage", "2", "stage", 2),
        ("zero_optimization.reduce_bucket_size", "5e8", "reduce_bucket_numel", 500_000_000),
        ("longshore.cpu_set", ["0", 1], "cpu_set", (0, 1)),
        ("longshore.wrap_policy", "100", "wrap_policy", 100),
    ],
)
def test_numbers(path: str, value: Any, field: str, read: Any) -> None:
    data: dict[str, Any] = {**BATCH, **section(path, value)}
    if "wrap_policy" in path:
        data["zero_optimization"] = {"stage": 3}
    loaded = load_config(data)
    assert getattr(loaded.config, field) == read
    (note,) = loaded.notes
    assert note.startswith("longshore reads these strings as numbers") and f"{path} = " in note


def test_parameters_of_optimizers_and_schedules() -> None:
    params = {"lr": "1e-3", "betas": ["0.8", 0.9], "adam_w_mode": "false"}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}
    data = {**BATCH, "optimizer": {"type": "Adam", "params": params}, "scheduler": schedule}
    loaded = load_config(data)
    assert loaded.config.optimizer is not None and loaded.config.scheduler is not None
    assert loaded.config.optimizer.type == "Adam" and loaded.config.optimizer.arguments()["betas"] == (0.8, 0.9)
    assert loaded.config.optimizer.arguments()["lr"] == 1e-3
    assert loaded.config.scheduler.arguments()["warmup_num_steps"] == 10
    assert len(loaded.notes) == 2  # one for each kind
    names = "lr", "betas", "warmup_num_steps"
    assert all(f".{name} = " in " ".join(loaded.notes) for name in (*names, "adam_w_mode"))


@pytest.mark.parametrize(
    "data",
    [
        {"wall_clock_breakdown": 2},
        {"wall_clock_breakdown": "maybe"},
        {"wall_clock_breakdown": 0.5},
        {"wall_clock_breakdown": []},
        {"train_batch_size": "four"},
        {"train_batch_size": "1.5"},
        {"train_batch_size": "0"},
        {"train_batch_size": True},
        {"gradient_clipping": "nan"},
        {"zero_optimization": {"stage": "4"}},
        {"zero_optimization": {"stage": True}},
        {"log_level": 1},
    ],
)
def test_what_stands_for_nothing_stays_an_error(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be (true or false|an integer|a number|one of|a string)"):
        load_config({**BATCH, **data})


def test_what_is_refused_stays_refused_however_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r'sparse_gradients = "true": is not supported'):
        load_config({**BATCH, "sparse_gradients": "true"})
    with pytest.raises(ConfigError, match=r"autotuning = .* is not supported"):
        load_config({**BATCH, "autotuning": {"enabled": 1}})
    assert notes({"autotuning": {"enabled": 0}, "amp": {"enabled": "false"}}) == []
    assert len(notes({"sparse_gradients": "false"})) == 1


def test_values_that_need_no_conversion_are_not_noted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert notes({"wall_clock_breakdown": True, "zero_optimization": {"reduce_bucket_size": 5e8}}) == []


# -- unknown keys ------------------------------------------------------------------


def test_unknown_keys_are_errors_and_with_a_variable_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"gradient_clippin": 1.0, "my_tool": {"a": 1}}
    with pytest.raises(ConfigError, match='did you mean "gradient_clipping"'):
        notes(data)
    monkeypatch.setenv("LONGSHORE_UNKNOWN_KEYS", "warn")
    found = notes(data)
    assert len(found) == 2 and all("is ignored, as LONGSHORE_UNKNOWN_KEYS=warn asks" in note for note in found)
    assert 'did you mean "gradient_clipping"?' in found[0] and '"my_tool" is not a key' in found[1]
    for value in ("", "error"):
        monkeypatch.setenv("LONGSHORE_UNKNOWN_KEYS", value)
        with pytest.raises(ConfigError, match="2 problems"):
            notes(data)


def test_in_sections_unknown_keys_are_errors_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in DeepSpeed."""
    monkeypatch.setenv("LONGSHORE_UNKNOWN_KEYS", "warn")
    with pytest.raises(ConfigError, match=r"zero_optimization\.stag = 1: .*did you mean"):
        notes({"zero_optimization": {"stag": 1}})
    with pytest.raises(ConfigError, match=r"is not a key of optimizer\.params"):
        notes({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}})


def test_the_variable_has_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_UNKNOWN_KEYS", "ignore")
    with pytest.raises(ValueError, match="LONGSHORE_UNKNOWN_KEYS must be warn or error, and is 'ignore'"):
        notes({"my_tool": 1})
