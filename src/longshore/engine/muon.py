"""Divide a model's parameters for Muon as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from longshore.engine.config.optimizers import MuonConfig
from longshore.optim.muon_groups import matrix_options
from longshore.optim.rules.adam import AdamFamily
from longshore.optim.rules.muon import MatrixFamily

_MARK = "use_muon"
"""A group's option and, as in DeepSpeed, an attribute of a parameter: whether Muon steps it."""


def muon_groups_of(model: nn.Module, groups: Sequence[Mapping[str, Any]], config: MuonConfig) -> list[dict[str, Any]]:
    """Return groups for :class:`longshore.Muon` from ``groups`` of named parameters, which it divides.

    Groups that say ``use_muon`` stay as they are. Otherwise parameters that have an attribute of that name are divided
    by it, and if none has it, as by :func:`longshore.muon_groups`. A group's own options are those of its parts.

    Raises:
        ValueError: a parameter, which the message names, has no mark while others have one; it is not one of the
            model's; or it looks as if it held several matrices, and the configuration does not say what to do.
    """
    undecided = {name: each for group in groups if _MARK not in group for name, each in group["params"]}
    options_of = _divided(model, undecided, config) if undecided else {}
    divided: list[dict[str, Any]] = []
    for group in groups:
        if _MARK in group:
            divided.append({**(config.adamw_options() if not group[_MARK] else {}), **group})
            continue
        parts: dict[str, tuple[dict[str, Any] | None, list[tuple[str, Tensor]]]] = {}
        for name, parameter in group["params"]:
            parts.setdefault(repr(options_of[name]), (options_of[name], []))[1].append((name, parameter))
        own = {name: value for name, value in group.items() if name != "params"}
        for options, members in parts.values():
            more = {_MARK: False, **config.adamw_options()} if options is None else {_MARK: True, **options}
            divided.append({**more, **_applicable(own, options is not None), "params": members})
    return divided


def _divided(model: nn.Module, named: Mapping[str, Tensor], config: MuonConfig) -> Mapping[str, dict[str, Any] | None]:
    """Return by name the options of each parameter that Muon is to step, and None for the others."""
    own = dict(model.named_parameters())
    if strangers := [name for name in named if name not in own]:
        raise ValueError(f"{_listed(strangers)} of model_parameters: not in the model; give such groups a {_MARK}")
    marks = {name: getattr(each, _MARK) for name, each in named.items() if hasattr(each, _MARK)}
    if strange := [name for name, mark in marks.items() if not isinstance(mark, bool)]:
        raise ValueError(f"{_MARK} of parameter {strange[0]} is {marks[strange[0]]!r}; it is True or False")
    if marks and (unmarked := [name for name in named if name not in marks]):
        raise ValueError(
            f"parameters without an attribute {_MARK}, which others have: {_listed(unmarked)}; set it for all, or for "
            "none, and longshore divides them"
        )
    where = "in optimizer.params of the configuration"
    return matrix_options(model, named, config.split or {}, config.others, marks or None, where)


def _applicable(own: Mapping[str, Any], is_matrix: bool) -> dict[str, Any]:
    """Return those of a group's own options that are not only for the other kind. ``eps`` is AdamW's, as in a file."""
    adamw, matrix = AdamFamily.options.keys(), MatrixFamily.options.keys()
    foreign = {*(adamw - matrix), "eps"} if is_matrix else matrix - adamw
    return {name: value for name, value in own.items() if name not in foreign}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
