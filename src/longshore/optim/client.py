"""Turn a client's own optimizer into one of ours with the same groups and state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from longshore.optim.family import ELEMENTWISE, TorchFamily
from longshore.optim.host_optimizer import OPTIMIZERS, HostOptimizer
from longshore.optim.offload import Placement

_KIND_ATTRIBUTE = "longshore_kind"
"""Attribute by which another class says that it is stepped as one of ours. It is not inherited: a subclass may step
differently."""

_REFUSED = {
    "Adafactor": "it keeps sums over the rows and columns of a matrix",
    "LBFGS": "it takes products of whole gradients and evaluates the model several times a step",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it steps sparse gradients only",
}
"""Of torch: what an element becomes depends on others, which may be in another tile or on another rank."""


def from_client(
    optimizer: torch.optim.Optimizer,
    *,
    release_gradients: bool,
    offload: Placement | None = None,
    names: Mapping[int, str] | None = None,
) -> HostOptimizer:
    """Build an optimizer of ours that continues from ``optimizer``: the same parameters, groups and state.

    torch's Adam, AdamW, Adagrad and SGD, and ours, become ours. torch's other
    elementwise optimizers run as they are on host tiles, more slowly. One of
    ours that is given is closed.

    Args:
        optimizer: the client's; not to be used any more.
        release_gradients: see :class:`~longshore.AdamW`.
        offload: see :class:`~longshore.AdamW`.
        names: of parameters, by ``id(parameter)``; None: the optimizer's own, if it has any.

    Raises:
        TypeError: not an optimizer of torch's.
        ValueError: one that cannot be stepped in tiles, or an option that cannot be honoured, by name.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    client = _ClientOptimizer(optimizer, names)
    kind = _native_kind(type(optimizer))
    if kind is not None:
        made: HostOptimizer = kind(
            client.groups(), **client.options_of(kind), release_gradients=release_gradients, offload=offload
        )
    else:
        name = _elementwise(optimizer)
        if offload is not None and offload.leaves_on_device:
            _check_on_host(optimizer, name)
        defaults = {**optimizer.defaults, **_how(optimizer.defaults)}
        made = HostOptimizer(client.groups(), defaults, TorchFamily(name), release_gradients, offload)
        warnings.warn(
            f"torch.optim.{name} has no kernel in longshore and is run by torch on host tiles, which gives torch's "
            f"weights and takes longer; longshore has kernels for {_with_kernels()}",
            stacklevel=2,
        )
    client.hand_over(made)
    return made


def _native_kind(kind: type) -> type[HostOptimizer] | None:
    for ours in OPTIMIZERS.values():
        if kind in (ours, ours.twin):
            return ours
    return vars(kind).get(_KIND_ATTRIBUTE)


def _with_kernels() -> str:
    return ", ".join(OPTIMIZERS)


def _elementwise(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    name = kind.__name__
    if kind is getattr(torch.optim, name, None):
        if name in ELEMENTWISE:
            return name
        if name in _REFUSED:
            raise ValueError(
                f"torch.optim.{name} cannot be stepped in tiles: {_REFUSED[name]}; use an elementwise optimizer "
                f"(longshore's {_with_kernels()}, or torch's {', '.join(ELEMENTWISE)})"
            )
    raise ValueError(
        f"longshore does not know the optimizer {kind.__module__}.{kind.__qualname__}, and cannot tell whether it may "
        f"be stepped in tiles; use longshore's {_with_kernels()}, torch's optimizers of these names, or torch's "
        f"{', '.join(ELEMENTWISE)}"
    )


def _check_on_host(optimizer: torch.optim.Optimizer, name: str) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"torch.optim.{name} runs on host tiles, and its state is to stay on {parameter.device} "
                    "(Offload(device='none'), or a ratio below 1); use device='cpu' with all of it there, or one of "
                    f"longshore's {_with_kernels()}"
                )


class _ClientOptimizer:
    """The groups, options and state of an optimizer, as ours take them over."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None) -> None:
        self._optimizer = optimizer
        self._names = names
        self._has_names = names is not None or any("param_names" in group for group in optimizer.param_groups)

    def groups(self) -> list[dict[str, Any]]:
        """The groups, with names where there are any."""
        groups = []
        for position, group in enumerate(self._optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            members = group["params"]
            if self._names is not None:
                named = self._names
                members = [(named.get(id(p), f"{position}.{place}"), p) for place, p in enumerate(members)]
            elif "param_names" in group:
                members = list(zip(group["param_names"], members, strict=True))
            # torch takes names from the members, and an empty group has none to take them from.
            nameless = {"param_names": []} if self._has_names and not members else {}
            groups.append({**options, **_how(options), **nameless, "params": list(members)})
        return groups

    def options_of(self, kind: type) -> dict[str, Any]:
        """The defaults, as arguments of ``kind``."""
        taken = inspect.signature(kind).parameters
        defaults = {**self._optimizer.defaults, **_how(self._optimizer.defaults)}
        return {name: value for name, value in defaults.items() if name in taken}

    def hand_over(self, made: HostOptimizer) -> None:
        """Give the state to ``made``, where there is any."""
        saved = self._optimizer.state_dict()
        if saved["state"]:
            groups = [
                {key: value for key, value in {**group, **_how(group)}.items() if key != "param_names"}
                for group in saved["param_groups"]
            ]
            made.load_state_dict({**saved, "param_groups": groups})
        if isinstance(self._optimizer, HostOptimizer):
            self._optimizer.close()


def _how(options: Mapping[str, Any]) -> dict[str, Any]:
    """``foreach`` and ``fused`` as unset: they say how torch computes a step, and are not taken over."""
    return {name: None for name in ("foreach", "fused") if name in options}
