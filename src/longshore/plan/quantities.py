"""Rates as people write them: ``400GB/s``, ``200Gbit/s``, ``989 TFLOP/s``."""

from __future__ import annotations

import re

from longshore.seam import parse_scaled


def parse_rate(text: str) -> float:
    """Return bytes a second: ``400GB/s``, ``3.35TB/s``, or in bits ``200Gbit/s`` (``200Gbps``).

    Raises:
        ValueError: the text is something else; the message says which texts are accepted.
    """
    what = "a bandwidth as 400GB/s, 3.35TB/s or 200Gbit/s"
    bits = re.fullmatch(r"(?P<value>.*?)\s*(bits?/s|bps)", text.strip(), re.IGNORECASE)
    # "Gb/s" is a gigabit to some and a gigabyte to others.
    if bits is None and re.search(r"[0-9kKMGTP]i?b/s\s*$", text):
        raise ValueError(f"{text!r}: is b a bit or a byte? write {what}")
    if bits is not None:
        return parse_scaled(bits["value"], ("",), what) / 8
    return parse_scaled(text, ("B/S", "BYTES/S", "BPS", ""), what)


def parse_flops(text: str) -> float:
    """Return operations a second: ``989TFLOP/s``, ``989 TFLOPS``, ``9.89e14``.

    Raises:
        ValueError: the text is something else; the message says which texts are accepted.
    """
    return parse_scaled(text, ("FLOP/S", "FLOPS", "FLOPS/S", ""), "operations a second as 989TFLOP/s")
