"""Step of parameters that were all stepped before, without any object for each: many small ones cost little."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.kernels import Rule, Scale
from longshore.optim.family import History, RuleFamily
from longshore.optim.parameters import ParameterRecord
from longshore.store import Store
from longshore.tiles import RepeatedCommit, Tiles

Groups = Sequence[Mapping[str, Any]]


def _ids(groups: Groups) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in groups]


class _Found:
    """Values of all parameters (addresses of gradients and of parameters, and the numbers of their rules), and
    of those that have a gradient (their records, and their histories after the step)."""

    def __init__(self) -> None:
        self.gradients: list[int] = []
        self.outputs: list[int] = []
        self.numbers: list[int] = []
        self.rules: list[Rule] = []
        self.stepped: list[ParameterRecord] = []
        self.after: list[History] = []

    def add(self, gradient: int, output: int, number: int) -> None:
        self.gradients.append(gradient)
        self.outputs.append(output)
        self.numbers.append(number)


_Member = tuple[ParameterRecord, Tensor, torch.dtype, torch.Size, type[Tensor] | None]


class RepeatedStep:
    """Step of parameters that were stepped before, with gradients that the kernels read in ``.grad``.

    Everything that the regular step checks is compared here with the values that the last step left. If anything
    differs, in whatever way, :meth:`step` returns None and has done nothing: the regular step finds the cause, and
    raises its errors.

    Args:
        family: the optimizer's rule.
        tiles: tiles for which :meth:`RepeatedCommit.possible` is true.
        groups: the parameter groups.
        records: the records of each group's parameters, none of them sharded.
    """

    def __init__(
        self, family: RuleFamily, tiles: Tiles, groups: Groups, records: Sequence[Sequence[ParameterRecord]]
    ) -> None:
        self._family = family
        self._tiles = tiles
        self._ids = _ids(groups)
        self._parts = len(tiles.tier.parts)
        # A parameter that was frozen until now has no tiles: no gradient of it is of type None.
        self._groups = [
            [
                (each, each.parameter, each.dtype, each.shape, Tensor if each.index in tiles.tier.parts else None)
                for each in group
            ]
            for group in records
        ]
        self._commit = RepeatedCommit(tiles, [record.index for group in records for record in group])

    def describes(self, groups: Groups) -> bool:
        """Return whether the groups have the parameters that they had, and no frozen one was stepped since."""
        return len(self._tiles.tier.parts) == self._parts and _ids(groups) == self._ids

    def step(self, groups: Groups, scale: Callable[[], Scale]) -> list[ParameterRecord] | None:
        """Step the parameters that have a gradient, and return their records; None: the regular step has to."""
        if not (self._commit.undisturbed and self.describes(groups)):
            return None
        found = _Found()
        if not all(self._read(found, *pair) for pair in zip(groups, self._groups, strict=True)):
            return None

        def published() -> None:
            torch.autograd.graph.increment_version([record.parameter for record in found.stepped])
            for record, history in zip(found.stepped, found.after, strict=True):
                identity = record.published
                assert identity is not None
                record.history = history
                identity.version = identity.held_version = record.parameter._version

        if found.stepped:
            self._commit.commit((found.gradients, found.outputs, found.numbers), found.rules, scale(), published)
        return found.stepped

    def _read(self, found: _Found, group: Mapping[str, Any], members: Sequence[_Member]) -> bool:
        """Read one group; return False if anything is not as the last step left it."""
        known: dict[History, tuple[int, History]] = {}
        last, number, following = None, 0, History()
        for record, parameter, dtype, shape, kind in members:
            gradient: Any = parameter.grad
            if parameter.dtype is not dtype or parameter.shape != shape:
                return False
            if gradient is None:
                if not parameter.is_cpu:
                    return False
                found.add(0, 0, 0)
                continue
            published, address = record.published, parameter.data_ptr()
            # One expression, since this loop is most of what a step of small parameters costs.
            if (
                published is None
                or parameter._version != published.version
                or address != published.address
                or parameter.untyped_storage()._cdata != published.storage.cdata
                or not parameter.is_contiguous()
                or parameter.is_neg()
                or type(gradient) is not kind
                or gradient.dtype is not dtype
                or gradient.shape != shape
                or gradient.layout is not torch.strided
                or not gradient.is_cpu
                or not gradient.is_contiguous()
                or gradient.is_neg()
                or ((at := gradient.data_ptr()) in (0, address) and parameter.numel() > 0)
            ):
                return False
            if (history := record.history) is not last:
                if history not in known:
                    family = self._family.of(group)
                    rule = family.rule_of(group, history, self._tiles.tier.elementwise.names)
                    if not isinstance(rule, Rule) or family.initial(history):
                        return False
                    known[history] = len(found.rules), family.after(group, history)
                    found.rules.append(rule)
                last, (number, following) = history, known[history]
            found.add(at, address, number)
            found.stepped.append(record)
            found.after.append(following)
        return True


def repeated_step(
    family: RuleFamily, store: Store, groups: Groups, records: Iterable[Sequence[ParameterRecord]]
) -> RepeatedStep | None:
    """Return the repeated step of groups whose gradients are in ``.grad``; None where anything is copied."""
    members = [*records]
    sharded = any(record.keeps_shard for group in members for record in group)
    if not store.alone or sharded:
        return None
    return RepeatedStep(family, store.tiles, groups, members) if RepeatedCommit.possible(store.tiles) else None
