"""Make the engine's optimizer: by name, or from the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine.config import Config
from longshore.optim.client import from_client
from longshore.optim.host_optimizer import OPTIMIZERS, HostOptimizer
from longshore.optim.offload import Placement


def client_optimizer(
    model: nn.Module,
    given: Optimizer | Callable[[list[Any]], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    config: Config,
) -> Optimizer | None:
    """The optimizer that the user built, or that a function of theirs builds; None: the configuration names one.

    Args:
        model: whose trainable parameters a function gets where ``model_parameters`` is None.
        given: the user's optimizer, or what makes one from parameters.
        model_parameters: parameters or groups.
        config: may name an optimizer.

    Raises:
        ValueError: two optimizers.
        TypeError: something that is none.
    """
    if given is None:
        return None
    if config.optimizer is not None:
        raise ValueError("an optimizer is given twice: as optimizer= and in the configuration; keep one")
    if isinstance(given, Optimizer):
        if model_parameters is not None:
            _check_same(given, model_parameters)
        return given
    if not callable(given):
        raise TypeError(f"optimizer is a torch.optim.Optimizer or makes one, not {type(given).__name__}")
    optimizer = given(_listed(model, model_parameters))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer= returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def make_optimizer(
    model: nn.Module,
    client: Optimizer | None,
    model_parameters: Iterable[Any] | None,
    config: Config,
    placement: Placement,
) -> HostOptimizer:
    """Make an optimizer whose state is where ``placement`` says, and whose gradients leave during backward.

    Args:
        model: names the parameters.
        client: the user's, which it replaces; None: the configuration names one.
        model_parameters: parameters or groups for that one; None: all trainable ones.
        config: names an optimizer where there is no client's.
        placement: makes the store.
    """
    if client is None:
        return _by_name(model, model_parameters, config, placement)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return from_client(client, release_gradients=True, offload=placement, names=names)


def _by_name(
    model: nn.Module, model_parameters: Iterable[Any] | None, config: Config, placement: Placement
) -> HostOptimizer:
    assert config.optimizer is not None  # load_config() checks it
    kind: Any = OPTIMIZERS[config.optimizer.type]  # each has the signature of its own
    options = config.optimizer.arguments()
    groups = named_groups(model, _listed(model, model_parameters))
    return kind(groups, **options, release_gradients=True, offload=placement)


def _listed(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[Any]:
    if isinstance(model_parameters, Tensor):
        raise TypeError("model_parameters is a list of parameters or groups, not one tensor; wrap it in a list")
    if isinstance(model_parameters, nn.Module):
        model_parameters = model_parameters.parameters()
    if model_parameters is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(model_parameters)


def _check_same(optimizer: Optimizer, model_parameters: Iterable[Any]) -> None:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    entries = list(model_parameters)
    members = [
        entry[1] if isinstance(entry, tuple) else entry
        for group in (entries if entries and isinstance(entries[0], dict) else [{"params": entries}])
        for entry in group["params"]
    ]
    if own != {id(member) for member in members}:
        raise ValueError(
            "optimizer= was built with other parameters than model_parameters=; with an optimizer of your own leave "
            "model_parameters out"
        )


def named_groups(model: nn.Module, entries: list[Any]) -> list[dict[str, Any]]:
    """Turn parameters or groups into groups of ``(FQN, parameter)``, so that errors can name parameters."""
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
        # torch takes names from the members, and an empty group has none to take them from.
        named.append({**options, "params": members, **({} if members else {"param_names": []})})
    return named
