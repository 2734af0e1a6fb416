"""Quantities as people write them: ``2TB``, ``400GB/s``, ``64 GiB``, ``989 TFLOP/s``."""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes: ``2TB``, ``64GiB``, ``1.5 GB``, ``1e9``. Decimal prefixes are powers of 1000, those with ``i`` of 1024.

    Raises:
        ValueError: something else; says what it takes.
    """
    value = _parse(text, ("B", "BYTES", "BYTE", ""), "a size in bytes as 80GB, 64GiB or 2TB")
    return round(value)


def parse_rate(text: str) -> float:
    """Bytes a second: ``400GB/s``, ``3.35TB/s``, ``200Gbit/s`` (``200Gbps``: eight of them are a byte).

    Raises:
        ValueError: something else; says what it takes.
    """
    what = "a bandwidth as 400GB/s, 3.35TB/s or 200Gbit/s"
    bits = re.fullmatch(r"(?P<value>.*?)\s*(bits?/s|bps)", text.strip(), re.IGNORECASE)
    # "Gb/s" is a gigabit to some and a gigabyte to others.
    if bits is None and re.search(r"[0-9kKMGTP]i?b/s\s*$", text):
        raise ValueError(f"{text!r}: is b a bit or a byte? write {what}")
    if bits is not None:
        return _parse(bits["value"], ("",), what) / 8
    return _parse(text, ("B/S", "BYTES/S", "BPS", ""), what)


def parse_flops(text: str) -> float:
    """Operations a second: ``989TFLOP/s``, ``989 TFLOPS``, ``9.89e14``.

    Raises:
        ValueError: something else; says what it takes.
    """
    return _parse(text, ("FLOP/S", "FLOPS", "FLOPS/S", ""), "operations a second as 989TFLOP/s")


def _parse(text: str, units: tuple[str, ...], what: str) -> float:
    found = _NUMBER.fullmatch(text)
    suffix = found[2].upper().replace(" ", "") if found else ""
    scales = [
        _PREFIXES[suffix.removesuffix(unit)]
        for unit in units
        if suffix.endswith(unit) and suffix.removesuffix(unit) in _PREFIXES
    ]
    value = float(found[1].replace(",", "").replace("_", "")) if found else math.nan
    if found is None or not scales or not math.isfinite(value):
        raise ValueError(f"{text!r} is not {what}; write it so")
    if value <= 0:
        raise ValueError(f"{text!r} is not above zero; write {what}")
    return value * scales[0]
