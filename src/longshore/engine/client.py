"""Conversion of a user's optimizer into a longshore optimizer with the same groups and state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch

from longshore.optim.family import ELEMENTWISE, TorchFamily
from longshore.optim.offload import StoreFactory
from longshore.optim.tiled_optimizer import OPTIMIZERS, TiledOptimizer

_KIND_ATTRIBUTE = "longshore_kind"
"""Class attribute that gives the longshore optimizer with the same step. It is not inherited, since a subclass may step
differently."""

_REFUSED = {
    "Adafactor": "it keeps sums over the rows and columns of a matrix",
    "LBFGS": "it takes products of whole gradients and evaluates the model several times a step",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it steps sparse gradients only",
}
"""torch's optimizers that cannot be stepped in tiles, with the reason. Most let an element depend on others, which may
be in another tile or on another rank."""


def from_client(
    optimizer: torch.optim.Optimizer,
    *,
    release_gradients: bool = False,
    offload: StoreFactory | None = None,
    names: Mapping[int, str] | None = None,
) -> TiledOptimizer:
    """Build a longshore optimizer that continues from ``optimizer``, with the same parameters, groups and state.

    torch's Adam, AdamW, Adagrad and SGD, and longshore's optimizers, become longshore's. torch's other elementwise
    optimizers are run by torch on host tiles, more slowly. If ``optimizer`` is one of longshore's, it is closed.

    Args:
        optimizer: the user's optimizer, which must not be used afterwards.
        release_gradients: see :class:`~longshore.AdamW`.
        offload: see :class:`~longshore.AdamW`.
        names: names of parameters, by ``id(parameter)``; None: those in the optimizer's groups, if there are any.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        ValueError: the optimizer cannot be stepped in tiles, or has an unsupported option; the message names it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    client = type(optimizer)
    native = (ours for ours in OPTIMIZERS.values() if client in (ours, ours.twin))
    kind = cast(Any, next(native, None) or vars(client).get(_KIND_ATTRIBUTE))
    groups, defaults = _groups_of(optimizer, names), _without_flags(optimizer.defaults)
    made: TiledOptimizer
    if kind is not None:
        taken = inspect.signature(kind).parameters
        options = {name: value for name, value in defaults.items() if name in taken}
        made = kind(groups, **options, release_gradients=release_gradients, offload=offload)
    else:
        name = _elementwise(optimizer)
        if offload is not None and offload.leaves_on_device:
            _check_on_host(optimizer, name)
        made = TiledOptimizer(groups, defaults, TorchFamily(name), release_gradients, offload)
        warnings.warn(
            f"torch.optim.{name} has no kernel in longshore and is run by torch on host tiles, which gives torch's "
            f"weights and takes longer; longshore has kernels for {', '.join(OPTIMIZERS)}",
            stacklevel=2,
        )
    saved = optimizer.state_dict()
    if saved["state"]:
        own_groups = [
            {key: value for key, value in _without_flags(group).items() if key != "param_names"}
            for group in saved["param_groups"]
        ]
        made.load_state_dict({**saved, "param_groups": own_groups})
    if isinstance(optimizer, TiledOptimizer):
        optimizer.close()
    return made


def _elementwise(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    name = kind.__name__
    if kind is getattr(torch.optim, name, None):
        if name in ELEMENTWISE:
            return name
        if name in _REFUSED:
            raise ValueError(
                f"torch.optim.{name} cannot be stepped in tiles: {_REFUSED[name]}; use an elementwise optimizer "
                f"(longshore's {', '.join(OPTIMIZERS)}, or torch's {', '.join(ELEMENTWISE)})"
            )
    raise ValueError(
        f"longshore does not know the optimizer {kind.__module__}.{kind.__qualname__}, and cannot tell whether it may "
        f"be stepped in tiles; use longshore's {', '.join(OPTIMIZERS)}, torch's optimizers of these names, or torch's "
        f"{', '.join(ELEMENTWISE)}"
    )


def _check_on_host(optimizer: torch.optim.Optimizer, name: str) -> None:
    elsewhere = {str(each.device) for group in optimizer.param_groups for each in group["params"] if not each.is_cpu}
    if elsewhere:
        raise ValueError(
            f"torch.optim.{name} runs on host tiles, and its state is to stay on {elsewhere.pop()} "
            "(Offload(device='none'), or a ratio below 1); use device='cpu' with all of it there, or one of "
            f"longshore's {', '.join(OPTIMIZERS)}"
        )


def _groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with the names of parameters if there are any."""
    has_names = names is not None or any("param_names" in group for group in optimizer.param_groups)
    groups = []
    for position, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = group["params"]
        if names is not None:
            members = [(names.get(id(p), f"{position}.{place}"), p) for place, p in enumerate(members)]
        elif "param_names" in group:
            members = list(zip(group["param_names"], members, strict=True))
        # torch takes names from the members, and an empty group has none to take them from.
        nameless = {"param_names": []} if has_names and not members else {}
        groups.append({**_without_flags(options), **nameless, "params": list(members)})
    return groups


def _without_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with ``foreach`` and ``fused``, which say how torch computes a step, set to None."""
    return {name: None if name in ("foreach", "fused") else value for name, value in options.items()}
