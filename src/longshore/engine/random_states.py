"""The states of a rank's random number generators, as values for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from longshore.errors import CheckpointError


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python, NumPy, torch on the CPU, and torch on ``device`` if that is a CUDA device."""
    version, numbers, gauss = random.getstate()
    # NumPy's default generator is always MT19937, whose name comes first.
    _, key, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(np.asarray(key, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore states that :func:`random_states` returned.

    Raises:
        CheckpointError: the states are not valid; some generators may be set already.
    """
    try:
        python, numpy = states["python"], states["numpy"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"]))
        torch.set_rng_state(states["torch"])
        if device.type != "cpu" and device.type in states:
            torch.get_device_module(device).set_rng_state(states[device.type], device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the states of random number generators are damaged: {error}") from error


def check_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Raise the error that :func:`restore_random_states` would raise, and leave all generators as they are."""
    present = random_states(device)
    try:
        restore_random_states(states, device)
    finally:
        restore_random_states(present, device)
