"""From parameter groups to the rule by which each parameter is stepped."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from longshore.errors import ParameterError
from longshore.kernels import HostRule
from longshore.optim.family import History, RuleFamily
from longshore.optim.parameters import ParameterRecord


def records_of(group: Mapping[str, Any], records: Mapping[int, ParameterRecord]) -> list[ParameterRecord]:
    """The group's parameters as the user left them; one taken out is no longer stepped, as in torch.

    Args:
        group: of an optimizer.
        records: by ``id(parameter)``.

    Raises:
        ParameterError: the group holds a tensor that has no record.
    """
    try:
        return [records[id(parameter)] for parameter in group["params"]]
    except KeyError:
        raise ParameterError(
            "a parameter group holds a tensor that this optimizer was not built with; "
            "use optimizer.add_param_group(), or build the optimizer anew"
        ) from None


def planned(
    groups: Iterable[Mapping[str, Any]],
    records: Mapping[int, ParameterRecord],
    family: RuleFamily,
    arrays: Sequence[str],
    among: Container[int],
) -> Iterator[tuple[ParameterRecord, HostRule, History]]:
    """How each parameter ``among`` these (by the index of its record) is stepped, and its history afterwards."""
    for group in groups:
        known: dict[History, tuple[HostRule, History]] = {}
        for record in records_of(group, records):
            if record.index not in among:
                continue
            if (history := record.history) not in known:
                known[history] = family.rule_of(group, history, arrays), family.after(group, history)
            yield record, *known[history]
