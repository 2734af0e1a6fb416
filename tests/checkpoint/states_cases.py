"""Checkpoints of states that are not float32, loaded into the same format and into others, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from plain_states import to_nearest

from checkpoint.resume_cases import Setting, engine_of, state_of, train

FEWER_RANKS = r".*(was saved by|samples into its epoch|: backwards a step)"
"""What is said where another number of ranks loads: a test of its own looks at that."""


def converted(state: dict[str, Any], states: str) -> dict[str, Any]:
    """What :func:`state_of` finds in another format."""
    found = dict(state)
    for key, value in state.items():
        name = key.rpartition(" ")[2]
        if name in ("exp_avg", "exp_avg_sq"):
            found[key] = to_nearest(value, states, name)
    return found


def has_formats(engine: Any) -> set[str]:
    return {tile.format.value for part in engine.optimizer._core.members.store.tiles.tiers for tile in part.tiles}


def save(setting: Setting, folder: str, steps: int = 4) -> dict[str, Any]:
    with engine_of(setting, wide=True) as engine:
        train(engine, steps)
        engine.save_checkpoint(folder)
        expected = {"8bit": {"8bit", "bf16"}}.get(setting.states, {setting.states})
        assert has_formats(engine) == expected
        return state_of(engine)


def load(setting: Setting, folder: str, save_to: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """In an engine of other weights, which has trained already; what it has then, and what it said."""
    with engine_of(setting, seed=1, wide=True) as engine:
        train(engine, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", message=FEWER_RANKS)
            engine.load_checkpoint(folder)
        if save_to is not None:
            engine.save_checkpoint(save_to)
        return state_of(engine), [str(each.message) for each in caught]


def go_on(setting: Setting, folder: str, steps: int) -> dict[str, Any]:
    """From a checkpoint of as many ranks."""
    with engine_of(setting, seed=1, wide=True) as engine:
        train(engine, 1)
        engine.load_checkpoint(folder)
        del engine.batches
        torch.manual_seed(5)
        train(engine, steps)
        return state_of(engine)
