"""Names of parameters with the parts that wrappers put into them, and without."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_COMPILED_AND_SHARDED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that are nobody else's: torch.compile's, activation checkpointing's and FSDP's."""
_DATA_PARALLEL = "module"
"""DistributedDataParallel's and DataParallel's part; users have modules of this name too."""


def unwrapped(name: str) -> str:
    """Return the name without the parts of wrappers; ``module`` stays, which may be the user's."""
    return _without(name, _COMPILED_AND_SHARDED)


def counterparts(names: Iterable[str], others: Collection[str]) -> dict[str, str]:
    """Return for each name the one of ``others`` that is the same but for the parts of wrappers, or else the name.

    Equal names come first. Names that would be two of ``others``, or that two would be, have no counterpart.
    """
    found = {name: name for name in names}
    rest = _by_bare_name(name for name in found if name not in others)
    theirs = _by_bare_name(other for other in others if other not in found)
    for bare, mine in rest.items():
        if len(mine) == 1 and len(theirs.get(bare, ())) == 1:
            found[mine[0]] = theirs[bare][0]
    return found


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_without(name, _COMPILED_AND_SHARDED | {_DATA_PARALLEL}), []).append(name)
    return found


def _without(name: str, wrappers: Collection[str]) -> str:
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in wrappers), last])
