"""Chains of checkpoints: a run goes on in another mode, on another number of ranks, with other tiles, ..."""

from __future__ import annotations

import random
from typing import Any

from fuzz.beginnings import listed, options_of, settings_of

_KINDS = ("AdamW", "AdamW", "Adam", "SGD", "Lion", "Adagrad")


def chain(dice: random.Random, ranks: int) -> list[str]:
    """A program of two to four links, each with a checkpoint of the one before."""
    kind = dice.choice(_KINDS)
    links = [_link(dice, ranks) for _ in range(dice.choice([2, 2, 3, 4]))]
    net: dict[str, Any] = {"dtype": dice.choice(["fp32", "bf16"]), "wide": dice.random() < 0.3}
    net["odd"] = not net["wide"] and all(stage != 3 for _, stage in links) and dice.random() < 0.4
    encoded = {"states": dice.choice(["bf16", "8bit"]), "states_seed": 3} if dice.random() < 0.3 else {}
    options = {name: value for name, value in options_of(dice, kind).items() if name != "initial_accumulator_value"}
    cut = dice.randrange(1, 7)
    groups = dice.choice(["n", "n", f"[{{'params': n[:{cut}], 'weight_decay': 0.0}}, {{'params': n[{cut}:]}}]"])
    made = "".join([repr(kind), f", {groups}", *(f", {name}={value!r}" for name, value in options.items())])
    lines: list[str] = []
    for number, (count, stage) in enumerate(links):
        by, optimizer = ("o", made.replace("'", "", 2).replace(", ", "(", 1)) if stage is None else ("e", made)
        by_state_dict = (
            number > 0 and dice.random() < 0.4 and all(map(_has_whole_states, links[number - 1 : number + 1]))
        )
        lines += [_STATES] if by_state_dict else [f"ranks({count})"]
        lines += [f"ours({listed(_settings(dice, stage, encoded))})", _model(net)]
        lines += [f"o = {optimizer})" if stage is None else f"e, o, p = engine(m, {optimizer}{_of_engine(dice)})"]
        if number:
            lines += _LOADED if by_state_dict else [f"take('{number - 1}', m, {by})"]
        lines += _training(dice, stage is not None, number)
        lines += [f"keep('{number}', m, {by})", *(_window(dice, stage is not None) if dice.random() < 0.3 else [])]
    return lines


_STATES, _LOADED = (
    "sd = through_file((m.state_dict(), o.state_dict()))",
    ["m.load_state_dict(sd[0])", "o.load_state_dict(sd[1])"],
)


def _has_whole_states(link: tuple[int, int | None]) -> bool:
    """Whether ``state_dict()`` has all of it."""
    return link[0] == 1 and link[1] != 3


def _link(dice: random.Random, ranks: int) -> tuple[int, int | None]:
    """The number of ranks, and the stage; None: an optimizer without an engine, on one rank."""
    count = dice.randrange(1, ranks + 1)
    return count, dice.choice([0, 1, 2, 3] if count > 1 else [None, None, 0, 1, 2, 3])


def _model(net: dict[str, Any]) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in net.items() if value and value != "fp32")
    return f"m = Net({shown})\np, n = list(m.parameters()), list(m.named_parameters())"


def _settings(dice: random.Random, stage: int | None, encoded: dict[str, Any]) -> dict[str, Any]:
    settings = {**settings_of(dice), **encoded}
    if stage is None:
        return settings
    settings = {name: value for name, value in settings.items() if name not in ("release_gradients", "ratio")}
    return {"stage": stage, **({"bucket": dice.choice([40, 1100])} if dice.random() < 0.5 else {}), **settings}


def _of_engine(dice: random.Random) -> str:
    return ", clip=0.1" if dice.random() < 0.2 else ", accumulation=2" if dice.random() < 0.2 else ""


def _window(dice: random.Random, engine: bool) -> list[str]:
    seed, backwards = dice.randrange(10), dice.choice([1, 1, 2])
    if engine:
        return [f"e.backward(e({seed} + rank))"] * backwards + ["e.step()"]
    clipped = ["clip(o, 0.1)"] if dice.random() < 0.2 else []
    return [f"m({seed}).backward()"] * backwards + [*clipped, "o.step()", "o.zero_grad()"]


def _training(dice: random.Random, engine: bool, number: int) -> list[str]:
    lines: list[str] = []
    for _ in range(dice.choice([0, 1, 1, 2, 3]) or number == 0):
        if dice.random() < 0.3:
            lines.append(_between(dice, engine))
        lines += _window(dice, engine)
    return lines


def _between(dice: random.Random, engine: bool) -> str:
    index = dice.randrange(4)
    choices = [f"o.param_groups[-1]['lr'] = {dice.choice([0.0, 0.02, 0.5])}", "o.param_groups[0]['weight_decay'] = 0.3"]
    choices += [f"p[{index}].requires_grad_(False)"]
    if not engine:
        choices += ["o.load_state_dict(through_file(o.state_dict()))", "loaded(saved(m, o), m, o)"]
        choices += [
            f"with torch.no_grad():\n    p[{index}].mul_(0.5)",
            "m.load_state_dict(through_file(m.state_dict()))",
        ]
    return dice.choice(choices)
