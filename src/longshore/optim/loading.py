"""Reading a ``state_dict`` from outside: checked as a whole before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longshore.optim.family import IMPLEMENTATION_FLAGS, RuleFamily
from longshore.optim.parameters import ParameterRecord
from longshore.optim.state import checked_state


def loadable_state(
    state_dict: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    records: Sequence[ParameterRecord],
    family: RuleFamily,
) -> dict[int, dict[str, Any]]:
    """The state of each parameter by its index, from a state of ours or of its twin in torch.

    Args:
        state_dict: what ``state_dict()`` returned.
        own: the groups of the optimizer that loads it.
        defaults: of that optimizer.
        records: of its parameters, in the order of its groups.
        family: of that optimizer.

    Raises:
        ValueError: it does not fit, by name.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ValueError("this is no optimizer state: it needs 'state' (a dict) and 'param_groups' (a list)")
    groups = state_dict["param_groups"]
    theirs_numel = [len(group["params"]) for group in groups]
    own_numel = [len(group["params"]) for group in own]
    if theirs_numel != own_numel:
        raise ValueError(f"the state has groups of {theirs_numel} parameters, and this optimizer of {own_numel}")
    keys = [key for group in groups for key in group["params"]]
    for group, mine in zip(groups, own, strict=True):
        _check_names(group.get("param_names"), mine.get("param_names"))
        family.check_group(merged_group(group, mine, defaults, family))
    unknown = sorted(set(state_dict["state"]) - set(keys), key=str)
    if unknown:
        raise ValueError(f"the state has entries that belong to no parameter: {unknown}")
    loadable = {}
    for record, key in zip(records, keys, strict=True):
        entries = state_dict["state"].get(key)
        if not entries:
            continue
        loaded = checked_state(record, entries, family)
        if loaded.get("step") == 0 and not record.parameter.requires_grad:
            continue  # torch's Adagrad keeps the state of frozen parameters too
        loadable[record.index] = loaded
        missing = sorted(family.required - set(entries))
        if missing:
            raise ValueError(f"parameter {record.name}: the state lacks {', '.join(missing)}")
    return loadable


def merged_group(
    loaded: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], family: RuleFamily
) -> dict[str, Any]:
    """The group after loading: what the state says, except for how a step is computed and for fixed options."""
    flags = {name: value for name, value in IMPLEMENTATION_FLAGS.items() if name in defaults}
    return {**defaults, **loaded, **flags, **{name: own[name] for name in family.fixed_options}}


def _check_names(theirs: list[str] | None, mine: list[str] | None) -> None:
    for position, (found, expected) in enumerate(zip(theirs or [], mine or [], strict=False)):
        if found != expected:
            raise ValueError(
                f"the state's parameter {position} of a group is {found!r} and this optimizer's is {expected!r}; "
                "build the optimizer with its parameters in the same order"
            )
