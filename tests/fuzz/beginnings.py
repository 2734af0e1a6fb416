"""How programs begin: the settings, the model, the optimizer or the engine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from fuzz.vocabulary import Facts
from fuzz.worlds import CLIENTS

_STATES: dict[str, tuple[str, ...]] = {
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


def scripts(dice: random.Random, engine: bool) -> tuple[Facts, list[str]]:
    return _engine(dice) if engine else _script(dice)


def states(dice: random.Random, engine: bool) -> tuple[Facts, list[str]]:
    """A script with encoded states."""
    while True:
        facts, lines = scripts(dice, engine)
        if facts.kind in ("AdamW", "Adam", "Lion", "Adagrad", "SGD") and "client" not in facts.build:
            break
    encoded = [f"states={dice.choice(['bf16', '8bit'])!r}"]
    encoded += [f"states_seed={dice.choice([1, 7, 2**40])}"] if dice.random() < 0.5 else []
    if "odd=True" not in lines[1]:
        lines[1] = lines[1].replace("Net(", "Net(wide=True, ").replace(", )", ")")
    lines[0] = lines[0].replace("ours(", f"ours({', '.join(encoded)}, ").replace(", )", ")")
    return facts, lines


def muon(dice: random.Random, engine: bool) -> tuple[Facts, list[str]]:
    """A script with Muon."""
    facts, lines = scripts(dice, engine)
    lines[1] = lines[1].replace(", strided=True", "").replace("strided=True", "").replace("Net(, ", "Net(")
    options = {"lr": dice.choice([0.02, 0.1]), **({"momentum": 0.5} if dice.random() < 0.3 else {})}
    options.update({"nesterov": False} if dice.random() < 0.2 else {})
    options.update({"weight_decay": 0.0} if dice.random() < 0.3 else {})
    options.update({"adjust_lr_fn": "match_rms_adamw"} if dice.random() < 0.3 else {})
    odd = "odd=True" in lines[1]
    split = (
        dice.choice([", 'split': 3", ", 'split': [20, 13]"])
        if odd
        else dice.choice([", 'split': 2", ", 'split': [30, 34]"])
    )
    first = dice.random() < 0.5
    groups = [f"{{'params': [m.trunk.weight]{split}}}"] if first else []
    groups += [f"{{'params': [q for q in p if q.ndim == 2 and q.numel(){' and q is not m.trunk.weight' * first}]}}"]
    groups += ["{'params': [q for q in p if q.ndim != 2 or not q.numel()], 'use_muon': False, 'lr': 0.01}"]
    made = "".join([f"[{', '.join(groups)}]", *(f", {name}={value!r}" for name, value in options.items())])
    left_out = ("through torch",)
    if engine:
        common = lines[2].partition("'")[2]
        kept = [f", {name}" for name in ("clip=0.1", "clip=10.0", "accumulation=2", "accumulation=3") if name in common]
        lines[2] = f"e, o, p = engine(m, 'Muon', {made}{''.join(kept)})"
        return Facts(dice, facts.parameters, "Muon", ("momentum_buffer",), "", facts.alone, True, left_out), lines
    lines[2] = f"o = Muon({made})"
    return Facts(dice, facts.parameters, "Muon", ("momentum_buffer",), f"Muon({made})", left_out=left_out), lines


def _script(dice: random.Random) -> tuple[Facts, list[str]]:
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
    settings = ", ".join(f"{key}={value!r}" for key, value in settings_of(dice).items())
    lines = [f"ours({settings})", f"m = Net({', '.join(shown)})\np = list(m.parameters())", f"o = {build}"]
    states = _STATES[kind] if kind != "SGD" or "momentum" in build else ()
    return Facts(dice, parameters, kind, states, build), lines


def _engine(dice: random.Random) -> tuple[Facts, list[str]]:
    stage = dice.choice([0, 1, 2, 3])
    net = {"dtype": dice.choice(["fp32", "fp32", "bf16", "fp16"]), "odd": stage < 3 and dice.random() < 0.4}
    kind = dice.choice(["AdamW", "AdamW", "Adam", "SGD", "Lion", "Adagrad"])
    parameters = 7 + net["odd"]
    settings = {key: value for key, value in settings_of(dice).items() if key not in ("release_gradients", "ratio")}
    settings = {"stage": stage, **settings, **({"bucket": dice.choice([40, 1100])} if dice.random() < 0.5 else {})}
    options = {key: value for key, value in options_of(dice, kind).items() if key != "initial_accumulator_value"}
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
    return Facts(dice, parameters, kind, _STATES[kind], "", stage < 3, engine=True), lines


def settings_of(dice: random.Random) -> dict[str, Any]:
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
    if "release_gradients" in settings and dice.random() < 0.6:
        settings["accumulate"] = dice.choice(["device", "device", "host"])
    return settings


def _build(dice: random.Random, kind: str, parameters: int) -> str:
    options = options_of(dice, kind)
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


def options_of(dice: random.Random, kind: str) -> dict[str, Any]:
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


def device(dice: random.Random, engine: bool) -> tuple[Facts, list[str]]:
    """A script whose model is on the accelerator."""
    facts, lines = scripts(dice, engine)
    lines[0] = re.sub(r"(, )?(simulated|ratio)=[\d.]+", "", lines[0]).replace("ours(, ", "ours(")
    lines[1] = re.sub(r"^m = (.*)", r"m = placed(\1)", lines[1], count=1)
    facts.left_out += ("scaler", "through torch", "numpy", "torch's norm", "state", "state edits")
    return facts, lines


# -- streamed models ------------------------------------------------------------------------------


class StreamFacts(Facts):
    """Of a program whose model is a ``Blocks``."""

    def inputs(self) -> str:
        orders = ["", "", "", ", (1, 0)", ", (2,)", ", (0, 1, 1, 3)", ", (3, 2, 1, 0)", ", (0, 1, 2, 3), 0"]
        return self.dice.choice(orders)

    def call(self) -> str:
        return f"{'e' if self.engine else 'm'}({self.seed()}{' + rank' if self.engine else ''}{self.inputs()})"

    def loss(self) -> str:
        one = f"m({self.seed()}{self.inputs()})"
        return self.dice.choice([one, one, one, f"({one} + m({self.seed()}{self.inputs()}))", f"({one} * 1e3)"])

    def module(self) -> str:
        return f"m.blocks[{self.dice.randrange(4)}]"

    def inner(self) -> str:
        inner = f"list(m.blocks[{self.dice.randrange(4)}].modules())[-1]"
        return self.dice.choice([inner, inner, "m.heads[1]", "m.embedding"])


def streams(dice: random.Random, engine: bool) -> tuple[Facts, list[str]]:
    of = dice.choice(["Layer", "Layer", "Gate", "Attention", "Nested"])
    net = {
        "dtype": dice.choice(["fp32", "fp32", "bf16"]),
        "of": of,
        "tied": dice.random() < 0.3,
        "dropout": 0.2 if dice.random() < 0.2 else 0.0,
        "inside": dice.choice(["", "", "", "torch", "reentrant", "host"]),
        "unscaled": engine,
    }
    if net["dropout"] and net["dtype"] == "bf16":
        net["dtype"] = "fp32"  # whose backward has the same bits on the CPU
    in_block = {"Layer": 5, "Gate": 3, "Attention": 5, "Nested": 7}[of]
    parameters = 5 + 4 * in_block - net["tied"] * (1 + (of in ("Layer", "Gate")))
    if engine and net["inside"] == "reentrant":  # a backward for each block, which would be a round of its own
        net["inside"] = "torch"
    shown = [f"{key}={value!r}" for key, value in net.items() if value and value not in ("fp32", "Layer")]
    model = f"m = Blocks({', '.join(shown)})\np = list(m.parameters())"
    settings = settings_of(dice)
    settings.pop("simulated", None)
    settings.pop("ratio", None)
    kind = dice.choice(["AdamW", "AdamW", "AdamW", "SGD", "Lion", "Adagrad", *CLIENTS])
    if engine:
        kind = kind if kind in ("AdamW", "SGD", "Lion", "Adagrad") else "AdamW"
        settings.pop("release_gradients", None)
        units = dice.choice([150, (of,), "auto"])
        settings = {"stage": 3, "param_device": "cpu", "wrap_policy": units, **settings}
        options = options_of(dice, kind)
        options.pop("initial_accumulator_value", None)
        options.update({"accumulation": 2} if dice.random() < 0.3 else {})
        options.update({"clip": 0.1} if dice.random() < 0.3 else {})
        common = "".join(f", {key}={value!r}" for key, value in options.items())
        lines = [f"ours({listed(settings)})", model, f"e, o, p = engine(m, {kind!r}, p{common})"]
        return StreamFacts(
            dice, parameters, kind, _STATES[kind], "", False, True, ("engine heads", "engine idle")
        ), lines
    options = {"checkpoint": dice.choice([True, "cpu"])} if not net["inside"] and dice.random() < 0.5 else {}
    options |= {"blocks": dice.choice([150, [of]])} if dice.random() < 0.3 or of == "Nested" else {}
    model += "".join(["\nm = streamed(m", *(f", {key}={value!r}" for key, value in options.items()), ")"])
    if dice.random() < 0.25:
        kind = dice.choice(["AdamW", "Adam", "SGD", "NAdam", "Adagrad"])
        common = "".join(f", {key}={value!r}" for key, value in options_of(dice, kind).items())
        build = f"theirs({kind!r}, p{common})"
        left_out = ("clipping", "members", "state", "state edits", "saving", "stream scaler")
        return StreamFacts(dice, parameters, kind, (), build, left_out=left_out), [model, f"o = {build}"]
    build = _build(dice, kind, parameters)
    states = _STATES[kind] if kind != "SGD" or "momentum" in build else ()
    return StreamFacts(dice, parameters, kind, states, build), [f"ours({listed(settings)})", model, f"o = {build}"]


def listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


BEGINNINGS: dict[str, Callable[[random.Random, bool], tuple[Facts, list[str]]]] = {
    each.__name__: each for each in (scripts, states, muon, streams, device)
}
"""By vocabulary; the second argument says whether the program is one of an engine."""
