"""The native kernels on states that are not float32, against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.kernels import (
    SUPPORTED_DTYPES,
    UNSCALED,
    HostKernels,
    Outputs,
    Rule,
    Scale,
    SegmentTable,
    TileSegment,
    TorchRule,
    supported_instruction_sets,
)
from longshore.kernels.base import DTYPE_CODES
from longshore.kernels.buffers import SIGNED, UNSIGNED, EncodedBuffer, random_bits, rounding_key
from longshore.layout.formats import BLOCK_NUMEL, NEVER_NEGATIVE, Coding, StateFormat, stream_of
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.sgd import SGDRule
from tests.kernels.encoded import copy_of, empty_buffer, encoded_buffer, of_all_kinds, same_buffers, step_part
from tests.kernels.numbers import OTHER_RULES, RULES, awkward, rounded, same_bits, written

SCALE = Scale(0.7, 1 / 3)
PIECE_NUMEL = 1 << 16  # kPieceNumel of native/buffers.h
FORMATS = (StateFormat.BF16, StateFormat.EIGHT_BIT)
WITHOUT_MOMENTUM = OTHER_RULES[7]
ENCODABLE = [*RULES, *OTHER_RULES[:7]]
"""Rules of which each step changes the states."""
PLACES = (0, 64 * 5, (1 << 32) - 256, (1 << 33) + 64)
"""Where segments begin in their parameters; the upper half of a place changes within the third one."""
all_formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)


def numels(format: StateFormat) -> tuple[int, ...]:
    """Of segments; the first is cut into pieces for the threads."""
    return (PIECE_NUMEL + 640, 64, 192, 4096) if format is StateFormat.EIGHT_BIT else (PIECE_NUMEL + 77, 1, 63, 200)


def segments_of(
    format: StateFormat, gradient: torch.dtype, output: torch.dtype | None, source: EncodedBuffer
) -> list[TileSegment]:
    """Segments with gaps between them, from different places; outputs hold parameters of which some were written."""
    gap = BLOCK_NUMEL if format is StateFormat.EIGHT_BIT else 5
    found, offset = [], gap
    for index, numel in enumerate(numels(format)):
        master = awkward(numel, 7) if source.own_master else source.master[offset : offset + numel]
        parameter = None if output is None else written(master, output, index)
        coding = Coding(format, stream_of(3, f"{index}.weight"), PLACES[index])
        found.append(TileSegment(offset, of_all_kinds(numel, 50 + index).to(gradient), parameter, 0, coding))
        offset += numel + gap
    return found


def buffer_numel(format: StateFormat) -> int:
    return sum(numels(format)) + 5 * BLOCK_NUMEL


def expected_steps(
    source: EncodedBuffer,
    target: EncodedBuffer,
    segments: list[TileSegment],
    rule: Rule,
    outputs: Outputs,
    scale: Scale = SCALE,
) -> tuple[EncodedBuffer, list[torch.Tensor]]:
    """The oracle's buffer, and the masters of each segment."""
    target = copy_of(target)
    read = outputs is not Outputs.WRITTEN
    masters = [step_part(source, target, each, rule, scale, each.output if read else None) for each in segments]
    return target, masters


@pytest.mark.quick(0)
@all_formats
@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", ENCODABLE, ids=str)
@pytest.mark.parametrize("gradient_dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "output_dtype"),
    [
        (Outputs.WRITTEN, None),
        *((Outputs.WRITTEN, dtype) for dtype in SUPPORTED_DTYPES),
        *((Outputs.COMPARED, dtype) for dtype in SUPPORTED_DTYPES),
        (Outputs.MASTERS, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
def test_a_step_equals_the_oracles(
    kernels: HostKernels,
    format: StateFormat,
    rule: Rule,
    gradient_dtype: torch.dtype,
    outputs: Outputs,
    output_dtype: torch.dtype | None,
    in_place: bool,
) -> None:
    source = encoded_buffer(format, rule, buffer_numel(format), 1, outputs is Outputs.MASTERS)
    segments = segments_of(format, gradient_dtype, output_dtype, source)
    states = len(rule.states)
    target = copy_of(source) if in_place else empty_buffer(format, states, source.shape[1], source.own_master, 7.0)
    expected, masters = expected_steps(source, target, segments, rule, outputs)
    others = [each._replace(coding=each.coding._replace(stream=each.coding.stream + 1)) for each in segments]
    assert not same_buffers(expected, expected_steps(source, target, others, rule, outputs)[0])  # bits are random

    given = target if in_place else copy_of(source)
    kernels.step_tile(given, target, segments, [rule], SCALE, outputs)
    assert same_buffers(target, expected)
    assert in_place or same_buffers(given, source)
    for each, master in zip(segments, masters, strict=True):
        assert each.output is None or same_bits(each.output, rounded(master, each.output.dtype))
    # They are numbers of all kinds.
    for state, name in enumerate(rule.states):
        values = target.decoded(state, slice(BLOCK_NUMEL, numels(format)[0]), name in NEVER_NEGATIVE)
        assert values.isfinite().float().mean() > 0.5 and (values != 0).float().mean() > 0.05
        assert values.isnan().any() and (values.abs() < 2.0**-90).any()


@all_formats
def test_sgd_without_momentum_has_no_states(kernels: HostKernels, format: StateFormat) -> None:
    rule = WITHOUT_MOMENTUM
    assert rule.optional_states == 1
    source = encoded_buffer(format, rule, buffer_numel(format), 1, states=0)
    segments = segments_of(format, torch.bfloat16, torch.bfloat16, source)
    expected, masters = expected_steps(source, source, segments, rule, Outputs.WRITTEN)
    kernels.step_tile(source, source, segments, [rule], SCALE)
    assert source.nbytes == 4 * source.shape[1]
    assert same_buffers(source, expected)
    for each, master in zip(segments, masters, strict=True):
        assert each.output is not None and same_bits(each.output, rounded(master, torch.bfloat16))


@all_formats
def test_several_rules_of_a_tile_have_a_key_each(kernels: HostKernels, format: StateFormat) -> None:
    """Segments of parameters at different step counts."""
    rules = [replace(RULES[0], step=step) for step in (1, 2, 2**31, 2**40)]
    source = encoded_buffer(format, rules[0], buffer_numel(format), 1)
    segments = segments_of(format, torch.float32, None, source)
    expected = copy_of(source)
    for index, (each, rule) in enumerate(zip(segments, rules, strict=True)):
        segments[index] = each._replace(rule=index)
        step_part(source, expected, each, rule, UNSCALED)
    kernels.step_tile(source, source, segments, rules)
    assert same_buffers(source, expected)


@all_formats
@pytest.mark.parametrize("own_master", [False, True])
def test_a_table_of_addresses_steps_like_the_tile(kernels: HostKernels, format: StateFormat, own_master: bool) -> None:
    """As the repeated step has it; a segment without a gradient is not stepped."""
    rules = [RULES[0], replace(RULES[0], step=7)]
    outputs = Outputs.MASTERS if own_master else Outputs.COMPARED
    source = encoded_buffer(format, rules[0], buffer_numel(format), 1, own_master)
    segments = segments_of(format, torch.float32, torch.float32, source)
    expected = copy_of(source)
    masters = []
    for index, each in enumerate(segments):
        assert each.output is not None
        stepped = step_part(source, expected, each, rules[index % 2], SCALE, each.output) if index != 1 else None
        masters.append(each.output.clone() if stepped is None else stepped)
    code = DTYPE_CODES[torch.float32]
    rows = [(each.buffer_offset, each.gradient.numel(), 0, 0, code, code, *each.coding[1:]) for each in segments]
    gradients = [each.gradient.data_ptr() if index != 1 else 0 for index, each in enumerate(segments)]
    places = [each.output.data_ptr() for each in segments if each.output is not None]
    kernels.step_table(source, SegmentTable(rows), (gradients, places, [0, 1, 0, 1]), rules, SCALE, outputs)
    assert same_buffers(source, expected)
    for each, master in zip(segments, masters, strict=True):
        assert each.output is not None and same_bits(each.output, master)


@st.composite
def cuts(draw: st.DrawFn, numel: int, unit: int) -> list[tuple[int, int]]:
    places = draw(st.lists(st.integers(0, numel // unit - 1), max_size=12))
    return list(itertools.pairwise(sorted({0, numel, *(place * unit for place in places)})))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_cut_and_no_thread_changes_a_bit(kernels_of: Callable[..., HostKernels], data: st.DataObject) -> None:
    """Random bits belong to the elements' places in their parameter, from wherever it is counted."""
    format = data.draw(st.sampled_from(FORMATS), "format")
    unit = format.unit
    numel = data.draw(st.sampled_from([unit, 7 * unit, 40 * unit, 1100 * unit]), "numel")
    rule = data.draw(st.sampled_from(ENCODABLE), "rule")
    start = data.draw(st.sampled_from([0, 3, 2**26 - 1, 2**30 + 1]), "start") * unit
    offset = data.draw(st.integers(0, 3), "offset") * unit
    coding = Coding(format, stream_of(data.draw(st.integers(0, 5)), "weight"), start)
    gradient = of_all_kinds(numel, 5)
    source = encoded_buffer(format, rule, offset + numel, 1)
    whole = TileSegment(offset, gradient, None, 0, coding)
    expected, _ = expected_steps(source, source, [whole], rule, Outputs.WRITTEN)
    segments = [
        TileSegment(offset + begin, gradient[begin:end], None, 0, coding.behind(begin))
        for begin, end in data.draw(cuts(numel, unit), "cuts")
    ]
    isa = data.draw(st.sampled_from(supported_instruction_sets()), "instruction set")
    kernels_of(isa, data.draw(st.sampled_from([1, 2, 3, 7]), "threads")).step_tile(
        source, source, segments, [rule], SCALE
    )
    assert same_buffers(source, expected)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_random_bits_where_the_upper_half_of_a_place_changes(kernels: HostKernels, format: StateFormat) -> None:
    """Within a block of the loop, which adds to the lower half alone."""
    before = 64 if format is StateFormat.EIGHT_BIT else 37
    source = encoded_buffer(format, RULES[0], 4 * BLOCK_NUMEL, 1)
    gradient = torch.randn(source.shape[1])
    segment = TileSegment(0, gradient, None, 0, Coding(format, 9, (1 << 32) - before))
    expected, _ = expected_steps(source, source, [segment], RULES[0], Outputs.WRITTEN)
    kernels.step_tile(source, source, [segment], RULES[:1], SCALE)
    assert same_buffers(source, expected)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "sum", "momentum_buffer"])
def test_states_that_are_never_negative_are_those_of_the_native_code(kernels: HostKernels, name: str) -> None:
    """Which have the code without a sign: its numbers for the octave of the scale are not those of the other code."""
    by_name: dict[str, tuple[Rule, int]] = {
        "exp_avg": (RULES[0], 0),
        "exp_avg_sq": (RULES[0], 1),
        "sum": (OTHER_RULES[2], 0),
        "momentum_buffer": (OTHER_RULES[5], 0),
    }
    rule, state = by_name[name]
    assert rule.states[state] == name
    assert {each for rule in ENCODABLE for each in rule.states} == {*by_name}
    buffer = empty_buffer(StateFormat.EIGHT_BIT, len(rule.states), 4 * BLOCK_NUMEL)
    gradient = torch.full((4 * BLOCK_NUMEL,), -1.0)
    kernels.step_tile(buffer, buffer, [TileSegment(0, gradient, None, 0, Coding(StateFormat.EIGHT_BIT))], [rule])
    codes = buffer._codes[state].long()
    code = UNSIGNED if name in NEVER_NEGATIVE else SIGNED
    numbers = codes & code.nan
    assert (numbers >= code.one).all() and (numbers <= code.largest).all()
    assert ((numbers != codes) == (code.signed and not rule.maximize)).all()


# --- what is refused ---


@pytest.mark.parametrize(
    ("offset", "numel", "place", "message"),
    [
        (0, 65, 0, "segment 0 of the tile does not begin and end with blocks of 64 elements, as states of 8 bits do"),
        (0, 63, 0, "does not begin and end with blocks"),
        (32, 64, 0, "does not begin and end with blocks"),
        (0, 64, 1, "does not begin and end with blocks"),
        (0, 64, -64, "segment 0 of the tile begins before its parameter does"),
        (192, 128, 0, "segment 0 of the tile reaches past the end of the buffer"),
    ],
)
def test_segments_that_are_not_whole_blocks_are_refused(
    kernels: HostKernels, offset: int, numel: int, place: int, message: str
) -> None:
    buffer = encoded_buffer(StateFormat.EIGHT_BIT, RULES[0], 256, 1)
    before = copy_of(buffer)
    segment = TileSegment(offset, torch.zeros(numel), None, 0, Coding(StateFormat.EIGHT_BIT, 0, place))
    with pytest.raises(ValueError, match=message):
        kernels.step_tile(buffer, buffer, [segment], RULES[:1])
    assert same_buffers(buffer, before)


@all_formats
def test_buffers_that_do_not_fit_are_refused(kernels: HostKernels, format: StateFormat) -> None:
    buffer = encoded_buffer(format, RULES[0], 256, 1)
    for other, message in (
        (encoded_buffer(format, RULES[0], 320, 1), "source and target buffers differ in size"),
        (torch.zeros(3, 256), "source and target buffers differ in"),
        (torch.zeros(buffer.block.numel() // 3 + 1, 3), "source and target buffers differ in size"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.step_tile(buffer, other, [], RULES[:1])
    block = torch.zeros(buffer.block.numel() + 64)
    first, second = [EncodedBuffer(block[begin:][: block.numel() - 64], format, False, 3, 256) for begin in (0, 64)]
    with pytest.raises(ValueError, match="the source and target buffers overlap without being the same"):
        kernels.step_tile(first, second, [], RULES[:1])
    with pytest.raises(ValueError, match="a buffer of 3 arrays, and Lion has 2"):
        kernels.step_tile(buffer, buffer, [], OTHER_RULES[:1])
    with pytest.raises(ValueError, match="a step count below 1"):
        kernels.step_tile(buffer, buffer, [], [replace(RULES[0], step=0)])


@all_formats
def test_torch_does_not_step_encoded_states(kernels: HostKernels, format: StateFormat) -> None:
    buffer = encoded_buffer(format, RULES[0], 256, 1)
    rule = TorchRule("RMSprop", (("lr", 0.1),), (("square_avg", 1),), 1, True)
    with pytest.raises(ValueError, match=f"torch steps float32 states, not {format.value}"):
        kernels.step_tile(buffer, buffer, [], [rule])


TOP = 2.0**127 * (2 - 2.0**-7)  # the largest bfloat16


@pytest.mark.covering(2)
@all_formats
@pytest.mark.parametrize("special", [False, True], ids=["finite", "with infinity and NaN"])
@pytest.mark.parametrize(
    "rule", [RULES[0], next(rule for rule in OTHER_RULES if isinstance(rule, AdagradRule))], ids=str
)
def test_numbers_near_the_largest(kernels: HostKernels, format: StateFormat, rule: Rule, special: bool) -> None:
    """Finite numbers stay finite where rounding up would make them infinite; no number of a block is small."""
    numel, random = 64 * BLOCK_NUMEL, torch.Generator().manual_seed(0)
    states = len(rule.states)
    source = empty_buffer(format, states, numel)
    for state, name in enumerate(rule.states):
        # A sum grows from the largest number; moments shrink, from where the smallest is still near the largest.
        values = torch.full((numel,), TOP) if states == 1 else TOP * (0.6 + 0.4 * torch.rand(numel, generator=random))
        if name not in NEVER_NEGATIVE:
            values *= torch.randint(0, 2, (numel,), generator=random) * 2 - 1
        if special:
            values[3 :: 5 * BLOCK_NUMEL], values[7 :: 3 * BLOCK_NUMEL] = torch.inf, torch.nan
        source.encode(state, slice(0, numel), name in NEVER_NEGATIVE, values)
    gradient = torch.full((numel,), 1e18 if states == 1 else 0.0)
    segment = TileSegment(0, gradient, None, 0, Coding(format, stream_of(3, "weight"), 0))
    expected = copy_of(source)
    step_part(source, expected, segment, rule)
    target = copy_of(source)
    kernels.step_tile(target, target, [segment], [rule])
    assert same_buffers(target, expected)
    for state, name in enumerate(rule.states):
        values = target.decoded(state, slice(0, numel), name in NEVER_NEGATIVE)
        assert (values.abs() >= 2.0**126).float().mean() > 0.5 and values.isfinite().all() == (not special)


def at_the_edges(random: torch.Tensor) -> torch.Tensor:
    """Blocks of numbers that 8 bits have a rule for, given the random bits of their first state."""
    numel = BLOCK_NUMEL
    generator = torch.Generator().manual_seed(0)

    def some() -> torch.Tensor:
        signs = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
        return (1 + torch.rand(numel, generator=generator)) * signs

    power, small, zeros = some() / 2, some(), some()
    power[5] = 1.0  # the largest is a power of two
    small[5] *= 2.0**-18  # below the smallest code
    zeros[5], zeros[50] = 0.0, -0.0
    # What is dropped of these is half of a last place of the random bits below the next code.
    halves = (127 << 23 | (65535 - random) << 4 | 8).to(torch.int32).view(torch.float32)
    # The last two are below the least scale: themselves, and their squares.
    return torch.cat([halves, power, small, zeros, some() * 2.0**-97, some() * 2.0**-49])


FIRST_MOMENTUM = SGDRule(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, first=True)
"""Its state is the gradient itself."""


@pytest.mark.parametrize("rule", [FIRST_MOMENTUM, *OTHER_RULES[:4], RULES[0]], ids=str)
def test_blocks_at_the_edges_of_their_codes(kernels: HostKernels, rule: Rule) -> None:
    coding = Coding(StateFormat.EIGHT_BIT, stream_of(3, "weight"), 0)
    random = random_bits(rounding_key(coding.stream, rule.step), 0, BLOCK_NUMEL) & 0xFFFF
    segment = TileSegment(0, at_the_edges(random), None, 0, coding)
    found = empty_buffer(coding.format, len(rule.states), segment.gradient.numel())
    expected = copy_of(found)
    # From the second step on, what the first one encoded is decoded.
    for each in (rule, replace(rule, first=False) if isinstance(rule, SGDRule) else rule):
        step_part(copy_of(expected), expected, segment, each)
        kernels.step_tile(found, found, [segment], [each])
        assert same_buffers(found, expected)


@pytest.mark.covering(2)
@all_formats
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], ids=hex)
def test_any_nan_of_a_gradient_is_nan_in_the_states(kernels: HostKernels, format: StateFormat, bits: int) -> None:
    """Rounded as if they were numbers, some would be zero."""
    numel, rule = 32 * BLOCK_NUMEL, RULES[0]
    buffer = empty_buffer(format, len(rule.states), numel)
    gradient = torch.ones(numel)
    gradient.view(torch.int32)[:: BLOCK_NUMEL + 17] = bits  # one in a block, in each place of a vector register
    segment = TileSegment(0, gradient, None, 0, Coding(format, stream_of(3, "weight"), 0))
    kernels.step_tile(buffer, buffer, [segment], [rule])
    for state, name in enumerate(rule.states):
        values = buffer.decoded(state, slice(0, numel), name in NEVER_NEGATIVE)
        assert torch.equal(values.isnan(), gradient.isnan())


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], ids=hex)
def test_any_nan_of_a_master_is_nan_in_the_parameter(kernels: HostKernels, bits: int) -> None:
    """Rounded as if they were numbers, some would be zero or infinity."""
    numel = 3 * BLOCK_NUMEL
    buffer = torch.zeros(3, numel)
    buffer[0].view(torch.int32)[::17] = bits
    output = torch.zeros(numel, dtype=torch.bfloat16)
    kernels.step_tile(buffer, buffer, [TileSegment(0, torch.zeros(numel), output, 0)], [RULES[0]])
    assert torch.equal(output.isnan(), buffer[0].isnan()) and int(output.isnan().sum()) == -(-numel // 17)
