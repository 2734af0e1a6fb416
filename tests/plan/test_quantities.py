"""Quantities as people write them."""

from __future__ import annotations

import pytest

from longshore.plan.quantities import parse_flops, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400GB/s", 400e9),
        ("3.35TB/s", 3.35e12),
        ("200Gbit/s", 25e9),
        ("400 Gbps", 50e9),
        ("50GiB/s", 50 * 2**30),
        ("1e10", 1e10),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


def test_operations() -> None:
    assert parse_flops("989TFLOP/s") == parse_flops("989 TFLOPS") == 989e12


@pytest.mark.parametrize("text", ["", "fast", "1 GHz", "0GB/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"400GB/s, 3.35TB/s or 200Gbit/s"):
        parse_rate(text)


def test_b_may_be_a_bit_or_a_byte() -> None:
    with pytest.raises(ValueError, match=r"'400Gb/s': is b a bit or a byte\? write .* 200Gbit/s"):
        parse_rate("400Gb/s")
