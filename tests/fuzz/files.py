"""Configuration files: valid ones, and the same with mistakes, which are refused or train as what they say."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch
from torch import nn

_OPTIMIZERS: dict[str, dict[str, list[Any]]] = {
    "AdamW": {"betas": [[0.8, 0.95], [0.9, 0.999]], "eps": [1e-6, 1e-8], "maximize": [True], "adam_w_mode": [True]},
    "Adam": {"betas": [[0.8, 0.95]], "eps": [1e-6], "adam_w_mode": [True, False], "maximize": [False]},
    "SGD": {"momentum": [0.9, 0.5], "nesterov": [False], "maximize": [True]},
    "Lion": {"betas": [[0.8, 0.95]]},
    "Adagrad": {"eps": [1e-6], "lr_decay": [0.1]},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "maximize": False},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "lr_decay": 0.0},
}
_NO_EFFECT: dict[str, dict[str, list[Any]]] = {
    "": {"steps_per_print": [100000], "zero_allow_untested_optimizer": [True], "prescale_gradients": [False]},
    "zero_optimization": {
        "contiguous_gradients": [True, False],
        "overlap_comm": [True, False],
        "reduce_bucket_size": [60, 5e8],
        "allgather_bucket_size": [60, 200000],
        "sub_group_size": [1e9],
        "stage3_max_live_parameters": [1e9],
    },
    "zero_optimization.offload_optimizer": {"pin_memory": [True], "super_offload": [True, False]},
}
_MISTAKES = [
    *(None, True, False, "auto", -1, 0, 1, 2, 3.7, 1e308, float("nan"), float("inf"), "", "5", "true", "cpu", "none"),
    *([], {}, [0.9], [[0.9, 0.99]], {"enabled": True}, 10**30, "1e-2", "bf16", 0.5, "AdamW", "off"),
]


def config_file(dice: random.Random, ranks: int) -> list[str]:
    """A program whose engine is made from a file."""
    world = dice.choice([1, ranks])
    config = _valid(dice, world)
    mistakes = dice.choice([0, 0, 1, 1, 1, 2, 3])
    for _ in range(mistakes):
        _mistaken(dice, config)
    text = json.dumps(config)
    if mistakes and dice.random() < 0.15:
        place = dice.randrange(len(text))
        text = text[:place] + dice.choice(["", "", "{", "}", '"', ",", "1", " "]) + text[place + 1 :]
    lines = [f"ranks({world})", "m = Net()\np = list(m.parameters())"]
    lines += [f"e, o, p = initialized(m, {text!r}{', valid=True' * (not mistakes)})"]
    for _ in range(dice.choice([2, 3, 4])):
        loss = f"e({dice.randrange(10)} + rank)" + dice.choice(["", "", "", " * 1e4", " * float('inf')"])
        lines += [f"e.backward({loss})"] * dice.choice([1, 1, 2]) + ["e.step()"]
    return lines


def _valid(dice: random.Random, world: int) -> dict[str, Any]:
    def sometimes(choices: dict[str, list[Any]], chance: float = 0.3) -> dict[str, Any]:
        return {name: dice.choice(values) for name, values in choices.items() if dice.random() < chance}

    name = dice.choice(list(_OPTIMIZERS))
    steps, micro = dice.choice([1, 1, 2]), 3
    counts = {"gradient_accumulation_steps": steps, "train_micro_batch_size_per_gpu": micro}
    counts["train_batch_size"] = steps * micro * world
    left_out = dice.choice([None, *counts])
    params = {"lr": dice.choice([0.01, 0.1, 0.003]), **sometimes({"weight_decay": [0.1, 0.0]}, 0.5)}
    offload = {"device": dice.choice(["cpu", "cpu", "none"]), **sometimes({"states": ["bf16", "8bit", "fp32"]}, 0.2)}
    offload |= sometimes(_NO_EFFECT["zero_optimization.offload_optimizer"]) if offload["device"] == "cpu" else {}
    zero = {"stage": dice.choice([0, 1, 2, 3]), "offload_optimizer": offload}
    dynamic = {"initial_scale_power": [4, 8], "loss_scale_window": [1, 3], "hysteresis": [1, 2]}
    precision = {
        "bf16": {"enabled": True, **sometimes({"check_grad_overflow": [True, False]})},
        "fp16": {"enabled": True, **sometimes({**dynamic, "loss_scale": [0, 64.0], "min_loss_scale": [1, 2.0]}, 0.5)},
    }
    chosen = dice.choice(["", "", "bf16", "bf16", "fp16"])
    return {
        **{key: value for key, value in counts.items() if key != left_out},
        "optimizer": {"type": dice.choice([name, name.lower()]), "params": {**params, **sometimes(_OPTIMIZERS[name])}},
        "zero_optimization": {**zero, **sometimes(_NO_EFFECT["zero_optimization"])},
        **sometimes({"gradient_clipping": [0.1, 0, 1.0]}, 0.6),
        **({chosen: precision[chosen]} if chosen else {}),
        **sometimes(_NO_EFFECT[""]),
    }


def _mistake(dice: random.Random) -> Any:
    return copy.deepcopy(dice.choice(_MISTAKES))  # one that is a section may get a mistake of its own, and be itself


def _mistaken(dice: random.Random, config: dict[str, Any]) -> None:
    """Make one mistake somewhere."""
    sections = [config]
    for each in sections:
        sections += [value for value in each.values() if isinstance(value, dict)]
    section = dice.choice(sections)
    if not section:
        section[dice.choice(["enabled", "stage", "lr"])] = _mistake(dice)
        return
    key = dice.choice(list(section))
    kind = dice.choice(["value"] * 5 + ["left out", "misspelt", "moved", "more"])
    if kind == "value":
        section[key] = _mistake(dice)
    elif kind == "left out":
        del section[key]
    elif kind == "misspelt":
        place = dice.randrange(len(key) or 1)
        section[dice.choice([key[:place] + key[place + 1 :], key.upper(), f"{key}s", f" {key}"])] = section.pop(key)
    elif kind == "moved":
        dice.choice(sections)[key] = section.pop(key) if section is not config else _mistake(dice)
    else:
        section[dice.choice(["fp16", "bf16", "stage", "enabled", "device", "lr", "amp", "ratio"])] = _mistake(dice)


class Refused(ValueError):
    """A configuration with a mistake, refused by name."""


class Unreadable(ValueError):
    """A configuration of which plain PyTorch's side cannot say what it means."""


class Said:
    """What a file says, by docs/deepspeed_config.md.

    Attributes:
        settings: as ``ours()`` takes them.
        kind: the optimizer's name.
        options: as the plain engine takes them.
        dtype: of the parameters; None: as they are.
    """

    def __init__(self, text: str, world_size: int) -> None:
        top = _Section("", json.loads(_without_last_commas(text), object_pairs_hook=_once))
        zero, optimizer = top.section("zero_optimization", true={"stage": 1}), top.section("optimizer")
        offload, params = zero.section("offload_optimizer"), optimizer.section("params")
        fp16, bf16, amp = top.section("fp16"), top.section("bf16"), top.section("amp")
        if amp.switch("enabled", False):
            raise Unreadable("apex is not there")
        self.settings = {"stage": zero.number("stage", 0, whole=True)}
        states = offload.word("states", "fp32")
        if states != "fp32":
            self.settings["states"] = states
        offload.word("device", "none")
        self.kind, self.options = _optimizer(optimizer, params)
        self.options["accumulation"] = _accumulation(top, world_size)
        clip = top.number("gradient_clipping", 1.0)
        self.options.update({"clip": clip} if clip else {})
        halves = [each for each in (fp16, bf16) if each.switch("enabled", False)]
        if len(halves) == 2:
            raise Unreadable("two dtypes")
        self.dtype = None if not halves else torch.float16 if halves == [fp16] else torch.bfloat16
        if halves == [fp16]:
            self.options["scaling"] = _scaling(fp16)
        elif halves == [bf16] and bf16.switch("check_grad_overflow", False):
            self.options["scaling"] = {"scale": 1.0}
        for section, name in ((top, ""), (zero, "zero_optimization"), (offload, "zero_optimization.offload_optimizer")):
            section.take(_NO_EFFECT[name])
        fp16.take(("enabled", "loss_scale", "min_loss_scale", *_SCALING))
        bf16.take(("enabled", "check_grad_overflow"))
        for section in (top, zero, offload, optimizer, params, fp16, bf16, amp):
            section.end()

    def cast(self, model: nn.Module) -> None:
        if self.dtype is not None:
            model.to(self.dtype)


def _optimizer(section: _Section, params: _Section) -> tuple[str, dict[str, Any]]:
    names = {name.lower(): name for name in _OPTIMIZERS}
    kind = names.get(str(section.word("type", "")).lower())
    if kind is None:
        raise Unreadable("no such optimizer")
    adam = kind in ("Adam", "AdamW") and not params.switch("adam_w_mode", True) and kind == "Adam"
    defaults = {**_DEFAULTS["AdamW" if kind == "Adam" else kind], "weight_decay": 0.0}
    options: dict[str, Any] = {}
    for name, default in defaults.items():
        if name == "betas":
            options[name] = params.pair(name, default)
        else:
            options[name] = (params.switch if isinstance(default, bool) else params.number)(name, default)
    return "Adam" if adam else "AdamW" if kind == "Adam" else kind, options


def _accumulation(top: _Section, world_size: int) -> int:
    steps = top.number("gradient_accumulation_steps", None, whole=True)
    micro = top.number("train_micro_batch_size_per_gpu", None, whole=True)
    train = top.number("train_batch_size", None, whole=True)
    if train is None:
        return steps or 1
    if micro is None:
        micro = train / ((steps or 1) * world_size)
    if steps is None:
        steps = train / (micro * world_size)
    if steps < 1 or steps != int(steps) or micro != int(micro) or steps * micro * world_size != train:
        raise Unreadable("the batch numbers contradict each other")
    return int(steps)


_SCALING = {
    "initial_scale_power": ("initial_scale_power", 16),
    "loss_scale_window": ("window", 1000),
    "hysteresis": ("hysteresis", 2),
}


def _scaling(fp16: _Section) -> dict[str, Any]:
    least = fp16.number("min_loss_scale", 1.0)
    if scale := fp16.number("loss_scale", 0.0):
        return {"scale": scale}
    return {"min_scale": least, **{name: fp16.number(key, was, whole=True) for key, (name, was) in _SCALING.items()}}


class _Section:
    """A section that is read key by key; a key that nobody took is unknown."""

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise Unreadable(f"{name} is no section")
        self._name, self._values, self._taken = name, values, set[str]()

    def _value(self, key: str) -> Any:
        self._taken.add(key)
        value = self._values.get(key)
        return None if isinstance(value, str) and value == "auto" else value

    def section(self, key: str, true: dict[str, Any] | None = None) -> _Section:
        """``true``: what a section means that is just true; an error, unless it is given."""
        value = self._value(key)
        value = true if value is True and true is not None else value
        return _Section(key, {} if value is None or value is False else value)

    def take(self, keys: Any) -> None:
        self._taken.update(keys)

    def end(self) -> None:
        if unknown := [key for key in self._values if key not in self._taken and not key.startswith("_")]:
            raise Unreadable(f"unknown keys in {self._name}: {unknown}")

    def number(self, key: str, default: Any, whole: bool = False) -> Any:
        value = self._value(key)
        if value is None:
            return default
        return _number(value, whole)

    def switch(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is None:
            return default
        words = {
            "true": True,
            "on": True,
            "yes": True,
            "1": True,
            "false": False,
            "off": False,
            "no": False,
            "0": False,
        }
        if isinstance(value, (bool, int, float, str)) and str(value).lower() in words:
            return words[str(value).lower()]
        raise Unreadable(f"{key} is neither true nor false")

    def word(self, key: str, default: Any) -> Any:
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise Unreadable(f"{key} is no word")
        return default if value is None else value

    def pair(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) != 2:
            raise Unreadable(f"{key} are two numbers")
        return _number(value[0]), _number(value[1])


def _number(value: Any, whole: bool = False) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Unreadable(f"{value!r} is no number")
    try:
        found = float(value) if isinstance(value, str) else value
        if whole and found != int(found):
            raise Unreadable(f"{value!r} is not whole")
        return int(found) if whole else float(found)
    except (ValueError, OverflowError) as error:
        raise Unreadable(f"{value!r} is no number") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise Unreadable("a key is there twice")
    return dict(pairs)


def _without_last_commas(text: str) -> str:
    """Commas after the last entry are read over."""
    for closing in "}]":
        for between in ("", " "):
            text = text.replace(f",{between}{closing}", closing)
    return text
