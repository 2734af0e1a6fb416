"""Modules that stage 3 gathers as a whole because a script says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import nn

from longshore.engine import Config
from longshore.engine.model_sharding import units_of

_LEAVES: WeakSet[nn.Module] = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have stage 3 gather each module of these classes as a whole; before ``initialize()``.

    Args:
        model: looked through.
        leaf_module_classes: classes, or their names with or without the module's.
        raise_if_not_found: ValueError where there is none.

    Returns:
        The modules.
    """
    wanted = list(leaf_module_classes)
    found = [module for module in model.modules() if any(_is_of(module, each) for each in wanted)]
    if not found and raise_if_not_found:
        raise ValueError(f"set_z3_leaf_modules() found no module of {', '.join(map(str, wanted))} in the model")
    _LEAVES.update(found)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    wanted = list(leaf_module_classes)
    found = [module for module in get_z3_leaf_modules(model) if any(_is_of(module, each) for each in wanted)]
    if not found and raise_if_not_found:
        raise ValueError(f"unset_z3_leaf_modules() found no leaf of {', '.join(map(str, wanted))} in the model")
    for module in found:
        _LEAVES.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module in _LEAVES]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it was set."""
    return model in _LEAVES


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set, or unset, one module."""
    if flag:
        _LEAVES.add(model)
    else:
        _LEAVES.discard(model)


def policy_for(model: Any, config: Any) -> Callable[[str, nn.Module], bool] | None:
    """What is gathered as a whole where leaves were set: they, and the configuration's units that are not inside one;
    None where there are none, or nothing is sharded."""
    leaves = get_z3_leaf_modules(model) if isinstance(model, nn.Module) else []
    stage, policy = _stage_and_policy(config)
    if not leaves or stage != 3:
        return None
    inside = {id(module) for leaf in leaves for module in leaf.modules()}
    units = {id(unit) for unit in units_of(model, policy)} - inside | {id(leaf) for leaf in leaves}
    return lambda _, module: id(module) in units


def _stage_and_policy(config: Any) -> tuple[Any, Any]:
    if isinstance(config, Config):
        return config.stage, config.wrap_policy
    if not isinstance(config, Mapping):
        return None, None
    zero, own = config.get("zero_optimization"), config.get("longshore")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    policy = own.get("wrap_policy", "auto") if isinstance(own, Mapping) else "auto"
    return stage, policy


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)
