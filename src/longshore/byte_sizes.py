"""Byte sizes as people write them (``80GB``, ``64 GiB``, ``"25%"``) and as longshore prints them (``1.5 KiB``)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_PREFIXES = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}I": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*", re.IGNORECASE)
_MOST = (1 << 63) - 1
LEAST_BUDGET = 1024
"""Smallest memory budget other than 0, in bytes."""
_BUDGET = (
    'must be "auto", a percentage such as "25%", a size such as "8GiB", or an integer number of bytes (at least '
    f"{LEAST_BUDGET}, or 0 for none)"
)


def parse_byte_size(size: str | int) -> int:
    """Return the bytes, 1 to 2**63 - 1, of a size such as ``2TB``, ``64GiB``, ``1.5 GB``, ``1e9`` or an integer.

    ``K``, ``M``, ``G``, ``T`` and ``P`` are powers of 1000, or of 1024 if an ``i`` follows.

    Raises:
        ValueError: ``size`` is anything else; the message has the forms that are taken.
    """
    what = "a size in bytes as 80GB, 64GiB or 2TB"
    if isinstance(size, str):
        count = parse_scaled(size, ("B", "BYTES", "BYTE", ""), what)
        # float64 cannot represent every integer above 2**53.
        whole = int(size) if size.strip().isdecimal() else round(count)
    elif isinstance(size, int) and not isinstance(size, bool):
        whole = size
    else:
        raise ValueError(f"{size!r} is not {what}")
    if not 1 <= whole <= _MOST:
        shown = repr(size) if isinstance(size, str) else "the number"
        raise ValueError(f"{shown} is not {what}: it must be from 1 to {_MOST} bytes")
    return whole


def parse_scaled(text: str, units: tuple[str, ...], what: str) -> float:
    """Return the number in ``text``, which may have a decimal or binary prefix and one of ``units`` (upper case).

    Raises:
        ValueError: ``text`` is not such a number, or not above zero; the message says that it must be ``what``.
    """
    found = _NUMBER.fullmatch(text)
    suffix = found[2].upper().replace(" ", "") if found else ""
    scales = [
        _PREFIXES[suffix.removesuffix(unit)]
        for unit in units
        if suffix.endswith(unit) and suffix.removesuffix(unit) in _PREFIXES
    ]
    value = float(found[1].replace(",", "").replace("_", "")) if found else math.nan
    if found is None or not scales or not math.isfinite(value * scales[0]):
        raise ValueError(f"{text[:60]!r} is not {what}; write it so")
    if value <= 0:
        raise ValueError(f"{text!r} is not above zero; write {what}")
    return value * scales[0]


def format_byte_size(count: int) -> str:
    """Format bytes in the largest unit up to GiB that gives at least one: ``12 B``, ``1.5 KiB``, ``2,048.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1023.95:  # a larger size would be printed as 1024.0 of this unit
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} GiB"


class MemoryBudget(NamedTuple):
    """Memory that a setting grants: a number of bytes or a share; both are None for ``"auto"``."""

    byte_count: int | None = None
    share: float | None = None


def parse_memory_budget(value: object) -> MemoryBudget:
    """Parse ``"auto"``, a percentage (``"25%"``), a size (``"8GiB"``), or an integer number of bytes; 0 grants none.

    Floats are refused, since they could mean a share or bytes. Integers from 1 to 1023 are refused, too: so few bytes
    are of no use, and 1 or 25 is probably meant as a share.

    Raises:
        ValueError: ``value`` is anything else; the message ("must be ...") has the forms that are taken.
    """
    if isinstance(value, str):
        return _parse_budget_text(value.strip())
    if isinstance(value, float) and 0 < value <= 1:
        raise ValueError(f'{_BUDGET}; for this share write "{100 * value:g}%"')
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(_BUDGET)
    if 0 < value < LEAST_BUDGET:
        raise ValueError(f'{_BUDGET}; for a share write "{100 if value == 1 else min(value, 100)}%"')
    return MemoryBudget(byte_count=value)


def _parse_budget_text(text: str) -> MemoryBudget:
    if text.lower() == "auto":
        return MemoryBudget()
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            raise ValueError(f"{_BUDGET}; write a percentage above 0% and at most 100%")
        return MemoryBudget(share=percent / 100)
    if not text[-1:].isalpha():
        raise ValueError(f"{_BUDGET}; write a unit, or bytes as an integer without quotes")
    try:
        count = parse_byte_size(text)
    except ValueError:
        raise ValueError(_BUDGET) from None
    return parse_memory_budget(count)
