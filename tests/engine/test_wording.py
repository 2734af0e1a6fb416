from __future__ import annotations

import pytest

from longshore.engine.wording import byte_count


@pytest.mark.parametrize(
    "count, words",
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
def test_bytes_in_the_unit_that_suits_them(count: int, words: str) -> None:
    assert byte_count(count) == words
