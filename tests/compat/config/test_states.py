"""The format of the optimizer's states in a configuration: our own keys, DeepSpeed's, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from longshore.engine.config import Config, ConfigError, LoadedConfig, load_config

STATES = "zero_optimization.offload_optimizer.states"
BF16, FP32 = "bf16.bf16_optimizer_states", "optimizer.params.fp32_optimizer_states"


def load(states: str | None = None, bf16: Any = None, fp32: Any = None, kind: str = "AdamW", **more: Any) -> Any:
    """A file with these keys, which otherwise says nothing."""
    offload = {} if states is None else {"states": states}
    params: dict[str, Any] = {} if fp32 is None else {"fp32_optimizer_states": fp32}
    params |= {"ns_method": "standard"} if kind == "Muon" else {}
    section: dict[str, Any] = {
        "check_grad_overflow": False,
        **({} if bf16 is None else {"bf16_optimizer_states": bf16}),
    }
    return load_config(
        {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": kind, "params": params},
            "zero_optimization": {"offload_optimizer": {**offload, **more}},
            "bf16": section,
        }
    )


def refusal(*given: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*given, **more)
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_own_keys(states: str, device: str) -> None:
    seed = 0 if states == "fp32" else 7
    config, notes = load(states, device=device, states_seed=seed)
    assert (config.states, config.states_seed, config.offload_device, notes) == (states, seed, device, ())
    assert (Config().states, Config().states_seed) == ("fp32", 0)


def test_other_formats_and_seeds() -> None:
    formats = 'must be one of "fp32", "bf16", "8bit"'
    assert f'{STATES} = "fp16": {formats}' in refusal("fp16")
    assert "states_seed = 1.5: must be an integer" in refusal("bf16", states_seed=1.5)
    with pytest.raises(ConfigError, match=f"states = 8: {formats}"):
        Config(states=8)  # type: ignore[arg-type]


def test_a_seed_of_states_that_are_not_rounded() -> None:
    what = "is the seed of the rounding that states bf16 and 8bit do, and states is fp32, which rounds nothing"
    for given in ((), ("fp32",), (None, None, True)):
        assert f"states_seed = 7: {what}" in refusal(*given, states_seed=7)
    with pytest.raises(ConfigError, match=f"states_seed 7 {what}"):
        Config(states_seed=7)
    for given in (("8bit",), (None, True), (None, None, False)):
        assert load(*given, states_seed=7).config.states_seed == 7


def said(loaded: LoadedConfig) -> str:
    assert loaded.config.states == "bf16" and "fp32_optimizer_states" not in loaded.config.optimizer.arguments()
    (note,) = loaded.notes
    return note


def test_deepspeeds_keys_mean_bf16_with_a_note() -> None:
    """DeepSpeed's flag of the optimizer says only that moments have the dtype of its masters."""
    rounded = f"is read as {STATES} bf16, which is rounded stochastically; DeepSpeed rounds to nearest"
    assert f"{BF16} {rounded}, by which a second moment with beta2 0.999 never decays" in said(load(bf16=True))
    own = said(load(fp32=False))
    assert FP32 in own and "gives them the dtype of the masters, and if that is bf16, rounds to nearest" in own
    assert said(load(bf16=True, fp32=False)).startswith(BF16)


def test_keys_that_agree_need_no_note() -> None:
    for given in (("bf16", True), ("bf16", True, False), ("bf16", False), ("8bit", None, False), ("fp32", False, True)):
        config, notes = load(*given)
        assert (config.states, notes) == (given[0], ())
    assert load(bf16=False, fp32=True) == load(bf16="auto", fp32="auto") == load()


@pytest.mark.parametrize(
    ("states", "bf16", "fp32", "path", "other"),
    [
        ("fp32", True, None, f"{BF16} = true", f"{STATES}, by which states are fp32"),
        ("8bit", True, None, f"{BF16} = true", f"{STATES}, by which states are 8bit"),
        ("bf16", None, True, f"{FP32} = true", f"{STATES}, by which states are bf16"),
        ("8bit", None, True, f"{FP32} = true", f"{STATES}, by which states are 8bit"),
        ("fp32", None, False, f"{FP32} = false", f"{STATES}, by which states are fp32"),
        (None, True, True, f"{FP32} = true", f"{BF16}, by which states are bf16"),
    ],
)
def test_contradictions_name_both_keys(states: Any, bf16: Any, fp32: Any, path: str, other: str) -> None:
    assert refusal(states, bf16, fp32) == f"{path}: must agree with {other}; change one, or leave one out"


def test_bf16_masters_are_refused_as_ever() -> None:
    """DeepSpeed reads the one key only together with the other."""
    with pytest.raises(ConfigError) as caught:
        load_config(
            {"train_batch_size": 8, "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        )
    (problem,) = caught.value.problems
    assert problem.path == "bf16.bf16_master_weights_and_grads"
    assert "masters are float32 always; leave it out: bf16_optimizer_states is read without it" in problem.what


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion", "Adagrad", "SGD"])
def test_optimizers_that_have_them(kind: str) -> None:
    params = {"momentum": 0.9} if kind == "SGD" else {}
    config = Config(states="8bit", optimizer={"type": kind, **params})  # type: ignore[arg-type]
    assert config.states == load("8bit", kind=kind).config.states == "8bit"


def test_an_optimizer_that_has_none_is_named_with_the_key() -> None:
    what = "is for Adagrad, AdamW, Adam, Lion, SGD, and the states of Muon are float32 always: leave it out, or use"
    assert f'{STATES} = "8bit": {what}' in refusal("8bit", kind="Muon")
    assert f"{BF16} = true: {what}" in refusal(bf16=True, kind="Muon")
    assert f"{FP32} = false: {what}" in refusal(fp32=False, kind="Muon")
    assert load("fp32", kind="Muon").config.states == "fp32"
    with pytest.raises(ConfigError, match=f"states bf16 {what}"):
        Config(states="bf16", optimizer={"type": "Muon"})  # type: ignore[arg-type]
