"""Units: the modules of a model whose parameters are gathered, or copied to the device, together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

WrapPolicy = str | int | Sequence[str] | Callable[[str, nn.Module], bool]
"""Chooses the modules that are gathered as a whole: see :func:`units_of`."""


def units_of(model: nn.Module, policy: WrapPolicy, argument: str = "wrap_policy") -> list[nn.Module]:
    """Return the units: modules that are gathered, each as a whole, for their forward and backward; inner ones first.

    Parameters in no unit are gathered with the model itself, and stay gathered until the end of backward.

    Args:
        model: the model, which is never a unit itself.
        policy: ``"auto"``: the model's transformer blocks, by ``_no_split_modules`` if it names them (as models of
            transformers do), otherwise the modules that repeat in an ``nn.ModuleList`` or ``nn.Sequential``.
            Names of classes. A number: modules that have at least that many elements outside of smaller units.
            A function of name and module that returns whether the module is a unit.
        argument: the user's name of ``policy``.

    Raises:
        ValueError: no module has a named class, or the policy is invalid.
    """
    # Modules are named before their children, so the reverse order has children first. The root is left out.
    users = _users(model)
    inner = [(name, module) for name, module in list(model.named_modules())[:0:-1] if _stands_alone(module, users)]
    if callable(policy) and not isinstance(policy, type):
        return [module for name, module in inner if policy(name, module)]
    if isinstance(policy, bool) or (isinstance(policy, int) and policy < 1):
        raise ValueError(f"{argument} counts elements from 1 on, and is {policy!r}")
    if isinstance(policy, int):
        return _by_size((module for _, module in inner), policy)
    if isinstance(policy, str) and policy != "auto":
        policy = (policy,)
    if policy == "auto":
        named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        names = named & {type(module).__name__ for module in model.modules()}
        if not names:
            return _repeated(model, users)
    else:
        if not isinstance(policy, Iterable) or not all(isinstance(name, str) for name in policy):
            raise ValueError(
                f'{argument} is {policy!r}; it takes "auto", a list of names of classes (as strings), a whole number '
                "of elements, or a function of name and module"
            )
        names = set(policy)
        known = {type(module).__name__ for _, module in inner}
        if names - known:
            raise ValueError(
                f"{argument} names {', '.join(sorted(names - known))}, and the model has no module of that class; its "
                f"classes: {', '.join(sorted(known))}"
            )
    return [module for _, module in inner if type(module).__name__ in names]


def units_with_leaves(model: nn.Module, policy: WrapPolicy, leaves: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the units of :func:`units_of`, but for those inside one of the ``leaves``, and the leaves."""
    whole = list(leaves)
    if not whole:
        return units_of(model, policy)
    inside = {id(module) for leaf in whole for module in leaf.modules() if module is not leaf}
    chosen = ({id(unit) for unit in units_of(model, policy)} | {id(leaf) for leaf in whole}) - inside
    return units_of(model, lambda _, module: id(module) in chosen)


def module_that_cannot(model: nn.Module) -> str | None:
    """Return why a model cannot be streamed, if that is because of the kind of one of its modules."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            return (
                f"{type(module).__name__} keeps its parameters in a list of its own, in which they cannot be streamed"
            )
    return None


def _users(module: nn.Module) -> Counter[int]:
    """Count the modules that own each parameter directly, by the parameter's ``id``."""
    return Counter(id(parameter) for each in module.modules() for parameter in each.parameters(recurse=False))


def _stands_alone(module: nn.Module, users: Counter[int]) -> bool:
    """Return whether a module can be gathered as a whole: it has a forward, and parameters that no other module shares
    (tied ones are gathered with the model itself)."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return False
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention reads its weight and never calls it
        return False
    mine = _users(module)
    return bool(mine) and all(users[key] == count for key, count in mine.items())


def _repeated(module: nn.Module, users: Counter[int]) -> list[nn.Module]:
    """Return members of lists that have several of one class; of nested lists, those of the outer one."""
    units: list[nn.Module] = []
    kinds = [type(child) for child in module.children()] if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    for child in module.children():
        is_unit = kinds.count(type(child)) > 1 and _stands_alone(child, users)
        units += [child] if is_unit else _repeated(child, users)
    return units


def _by_size(modules: Iterable[nn.Module], least: int) -> list[nn.Module]:
    units: list[nn.Module] = []
    taken: set[int] = set()
    for module in modules:
        mine = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        if sum(parameter.numel() for parameter in mine) >= least:
            units.append(module)
            taken.update(map(id, mine))
    return units
