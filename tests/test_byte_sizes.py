from __future__ import annotations

from typing import Any

import pytest

from longshore.byte_sizes import MemoryBudget, format_byte_size, parse_byte_size, parse_memory_budget


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2TB", 2 * 10**12),
        ("64GiB", 64 * 2**30),
        (" 1.5 gb ", 1_500_000_000),
        ("80G", 80 * 10**9),
        ("512MiB", 2**29),
        ("1e9", 10**9),
        ("1.5e9", 1_500_000_000),
        ("1,024", 1024),
        ("1_000 B", 1000),
        ("1.5 mb", 1_500_000),
        ("100K", 100_000),
        ("1.3kB", 1300),
        ("5", 5),
        (5, 5),
        ("9007199254740993", 2**53 + 1),
        (2**63 - 1, 2**63 - 1),
        ("1PiB", 2**50),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_byte_size(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "12 parsecs",
        "GB",
        "-1GB",
        "0GB",
        "0.2",
        "1GB/s",
        "nan",
        "1e999",
        "5 Gb/s",
        "9" * 400,
        str(2**63),
        "1e308GB",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"80GB, 64GiB or 2TB"):
        parse_byte_size(text)


@pytest.mark.parametrize("text", [0, -1, True, 1.5, None, 2**63, 1 << 20_000], ids=lambda value: "value")
def test_what_is_no_number_of_bytes(text: Any) -> None:
    with pytest.raises(ValueError, match=r"80GB, 64GiB or 2TB"):
        parse_byte_size(text)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 2**10, "1023.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (2**41, "2,048.0 GiB"),
    ],
)
def test_sizes_are_printed_in_the_unit_that_suits_them(count: int, words: str) -> None:
    assert format_byte_size(count) == words


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("auto", MemoryBudget()),
        (" Auto ", MemoryBudget()),
        ("25%", MemoryBudget(share=0.25)),
        ("12.5 %", MemoryBudget(share=0.125)),
        ("100%", MemoryBudget(share=1.0)),
        ("8GiB", MemoryBudget(byte_count=8 * 2**30)),
        ("1.5e9 B", MemoryBudget(byte_count=1_500_000_000)),
        (0, MemoryBudget(byte_count=0)),
        (1024, MemoryBudget(byte_count=1024)),
        (2**40, MemoryBudget(byte_count=2**40)),
    ],
)
def test_budgets(value: str | int, budget: MemoryBudget) -> None:
    assert parse_memory_budget(value) == budget


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1.0, 'for this share write "100%"'),
        (0.25, 'for this share write "25%"'),
        (1, 'for a share write "100%"'),
        (25, 'for a share write "25%"'),
        (1023, 'for a share write "100%"'),
        (0.0, "or 0 for none"),
        (8e9, "an integer number of bytes"),
        ("0%", "write a percentage above 0% and at most 100%"),
        ("101%", "write a percentage above 0% and at most 100%"),
        ("nan%", "write a percentage above 0% and at most 100%"),
        ("%", "write a percentage above 0% and at most 100%"),
        ("1.0", "write a unit"),
        ("8000000000", "or bytes as an integer without quotes"),
        ("0GiB", "a size such as"),
        ("25B", 'for a share write "25%"'),
        ("all", "a size such as"),
        ("", "write a unit"),
        (-1, "at least 1024"),
        (True, "at least 1024"),
        (None, "at least 1024"),
        ([1], "at least 1024"),
        (2**63, "at least 1024"),
    ],
)
def test_what_is_no_budget(value: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=rf'^must be "auto", a percentage such as "25%".*{hint}'):
        parse_memory_budget(value)
