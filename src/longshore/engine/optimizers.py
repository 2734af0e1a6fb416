"""Make the engine's optimizer, as the configuration names it or from the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine.client import converted
from longshore.engine.config.model import Config
from longshore.engine.config.optimizers import MuonConfig
from longshore.engine.muon import muon_groups_of
from longshore.optim.muon_groups import show_groups
from longshore.optim.offload import Offload
from longshore.optim.rule_optimizer import OPTIMIZERS
from longshore.optim.tiled_optimizer import TiledOptimizer


def client_optimizer(
    model: nn.Module,
    given: Optimizer | Callable[[list[Any]], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    config: Config,
    show: bool = False,
) -> tuple[Optimizer | None, list[dict[str, Any]]]:
    """Return the user's optimizer and no groups, or None and the groups for the optimizer that the configuration names.

    ``given`` is the optimizer, or a function that makes it. Groups have ``(FQN, parameter)``, so that errors can name
    parameters; without ``model_parameters`` they have all trainable ones. Muon's are printed if ``show``.

    Raises:
        ValueError: two optimizers are given, or one that was built with other parameters.
        TypeError: an argument has another type.
    """
    if isinstance(model_parameters, Tensor):
        raise TypeError("model_parameters is a list of parameters or groups, not one tensor; wrap it in a list")
    entries: list[Any] = (
        [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model_parameters is None
        else list(model_parameters.parameters() if isinstance(model_parameters, nn.Module) else model_parameters)
    )
    if given is None:
        groups = _named_groups(model, entries)
        if isinstance(config.optimizer, MuonConfig):
            groups = muon_groups_of(model, groups, config.optimizer)
            if show:
                show_groups(groups)
        return None, groups
    if config.optimizer is not None:
        raise ValueError("an optimizer is given twice: as optimizer= and in the configuration; keep one")
    if not isinstance(given, Optimizer):
        if not callable(given):
            raise TypeError(f"optimizer is a torch.optim.Optimizer or makes one, not {type(given).__name__}")
        made = given(entries)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer= returned a {type(made).__name__}, not a torch.optim.Optimizer")
        return made, []
    if model_parameters is not None:
        own = {id(parameter) for group in given.param_groups for parameter in group["params"]}
        if own != {id(each) for group in _named_groups(model, entries) for _, each in group["params"]}:
            raise ValueError(
                "optimizer= was built with other parameters than model_parameters=; with an optimizer of your own "
                "leave model_parameters out"
            )
    return given, []


def _named_groups(model: nn.Module, entries: list[Any]) -> list[dict[str, Any]]:
    """Turn parameters or groups into groups of ``(FQN, parameter)``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    named = []
    for position, group in enumerate(groups):
        params = group.get("params", [])
        members = []
        for place, entry in enumerate([params] if isinstance(params, Tensor) else params):
            name, parameter = entry if isinstance(entry, tuple) else (None, entry)
            members.append((names.get(id(parameter)) or name or f"{position}.{place}", parameter))
        options = {key: value for key, value in group.items() if key != "param_names"}
        # torch takes names from the members, of which an empty group has none.
        named.append({**options, "params": members, **({} if members else {"param_names": []})})
    return named


def make_optimizer(
    model: nn.Module,
    client: Optimizer | None,
    groups: list[dict[str, Any]],
    config: Config,
    offload: Offload,
) -> TiledOptimizer:
    """Make an optimizer with a store of ``offload``, which takes the gradients during backward.

    It continues from ``client``, the user's own, for which :func:`take_over` is to be called at the end. If there is
    none, the configuration names the optimizer, and it has the ``groups``.
    """
    if client is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return converted(client, release_gradients=True, offload=offload, names=names)
    assert config.optimizer is not None  # load_config() checks it
    kind: Any = OPTIMIZERS[config.optimizer.type]  # the signatures differ
    made = kind(groups, **config.optimizer.options(), release_gradients=True, offload=offload)
    made._named_by_us = True
    return made
