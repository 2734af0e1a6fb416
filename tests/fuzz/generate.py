"""A random program of a seed: how the optimizer is built, and what a script does with it."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from fuzz.vocabulary import WORDS, Facts
from fuzz.worlds import CLIENTS

_STATES = {
    **dict.fromkeys(("AdamW", "Adam", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    "Adagrad": ("sum",),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "ASGD": ("ax",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
}

_FAIL_IN_TORCH = {
    # It makes its states in the constructor only; longshore's has none before the first step.
    "Adagrad": (
        "del o.state",
        "state.pop",
        "state.clear",
        "in o.state",
        "['state'][0]",
        "params'].pop()",
        "sd = o.state",
    ),
    "RMSprop": ("OneCycleLR", "momentum"),  # it has no buffer where momentum comes later
}


def program_of(seed: int, without: Collection[str] = (), engine: bool = False) -> list[str]:
    """The statements of the seed; ``without``: sets of words that are not used; ``engine``: a program of an engine."""
    dice = random.Random(seed)
    facts, lines = _engine(dice) if engine else _beginning(dice)
    always, step = ("engine", "e.step()") if engine else ("training", "o.step()")
    words = [each for each in WORDS if each.of not in without and each.of.startswith("engine") is engine]
    # Scripts of one kind use few sets of words, often: more of what they do meets.
    sets = sorted({each.of for each in words} - {always})
    chosen = {always, *dice.sample(sets, min(len(sets), dice.choice([1, 2, 2, 3, 4, len(sets)])))}
    words = [each for each in words if each.of in chosen]
    weights = [each.weight * (0.4 if each.of == always else 1) for each in words]
    for _ in range(dice.choice([4, 8, 12, 20, 30])):
        if dice.random() < 0.35:
            loss = f"e({facts.seed()} + rank)" if engine else facts.loss()
            backward = f"e.backward({loss})" if engine else f"{loss}.backward()"
            lines += [backward] * dice.choice([1, 1, 2])
            lines += _any(facts, words, weights) if dice.random() < 0.5 else []
            lines += [step, *(["o.zero_grad()"] if dice.random() < 0.7 and not engine else [])]
        else:
            lines += _any(facts, words, weights)
    return [*lines, "e.backward(e(0))" if engine else "m(0).backward()", step]


def _any(facts: Facts, words: Any, weights: list[float]) -> list[str]:
    text = facts.dice.choices(words, weights)[0].write(facts)
    if not facts.alone and "nothing() if rank" in text.replace("if rank else nothing()", "nothing() if rank"):
        return []
    return text.split("\n\n") if text and not any(each in text for each in _FAIL_IN_TORCH.get(facts.kind, ())) else []


def _beginning(dice: random.Random) -> tuple[Facts, list[str]]:
    net = {
        "dtype": dice.choice(["fp32", "fp32", "fp32", "bf16", "bf16", "fp16", "mixed"]),
        "odd": dice.random() < 0.4,
        "tied": dice.random() < 0.2,
        "strided": dice.random() < 0.15,
    }
    kind = dice.choice(["AdamW"] * 5 + ["Adam", "SGD", "SGD", "Lion", "Adagrad"] + [dice.choice(CLIENTS)])
    parameters = 7 + net["odd"] - net["tied"]
    build = _build(dice, kind, parameters)
    shown = [f"{key}={value!r}" for key, value in net.items() if value and value != "fp32"]
    settings = ", ".join(f"{key}={value!r}" for key, value in _settings(dice).items())
    lines = [f"ours({settings})", f"m = Net({', '.join(shown)})\np = list(m.parameters())", f"o = {build}"]
    states = _STATES[kind] if kind != "SGD" or "momentum" in build else ()
    return Facts(dice, parameters, kind, states, build), lines


def _engine(dice: random.Random) -> tuple[Facts, list[str]]:
    stage = dice.choice([0, 1, 2, 3])
    net = {"dtype": dice.choice(["fp32", "fp32", "bf16", "fp16"]), "odd": stage < 3 and dice.random() < 0.4}
    kind = dice.choice(["AdamW", "AdamW", "Adam", "SGD", "Lion", "Adagrad"])
    parameters = 7 + net["odd"]
    settings = {key: value for key, value in _settings(dice).items() if key not in ("release_gradients", "ratio")}
    settings = {"stage": stage, **settings, **({"bucket": dice.choice([40, 1100])} if dice.random() < 0.5 else {})}
    options = {key: value for key, value in _options(dice, kind).items() if key != "initial_accumulator_value"}
    options.update({"clip": dice.choice([0.1, 10.0])} if dice.random() < 0.3 else {})
    options.update({"accumulation": dice.choice([2, 3])} if dice.random() < 0.4 else {})
    options.update({"schedule": True} if dice.random() < 0.2 else {})
    if dice.random() < (0.8 if net["dtype"] == "fp16" else 0.1):
        dynamic = {"initial_scale_power": 8, "window": dice.choice([1, 3]), "hysteresis": dice.choice([1, 2])}
        options["scaling"] = dice.choice([{"scale": 64.0}, dynamic, {**dynamic, "consecutive_hysteresis": True}])
    common = "".join(f", {key}={value!r}" for key, value in options.items())
    cut = dice.randrange(1, parameters)
    groups = dice.choice(["p", "p", f"[{{'params': p[:{cut}], 'weight_decay': 0.0}}, {{'params': p[{cut}:]}}]"])
    lines = [
        f"ours({', '.join(f'{key}={value!r}' for key, value in settings.items())})",
        f"m = Net({', '.join(f'{key}={value!r}' for key, value in net.items() if value)})\np = list(m.parameters())",
        f"e, o, p = engine(m, {kind!r}, {groups}{common})",
    ]
    return Facts(dice, parameters, kind, _STATES[kind], "", stage < 3), lines


def _settings(dice: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if dice.random() < 0.6:
        settings["release_gradients"] = True
        if dice.random() < 0.5:
            settings["speculation_memory"] = dice.choice(["100%", "50%", 4096, "auto"])
    if dice.random() < 0.7:
        settings["tile_numel"] = dice.choice([7, 50, 64, 300])
    if dice.random() < 0.5:
        settings["simulated"] = dice.randrange(100)
        if dice.random() < 0.3:
            settings["ratio"] = dice.choice([0.0, 0.3, 0.7])
    if dice.random() < 0.2:
        settings["threads"] = 2
    return settings


def _build(dice: random.Random, kind: str, parameters: int) -> str:
    options = _options(dice, kind)
    common = "".join(f", {key}={value!r}" for key, value in options.items())
    cut = dice.randrange(1, parameters)
    last = dice.choice([parameters, parameters, parameters - 1])
    groups = dice.choice(
        [
            "p",
            "p",
            "m.parameters()",
            f"p[:{cut}]",
            f"[{{'params': p[:{cut}]}}, {{'params': p[{cut}:{last}], 'lr': 0.003}}]",
            f"[{{'params': p[:{cut}], 'weight_decay': 0.0}}, {{'params': p[{cut}:]}}]",
            "m.named_parameters()",
        ]
    )
    if kind in CLIENTS:
        return f"client({kind!r}, {groups}{common})"
    return f"{kind}({groups}{common})"


def _options(dice: random.Random, kind: str) -> dict[str, Any]:
    def sometimes(**options: list[Any]) -> dict[str, Any]:
        return {key: dice.choice(values) for key, values in options.items() if dice.random() < 0.4}

    options = {"lr": dice.choice([0.01, 0.1, 0.003])}
    decay = sometimes(weight_decay=[0.1, 0.0])
    if kind in ("AdamW", "Adam"):
        return {
            **options,
            **decay,
            **sometimes(betas=[(0.8, 0.95), (0.3, 0.5), (0.0, 0.9)], eps=[1e-6], maximize=[True]),
        }
    if kind == "Lion":
        return {**options, **decay, **sometimes(betas=[(0.8, 0.95)], maximize=[True])}
    if kind == "SGD":
        found = sometimes(momentum=[0.9, 0.9, 0.5], maximize=[True])
        return {**options, **decay, **found, **(sometimes(nesterov=[True]) if "momentum" in found else {})}
    if kind == "Adagrad":
        return {**options, **decay, **sometimes(lr_decay=[0.1], initial_accumulator_value=[0.1], maximize=[True])}
    if kind == "RMSprop":
        return {**options, **decay, **sometimes(momentum=[0.9], centered=[True])}
    return options
