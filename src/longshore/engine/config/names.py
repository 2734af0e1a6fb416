"""Guesses at which known name is meant by an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_OTHER_NAMES = {
    ("lr", "warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"): "learning_rate",
    ("lr", "warmup_max_lr", "cycle_min_lr", "lr_range_test_min_lr"): "base_lr",
    ("lr", "warmup_max_lr", "cycle_max_lr"): "max_lr",
    ("warmup_min_lr", "cycle_min_lr", "lr_range_test_min_lr"): "min_lr",
    ("cos_min_ratio",): "min_lr_ratio",
    ("eps",): "epsilon adam_epsilon",
    ("weight_decay",): "wd decay",
    ("betas",): "beta beta1 beta2 adam_beta1 adam_beta2",
    ("warmup_num_steps",): "warmup warmup_steps warmup_iters warmup_ratio num_warmup_steps",
    ("total_num_steps",): "steps num_steps max_steps total_steps train_steps training_steps num_training_steps t_max",
    ("offload_device",): "offload_optimizer",
}
ALIASES = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
"""Names in other libraries, in lower case, and ours, which string distance would miss or mistake."""


def quoted(value: object) -> str:
    """A name or value as JSON shows it."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def edits(left: str, right: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours from one to the other."""
    previous: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, previous, row = previous, row, [i]
        for j, b in enumerate(right, 1):
            best = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
    return row[-1]


def alias_of(name: str, known: Iterable[str]) -> list[str]:
    """The known name of what other libraries call ``name``, or nothing."""
    known = set(known)
    called = ALIASES.get(name.lower().replace("-", "_"), ())
    return [option for option in called if option in known][:1]


def candidates(name: object, known: Iterable[str]) -> list[str]:
    """The known names that ``name`` may stand for: another library's name for it, or those that are equally near."""
    if not isinstance(name, str):
        return []
    given, known = name.lower(), list(known)
    called = alias_of(name, known)
    if called:
        return called
    distances = {option: edits(given, option.lower()) for option in known}
    least = min(distances.values(), default=0)
    if known and least <= max(1, len(given) // 4):
        return [option for option in known if distances[option] == least]
    return difflib.get_close_matches(given, known, n=1, cutoff=0.7)


def nearest(name: object, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or nothing."""
    found = candidates(name, known)
    return f"; did you mean {' or '.join(quoted(option) for option in found)}?" if found else ""
