"""The formats of states, in plain torch: which numbers their codes have, how they are rounded, and the random bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.kernels.buffers import (
    LEAST_EXPONENT,
    SIGNED,
    UNSIGNED,
    ByteCode,
    decode_bfloat16,
    decode_bytes,
    encode_bfloat16,
    encode_bytes,
    random_bits,
    rounding_key,
    table_of,
)
from longshore.layout.formats import (
    BLOCK_NUMEL,
    EIGHT_BIT_LEAST_NUMEL,
    Coding,
    StateFormat,
    parse_state_format,
    stream_of,
)
from tests.kernels.numbers import LARGEST, awkward, same_bits, same_numbers

CODES = pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
ALL_RANDOM = torch.arange(1 << 16)
"""Every value that the random bits of one state have."""
INFINITY, NAN = math.inf, math.nan


def rounded(values: Tensor, random: Tensor | None = None) -> Tensor:
    return decode_bfloat16(encode_bfloat16(values, random))


def in_bytes(values: Tensor, code: ByteCode, random: Tensor | None = None) -> Tensor:
    return decode_bytes(*encode_bytes(values, code, random), code)


def block_with(value: float, largest: float = 1.5) -> Tensor:
    """A block for every random number, with the value first and something in the octave of the scale last."""
    blocks = torch.zeros(len(ALL_RANDOM), BLOCK_NUMEL)
    blocks[:, 0], blocks[:, -1] = value, largest
    return blocks.view(-1)


def for_all_random(value: float, code: ByteCode) -> Tensor:
    """What one value of a block becomes with every value of the random bits."""
    random = torch.full((len(ALL_RANDOM), BLOCK_NUMEL), 1 << 15)
    random[:, 0] = ALL_RANDOM
    return in_bytes(block_with(value), code, random.view(-1)).view(-1, BLOCK_NUMEL)[:, 0]


def float32(value: float) -> float:
    return float(torch.tensor(value))


# --- which numbers there are ---


def test_every_number_of_bfloat16_round_trips() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    values = decode_bfloat16(bits)
    assert torch.equal(encode_bfloat16(values, None)[~values.isnan()], bits[~values.isnan()])
    assert (encode_bfloat16(values, None)[values.isnan()] == 0x7FC0).all()
    for random in (0, 0xFFFF):  # what is a number of bfloat16 is not rounded
        again = encode_bfloat16(values, torch.full((1 << 16,), random))
        assert torch.equal(again[~values.isnan()], bits[~values.isnan()])


@CODES
@pytest.mark.parametrize("exponent", [LEAST_EXPONENT, 100, 127, 254])
def test_every_code_round_trips(code: ByteCode, exponent: int) -> None:
    """In a block whose scale is of any size."""
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 1).repeat(1, BLOCK_NUMEL)
    codes[:, -1] = code.largest - 1  # by which the scale is that of the block
    if exponent == 254:  # twice that scale is no float32
        codes = codes[(codes[:, 0] & code.nan) != code.largest]
    scales = torch.full((len(codes),), exponent << 23, dtype=torch.int32).view(torch.float32)
    values = decode_bytes(codes.view(-1), scales, code)
    for random in (None, torch.zeros(values.numel()).long(), torch.full((values.numel(),), 0xFFFF)):
        again, their_scales = encode_bytes(values, code, random)
        assert torch.equal(their_scales, scales)
        again, kept = again.view(-1, BLOCK_NUMEL)[:, 0], codes[:, 0].clone()
        kept[values.view(-1, BLOCK_NUMEL)[:, 0].isnan()] = code.nan  # every NaN becomes the same one
        assert torch.equal(again, kept)


@CODES
def test_the_codes_are_small_floating_point_numbers_in_order(code: ByteCode) -> None:
    table = table_of(code)
    finite = table[: code.infinity]
    assert table[0] == 0 and table[code.infinity] == INFINITY and table[code.nan].isnan()
    assert table[code.one] == 1 and (finite.diff() > 0).all()
    for number in range(1, code.infinity):
        octave, mantissa = divmod(number - code.one, 1 << code.mantissa_bits)
        assert finite[number] == 2.0**octave * (1 + mantissa / 2**code.mantissa_bits)
    assert finite[code.largest] == 2
    if code.signed:
        assert same_bits(table[128:255], -table[:127])


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-6, 1.0, 1e30])
@CODES
def test_encoding_what_was_decoded_changes_nothing(code: ByteCode, size: float) -> None:
    """Even in a block that lost the number its scale was made for."""
    values = torch.randn(500 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1)) * size
    values = torch.where(torch.arange(values.numel()) % 7 == 3, awkward(values.numel(), 2, size), values)
    once = in_bytes(values if code.signed else values.abs(), code)
    largest = once.view(-1, BLOCK_NUMEL).nan_to_num(0.0, 0.0, 0.0).abs().argmax(1)
    lost = once.clone().view(-1, BLOCK_NUMEL)
    lost[torch.arange(500), largest] = 0.0
    for given in (once, lost.view(-1)):
        assert same_bits(in_bytes(given, code), given)
        assert same_bits(in_bytes(given, code, torch.full(given.shape, 0xFFFF)), given)


# --- to nearest ---


def test_bfloat16_to_nearest_is_torchs() -> None:
    values = torch.cat([awkward(100_000, 1), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])])
    values = values[(values.abs() < 3.38e38) | ~values.isfinite()]  # those near the largest stay finite here
    assert same_numbers(rounded(values), values.bfloat16().float())
    assert rounded(torch.tensor([LARGEST, -LARGEST])).tolist() == [3.3895313892515355e38, -3.3895313892515355e38]


@CODES
def test_bytes_to_nearest(code: ByteCode) -> None:
    """No code is nearer; of two equally near ones it is the one further from zero."""
    values = torch.rand(200 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1)) ** 8
    values.view(-1, BLOCK_NUMEL)[:, 0] = 1.25  # their scale is 1
    table = table_of(code)[: code.infinity].double()
    values = torch.cat([values, block_with(float((table[9] + table[10]) / 2))[:BLOCK_NUMEL]])
    found = in_bytes(values, code).double()
    least = table[1]
    large = values >= least
    distances = (values[large].double()[:, None] - table[None]).abs()
    assert torch.equal((values[large].double() - found[large]).abs(), distances.amin(1))
    assert found[-BLOCK_NUMEL] == table[10]
    tiny = values[~large].double()
    assert len(tiny) > 20
    expected = torch.where(tiny > least / 2 if code.signed else tiny > 0, least, 0.0)
    assert torch.equal(found[~large], expected)


# --- at random ---


@pytest.mark.parametrize("value", [1.0, 1.001, 3.14159, -1e-5, 6e-39, 2.0**-149, -1e30])
def test_bfloat16_is_rounded_to_one_of_two_neighbours_and_on_average_to_itself(value: float) -> None:
    found = rounded(torch.full((1 << 16,), value), ALL_RANDOM).double()
    exact = float(torch.full((), value))
    assert found.mean() == exact
    bits = torch.full((1,), value).view(torch.int32)
    below, above = ((bits >> 16) << 16), ((bits >> 16) + 1) << 16
    neighbours = {float(each.view(torch.float32)) for each in (below, above)}
    assert {*found.tolist()} == ({exact} if exact in neighbours else neighbours)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("value", [1.0, 1.01, 0.7, 1.999, 0.0123, 1.7e-3, 3e-4, 1e-6])
@pytest.mark.parametrize("sign", [1, -1])
@CODES
def test_bytes_are_rounded_to_one_of_two_neighbours_and_on_average_to_themselves(
    code: ByteCode, value: float, sign: int
) -> None:
    if sign < 0 and not code.signed:
        return
    found, exact = for_all_random(sign * value, code).double() * sign, float32(value)
    table = table_of(code)[: code.infinity].double()
    assert table[code.one] == 1  # the scale of these blocks
    at = int((table <= exact).sum())
    low, high = float(table[at - 1]), float(table[min(at, code.largest)])
    assert {*found.tolist()} <= {low, high}
    if not code.signed and low == 0:
        assert {*found.tolist()} == {high}  # a denominator is never made zero
        return
    step = high - low
    assert abs(float(found.mean()) - exact) <= step * 2.0**-16, (found.mean(), exact)
    assert len({*found.tolist()}) == (1 if exact == low else 2)


@pytest.mark.parametrize("half", [0, 1])
def test_the_random_bits_of_many_steps_are_fair(half: int) -> None:
    """Within four standard errors, for numbers that are often rounded up and for those that hardly ever are."""
    numel, steps = 2048, 200
    share = torch.tensor([0.5, 0.1, 0.9, 0.001]).repeat(numel // 4)
    values = 1.0 + share * 2.0**-7
    total = torch.zeros(numel, dtype=torch.float64)
    for step in range(1, steps + 1):
        random = random_bits(rounding_key(stream_of(0, "weight"), step), 0, numel)
        total += rounded(values, random >> 16 if half else random & 0xFFFF).double() - 1.0
    for index in range(4):
        chance = float(share[index].double())
        mean = float(total[index::4].mean()) / steps * 2.0**7
        error = math.sqrt(chance * (1 - chance) / (steps * numel / 4))
        assert abs(mean - chance) <= 4 * error, (chance, mean, error)
        # Of one element as of all: its steps are as independent as its neighbours are.
        spread = float(total[index::4].var()) * 2.0**14 / (steps * chance * (1 - chance))
        assert 0.75 < spread < 1.3, spread


# --- what is special ---


@pytest.mark.parametrize("random", [None, 0, 1 << 15, 0xFFFF])
def test_kinds_of_numbers_stay(random: int | None) -> None:
    values = torch.tensor([0.0, -0.0, INFINITY, -INFINITY, NAN, -NAN, LARGEST, -LARGEST, 1.0])
    bits = None if random is None else torch.full(values.shape, random)
    found = rounded(values, bits)
    assert found[:4].view(torch.int32).tolist() == values[:4].view(torch.int32).tolist()
    assert found[4:6].isnan().all() and found[6:].isfinite().all()

    block = torch.cat([values, torch.ones(BLOCK_NUMEL - len(values))])
    bits = None if random is None else torch.full(block.shape, random)
    found = in_bytes(block, SIGNED, bits)
    assert found[:4].view(torch.int32).tolist() == values[:4].view(torch.int32).tolist()
    assert found[4:6].isnan().all() and found[6:8].isfinite().all() and found[6] == -found[7] != 0

    found = in_bytes(block + 0.0, UNSIGNED, bits)
    assert found[0] == 0 and not found[:2].signbit().any() and found[2] == INFINITY
    assert found[[3, 4, 5, 7]].isnan().all()  # no negative number is one of this code
    assert found[6].isfinite() and found[6] > 1e38


@pytest.mark.parametrize("value", [2.0**-149, 1e-40, 1e-38, 1e-20, 1e-7])
@pytest.mark.parametrize("largest", [1e-44, 1.0, 3e38])
def test_what_is_above_zero_and_never_negative_does_not_become_zero(value: float, largest: float) -> None:
    block = torch.full((BLOCK_NUMEL,), value)
    block[5], block[6] = max(largest, value), 0.0
    for random in (None, *(torch.full(block.shape, bits) for bits in (0, 0xFFFF))):
        found = in_bytes(block, UNSIGNED, random)
        assert (found > 0).tolist() == [place != 6 for place in range(BLOCK_NUMEL)]


@CODES
def test_the_largest_finite_number_of_a_block_is_above_its_scale_and_at_most_twice_it(code: ByteCode) -> None:
    values = torch.zeros(7, BLOCK_NUMEL)
    values[0, 3], values[1, 63], values[2, 0], values[4, 1], values[5, 2] = 0.75, 1e-45, LARGEST, 1.99, 2.0
    values[6, 4] = 2.0 + 2.0**-22
    for special in ([], [INFINITY], [NAN], [INFINITY, NAN, -INFINITY if code.signed else NAN]):
        given = values.clone()
        given[:, 10 : 10 + len(special)] = torch.tensor(special)
        _, scales = encode_bytes(given.view(-1), code, None)
        least = 2.0 ** (LEAST_EXPONENT - 127)
        assert scales.tolist() == [0.5, least, 2.0**127, least, 1.0, 1.0, 2.0]


# --- random bits ---

KEY = rounding_key(stream_of(3, "decoder.weight"), 17)


def bits_of(seed: int = 3, name: str = "decoder.weight", step: int = 17, place: int = 0, numel: int = 4096) -> Tensor:
    return random_bits(rounding_key(stream_of(seed, name), step), place, numel)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 4}, {"seed": -3}, {"name": "decoder.bias"}, {"step": 18}, {"place": 4096}, {"place": 1 << 32}],
    ids=str,
)
def test_random_bits_are_others_with_another(changed: dict[str, Any]) -> None:
    """seed, name, step or place: each bit is the same in half of the elements."""
    differing = bits_of() ^ bits_of(**changed)
    for bit in range(32):
        count = int((differing >> bit & 1).sum())
        assert abs(count - 2048) < 5 * 32, bit  # 32 is the standard error
    # Neither are they those of other elements.
    for half in (lambda bits: bits & 0xFFFF, lambda bits: bits >> 16):
        assert len({*half(bits_of()[:64]).tolist()} & {*half(bits_of(**changed)[:64]).tolist()}) < 4


def test_the_halves_are_told_apart() -> None:
    differing = (bits_of() & 0xFFFF) ^ (bits_of() >> 16)
    for bit in range(16):
        assert abs(int((differing >> bit & 1).sum()) - 2048) < 5 * 32, bit


@pytest.mark.parametrize("place", [0, 1, 12_345, (1 << 32) - 2000, (1 << 40) + 7])
def test_random_bits_belong_to_places(place: int) -> None:
    """However they are asked for."""
    together = random_bits(KEY, place, 4096)
    apart = torch.cat([random_bits(KEY, place + begin, min(700, 4096 - begin)) for begin in range(0, 4096, 700)])
    assert torch.equal(together, apart)
    coding = Coding(StateFormat.BF16, 5, place).behind(700)
    assert coding == Coding(StateFormat.BF16, 5, place + 700)
    assert together.min() >= 0 and together.max() < 1 << 32
    assert len({*together.tolist()}) > 4090


@pytest.mark.medium
@pytest.mark.parametrize(
    "bits",
    [
        lambda: random_bits(KEY, 0, 1 << 18),
        lambda: random_bits(KEY, 1 << 34, 1 << 18),
        lambda: torch.cat([bits_of(step=step, numel=1) for step in range(1, 30_000)]),
        lambda: torch.cat([bits_of(name=f"layers.{index}.weight", numel=1) for index in range(30_000)]),
    ],
    ids=["places", "high_places", "steps", "names"],
)
def test_random_bits_are_uniform(bits: Callable[[], Tensor]) -> None:
    """Each byte, and each byte with the one of its neighbour: chi-square, whose standard deviation is sqrt(2 * 255)."""
    found = bits()
    for shift in (0, 8, 16, 24):
        byte = found >> shift & 0xFF
        for values in (byte, (byte[1:] - byte[:-1]) & 0xFF):
            counts = torch.bincount(values, minlength=256).double()
            expected = len(values) / 256
            chi_square = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255), (shift, chi_square)


# --- numbers that never change, as checkpoints and published results depend on them ---

GOLDEN_STREAM = 18076598823414487050
GOLDEN_KEYS = [10587928920813820284, 3243067669863809851, 7813086030020725194]
GOLDEN_BITS = [834433530, 3174025195, 2010756101, 1427453877]
GOLDEN_BITS_BEYOND = [2390411695, 703479384, 3444413412, 2490576404]
GOLDEN_UNSIGNED = [0, 101, 149, 176, 197, 212, 225, 235, 245, 253]
GOLDEN_SIGNED = [128, 128, 148, 177, 196, 212, 224, 236, 245, 253]
GOLDEN_BFLOAT16 = [0, 13821, 14588, 15028, 15356, 15601, 15796, 15971, 16125, 16256]


def test_golden_numbers_of_the_random_bits() -> None:
    assert stream_of(0, "weight") == GOLDEN_STREAM
    assert [rounding_key(stream_of(0, "weight"), step) for step in (1, 2, 1 << 40)] == GOLDEN_KEYS
    key = GOLDEN_KEYS[0]
    assert random_bits(key, 0, 4).tolist() == GOLDEN_BITS
    assert random_bits(key, (1 << 32) - 2, 4).tolist() == GOLDEN_BITS_BEYOND


def test_golden_numbers_of_the_codes() -> None:
    x = torch.arange(BLOCK_NUMEL) / 63
    values = x * x * x * x * x * x
    random = bits_of(0, "weight", 1, numel=BLOCK_NUMEL)
    assert encode_bytes(values, UNSIGNED, random & 0xFFFF)[0][::7].tolist() == GOLDEN_UNSIGNED
    assert encode_bytes(-values, SIGNED, random >> 16)[0][::7].tolist() == GOLDEN_SIGNED
    assert encode_bfloat16(values, random >> 16)[::7].tolist() == GOLDEN_BFLOAT16


# --- which format, and how large ---


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 64), StateFormat.EIGHT_BIT),
        ((63, 64), StateFormat.BF16),  # below 4096
        ((4096,), StateFormat.BF16),  # one dimension
        ((100, 96), StateFormat.BF16),  # rows of no whole blocks
        ((64, 4, 16), StateFormat.EIGHT_BIT),
        ((), StateFormat.BF16),
        ((0, 64), StateFormat.BF16),
    ],
)
def test_which_parameters_have_states_of_8_bits(shape: tuple[int, ...], expected: StateFormat) -> None:
    assert EIGHT_BIT_LEAST_NUMEL == 64 * 64
    assert StateFormat.EIGHT_BIT.of_parameter(shape) is expected
    assert StateFormat.BF16.of_parameter(shape) is StateFormat.BF16
    assert StateFormat.FP32.of_parameter(shape) is StateFormat.FP32


def test_bytes_of_a_buffer() -> None:
    assert [each.buffer_bytes(3, 64 * 10) / 640 for each in StateFormat] == [12.0, 8.0, 6.125]
    assert [each.buffer_bytes(2, 64 * 10, own_master=True) for each in StateFormat] == [2560, 1280, 680]
    assert StateFormat.BF16.buffer_bytes(2, 3) == 12 + 8  # states begin at whole words


@pytest.mark.parametrize("value", ["int8", "FP32", None, 8, True])
def test_formats_that_do_not_exist_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="states is the format of the optimizer's states, 'fp32', 'bf16', '8bit', not"):
        parse_state_format(value)
    assert [parse_state_format(each.value) for each in StateFormat] == list(StateFormat)
