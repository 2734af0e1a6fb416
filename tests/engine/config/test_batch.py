"""BatchNumbers arithmetic."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.compat.config.load import DEEPSPEED
from longshore.engine.config import Config, ConfigError
from longshore.engine.config.model import BatchNumbers, resolve

SMALL = st.integers(1, 12)


@given(SMALL, SMALL, SMALL, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_whatever_is_left_out_follows(micro: int, steps: int, ranks: int, given_: tuple[bool, bool, bool]) -> None:
    whole = BatchNumbers(micro * steps * ranks, micro, steps)
    left = BatchNumbers(*(number if keep else None for number, keep in zip(whole, given_, strict=True)))
    found = resolve(left, ranks)
    assert found.train == (found.micro or 0) * (found.steps or 0) * ranks
    assert all(number is None or number == result for number, result in zip(left, found, strict=True))
    if sum(given_) >= 2:
        assert found == whole


def test_what_is_assumed() -> None:
    assert resolve(BatchNumbers(None, None, None), 4) == (4, 1, 1)
    assert resolve(BatchNumbers(8, None, None), 4) == (8, 2, 1)
    assert resolve(BatchNumbers(None, 3, None), 4) == (12, 3, 1)


@given(st.integers(1, 60), SMALL | st.none(), SMALL | st.none(), SMALL)
def test_every_change_that_an_error_proposes_works(
    train: int, micro: int | None, steps: int | None, ranks: int
) -> None:
    numbers = BatchNumbers(train, micro, steps)
    try:
        resolve(numbers, ranks)
        return
    except ValueError as error:
        text = str(error)
    proposals = 0
    names = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    for field, name in zip(BatchNumbers._fields, names, strict=True):
        found = re.search(rf"(?:change|, or) {name} to (\d+)(?: or (\d+))?", text)
        for number in found.groups() if found else ():
            if number is not None:
                resolve(numbers._replace(**{field: int(number)}), ranks)
                proposals += 1
    assert proposals >= 1


@pytest.mark.parametrize("train", [10**18 + 9, 2**63 - 25, 2**62])
@pytest.mark.parametrize("micro", [10**17, 3**37])
def test_large_numbers_have_a_proposal_too(train: int, micro: int) -> None:
    """The first two are primes, whose divisors were searched among all numbers up to ``micro``."""
    with pytest.raises(ValueError, match="change train_batch_size to"):
        resolve(BatchNumbers(train, micro, None), 1)


def test_a_product_of_more_than_64_bits() -> None:
    assert resolve(BatchNumbers(None, 2**31, 2**31 - 1), 2).train == 2**63 - 2**32
    with pytest.raises(ValueError, match="= 9223372036854775808, and integers have at most 64 bits; lower one"):
        resolve(BatchNumbers(None, 2**31, 2**31), 2)


def test_the_words() -> None:
    with pytest.raises(ValueError, match="is not") as caught:
        resolve(BatchNumbers(12, 2, 2), 2, DEEPSPEED)
    assert str(caught.value) == (
        "must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, and 12 is not "
        "train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x 2 ranks = 8; change train_batch_size to 8, "
        "or train_micro_batch_size_per_gpu to 3, or gradient_accumulation_steps to 3"
    )
    with pytest.raises(ValueError, match="10 is not a multiple of 4 ranks = 4; change train_batch_size to 8 or 12"):
        resolve(BatchNumbers(10, None, None), 4)
    with pytest.raises(ValueError, match="change train_batch_size to 10 or 15, or micro_batch_size to 4"):
        resolve(BatchNumbers(12, 5, None), 1)
    with pytest.raises(ValueError, match="a number of ranks, at least 1, not 0"):
        resolve(BatchNumbers(1, 1, 1), 0)


def test_before_the_ranks_are_known() -> None:
    assert resolve(BatchNumbers(8, 2, None), None) == (8, 2, None)
    with pytest.raises(ValueError, match="9 is not a multiple of micro_batch_size 2 x gradient_accumulation_steps 2"):
        resolve(BatchNumbers(9, 2, 2), None)


def test_resolved() -> None:
    config = Config(train_batch_size=16, gradient_accumulation_steps=2, stage=2)
    resolved = config.resolved(4)
    assert resolved == Config(train_batch_size=16, micro_batch_size=2, gradient_accumulation_steps=2, stage=2)
    assert config.micro_batch_size is None
    with pytest.raises(ConfigError, match="change train_batch_size to 12 or 18"):
        config.resolved(3)
