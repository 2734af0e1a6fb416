"""The Triton kernels against the host kernels, bit for bit: on CUDA, or in Triton's interpreter without one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from longshore.kernels import SUPPORTED_DTYPES, UNSCALED, DeviceKernels, HostKernels, Outputs, Rule, Scale, TileSegment
from longshore.kernels.buffers import EncodedBuffer, block_of, new_buffer
from longshore.kernels.reference import checksum, checksums, float32_bytes
from longshore.layout.formats import BLOCK_NUMEL, NEVER_NEGATIVE, Coding, StateFormat, stream_of
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.muon import UpdateRule
from longshore.optim.rules.sgd import SGDRule
from tests.kernels.device_kernels import DEVICE, ON_CUDA, device_kernels
from tests.kernels.encoded import copy_of, empty_buffer, encoded_buffer, of_all_kinds, same_buffers, step_part
from tests.kernels.numbers import MOMENTUM_RULES, RULES, awkward, buffer_of, rounded, same_bits, written
from tests.support import sum_of_squares

pytestmark = [pytest.mark.gpu] if ON_CUDA else []

SCALE = Scale(0.7, 1 / 3)
BLOCK = 1024
NUMELS = (BLOCK + 77, 1, 300, 2 * BLOCK, 31)

TABLES: dict[str, tuple[int, Sequence[Rule]]] = {
    "adam": (3, RULES),
    "adam_uncorrected": (3, [replace(rule, bias_correction=False) for rule in RULES]),
    "lion": (2, [LionRule(1e-3, 0.9, 0.99, 0.1), LionRule(0.1, 0.0, 0.5, 0.0, maximize=True)]),
    "adagrad": (
        2,
        [AdagradRule(0.1, 0.01, 1e-10, 0.0, step=7), AdagradRule(0.1, 0.0, 1e-40, 0.1, step=1, maximize=True)],
    ),
    "sgd": (1, [SGDRule(0.1, 0.0, 0.0, 0.0, False, True), SGDRule(0.1, 0.0, 0.0, 0.1, False, False, maximize=True)]),
    "momentum": (
        2,
        [
            SGDRule(0.1, 0.9, 0.0, 0.0, False, False),
            SGDRule(0.1, 0.9, 0.5, 0.1, False, True),
            SGDRule(0.1, 0.9, 0.0, 0.1, True, False, maximize=True),
            SGDRule(0.1, 0.0, 0.0, 0.1, False, False),
        ],
    ),
    "muon's update": (1, [UpdateRule(2e-2, 0.998), UpdateRule(0.1, 1.0)]),
    "muon's momentum": (1, MOMENTUM_RULES),
}
"""Arrays of a buffer, and rules that all take part in one tile."""


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceKernels]:
    with device_kernels() as kernels:
        yield kernels


@pytest.fixture(scope="module")
def host() -> HostKernels:
    return HostKernels(threads=2)


def buffers(arrays: int, numel: int, seed: int) -> Tensor:
    return torch.stack([*buffer_of(numel, seed)[: max(1, arrays - 1)], awkward(numel, seed + 7, 1e-4).abs()][:arrays])


def segments_of(numels: Sequence[int], rules: int, dtypes: Sequence[tuple[Any, Any]]) -> list[TileSegment]:
    """Segments with gaps between them; rules and dtypes (gradient's, output's or None) take turns."""
    segments, offset = [], 3
    for index, numel in enumerate(numels):
        gradient_dtype, output_dtype = dtypes[index % len(dtypes)]
        output = None if output_dtype is None else torch.full((numel,), 7.0, dtype=output_dtype)
        segments.append(TileSegment(offset, awkward(numel, 50 + index).to(gradient_dtype), output, index % rules))
        offset += numel + 5
    return segments


def moved(segments: Sequence[TileSegment]) -> list[TileSegment]:
    """The same segments on the device, in memory of their own."""
    return [
        segment._replace(
            gradient=segment.gradient.to(DEVICE, copy=True),
            output=None if segment.output is None else segment.output.to(DEVICE, copy=True),
        )
        for segment in segments
    ]


# --- step_tile ---


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize("table", TABLES)
def test_a_tile_equals_the_host_kernels(device: DeviceKernels, host: HostKernels, table: str, in_place: bool) -> None:
    arrays, rules = TABLES[table]
    dtypes = [(gradient, output) for gradient in SUPPORTED_DTYPES for output in (None, *SUPPORTED_DTYPES)]
    segments = segments_of([*NUMELS, *[40 + i for i in range(len(dtypes))]], len(rules), dtypes)
    last = segments[-1]
    source = buffers(arrays, last.buffer_offset + last.gradient.numel() + 9, 1)
    target = source if in_place else torch.full_like(source, 7.0)
    device_segments, device_source = moved(segments), source.to(DEVICE, copy=True)
    device_target = device_source if in_place else target.to(DEVICE, copy=True)
    before = source.clone()
    host.step_tile(source, target, segments, rules, SCALE)
    device.step_tile(device_source, device_target, device_segments, rules, SCALE)
    assert same_bits(device_target.cpu(), target)
    assert same_bits(device_source.cpu(), target if in_place else before)
    for found, expected in zip(device_segments, segments, strict=True):
        assert same_bits(found.gradient.cpu(), expected.gradient)
        if expected.output is not None:
            assert found.output is not None and same_bits(found.output.cpu(), expected.output)
    # The comparison is of numbers, and of special ones.
    changed = target[0].view(torch.int32) != before[0].view(torch.int32)
    assert changed.float().mean() > 0.5 and target.isfinite().float().mean() > 0.5
    assert target.isnan().any() and ((target != 0) & (target.abs() < 2.0**-126)).any()


@pytest.mark.parametrize("table", [table for table in TABLES if table != "muon's momentum"])
def test_elements_that_are_not_their_rounded_masters_are_the_masters(
    device: DeviceKernels, host: HostKernels, table: str
) -> None:
    arrays, rules = TABLES[table]
    dtypes = [(torch.float32, output) for output in SUPPORTED_DTYPES]
    segments = segments_of(NUMELS, len(rules), dtypes)
    last = segments[-1]
    buffer = buffers(arrays, last.buffer_offset + last.gradient.numel(), 1)
    for seed, (offset, gradient, output, *_) in enumerate(segments):
        assert output is not None
        output.copy_(written(buffer[0, offset : offset + gradient.numel()], output.dtype, seed))
    device_segments, found = moved(segments), buffer.to(DEVICE, copy=True)
    ignored = buffer.clone()
    host.step_tile(ignored, ignored, [each._replace(output=None) for each in segments], rules, SCALE)
    host.step_tile(buffer, buffer, segments, rules, SCALE, Outputs.COMPARED)
    device.step_tile(found, found, device_segments, rules, SCALE, Outputs.COMPARED)
    assert same_bits(found.cpu(), buffer) and not same_bits(ignored, buffer)
    for ours, theirs in zip(device_segments, segments, strict=True):
        assert ours.output is not None and theirs.output is not None
        assert same_bits(ours.output.cpu(), theirs.output)


@pytest.mark.parametrize("rule", range(len(RULES)))
@pytest.mark.parametrize("numel", [1, 127, BLOCK, BLOCK + 1])
def test_odd_sizes_and_denormals(device: DeviceKernels, host: HostKernels, numel: int, rule: int) -> None:
    buffer, gradient = buffers(3, numel, numel) * 1e-37, awkward(numel, 3, 1e-19)
    found = buffer.to(DEVICE, copy=True)
    host.step_tile(buffer, buffer, [TileSegment(0, gradient, None, 0)], [RULES[rule]])
    device.step_tile(found, found, [TileSegment(0, gradient.to(DEVICE), None, 0)], [RULES[rule]])
    assert same_bits(found.cpu(), buffer)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_the_output_may_take_the_place_of_the_gradient(
    device: DeviceKernels, host: HostKernels, dtype: torch.dtype
) -> None:
    numel = 3 * BLOCK + 13
    buffer, gradient = buffer_of(numel, 2), awkward(numel, 8).to(dtype)
    found_buffer, found = buffer.to(DEVICE, copy=True), gradient.to(DEVICE, copy=True)
    host.step_tile(buffer, buffer, [TileSegment(0, gradient, gradient, 0)], RULES[:1])
    device.step_tile(found_buffer, found_buffer, [TileSegment(0, found, found, 0)], RULES[:1])
    assert same_bits(found_buffer.cpu(), buffer) and same_bits(found.cpu(), gradient)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_outputs_round_ties_to_even(device: DeviceKernels, host: HostKernels, dtype: torch.dtype) -> None:
    """Every midpoint of two neighbours, and its neighbours in float32."""
    values = every_value(dtype)
    values = values[values.isfinite()].float().sort().values.unique()
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    infinity = torch.full((1,), float("inf"))
    masters = torch.cat([ties, ties.nextafter(infinity), ties.nextafter(-infinity), infinity, -infinity])
    numel = masters.numel()
    buffer, zeros = torch.stack([masters, torch.zeros(numel), torch.zeros(numel)]), torch.zeros(numel)
    expected, found = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device=DEVICE)
    there = buffer.to(DEVICE, copy=True)
    rule = AdamRule(lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1, decoupled=True)
    host.step_tile(buffer, buffer, [TileSegment(0, zeros, expected, 0)], [rule])
    device.step_tile(there, there, [TileSegment(0, zeros.to(DEVICE), found, 0)], [rule])
    assert torch.equal(buffer[0], masters)
    assert same_bits(found.cpu(), expected) and same_bits(expected, masters.to(dtype))


def test_a_tile_without_segments_is_not_touched(device: DeviceKernels) -> None:
    buffer = torch.ones(3, 4, device=DEVICE)
    device.step_tile(buffer, buffer, [], [])
    assert buffer.eq(1).all()


# --- step_tile, states in other formats ---

FORMATS = (StateFormat.BF16, StateFormat.EIGHT_BIT)
PLACES = (0, 64 * 5, (1 << 32) - 256, (1 << 33) + 64)
"""Where segments begin in their parameters; the upper half of a place changes within the third one."""


def encoded_segments(format: StateFormat, rules: int, masters: bool) -> list[TileSegment]:
    """Segments with gaps between them, of all dtypes, from different places; with ``masters``, all have outputs."""
    outputs = SUPPORTED_DTYPES if masters else (None, *SUPPORTED_DTYPES)
    dtypes = list(itertools.product(SUPPORTED_DTYPES, outputs))
    segments, offset = [], 64 if format is StateFormat.EIGHT_BIT else 3
    for index, (gradient_dtype, output_dtype) in enumerate(dtypes):
        numel = (*NUMELS, 40, 1)[index] if index < 5 else 70 + index
        gap = 5
        if format is StateFormat.EIGHT_BIT:
            numel, gap = -(-numel // BLOCK_NUMEL) * BLOCK_NUMEL, BLOCK_NUMEL
        output = None if output_dtype is None else torch.full((numel,), 7.0, dtype=output_dtype)
        coding = Coding(format, stream_of(3, f"{index}.weight"), PLACES[index % len(PLACES)])
        # Numbers that are too small for their block's scale.
        tiny = 10.0 ** -torch.linspace(0, 8, BLOCK_NUMEL).repeat(-(-numel // BLOCK_NUMEL))[:numel]
        gradient = of_all_kinds(numel, 50 + index)
        gradient = torch.where(torch.arange(numel) % 3 == 0, gradient * tiny, gradient).to(gradient_dtype)
        segments.append(TileSegment(offset, gradient, output, index % rules, coding))
        offset += numel + gap
    return segments


def on_device(buffer: EncodedBuffer) -> EncodedBuffer:
    return EncodedBuffer(buffer.block.to(DEVICE, copy=True), buffer.format, buffer.own_master, *buffer.shape)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("outputs", [Outputs.WRITTEN, Outputs.COMPARED], ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize("table", [table for table, (arrays, _) in TABLES.items() if arrays > 1])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_tile_with_encoded_states_equals_the_oracle(
    device: DeviceKernels, format: StateFormat, table: str, in_place: bool, outputs: Outputs
) -> None:
    arrays, rules = TABLES[table]
    scale, compared = UNSCALED if in_place else SCALE, outputs is Outputs.COMPARED
    segments = encoded_segments(format, len(rules), masters=compared)
    numel = segments[-1].buffer_offset + segments[-1].gradient.numel()
    source = encoded_buffer(format, rules[0], numel + BLOCK_NUMEL, 1)
    if compared:
        for seed, (offset, gradient, output, *_) in enumerate(segments):
            assert output is not None
            output.copy_(written(source.master[offset : offset + gradient.numel()], output.dtype, seed))
    expected = copy_of(source) if in_place else empty_buffer(format, arrays - 1, source.shape[1], value=7.0)
    there = on_device(source)
    target = there if in_place else on_device(expected)
    device_segments = moved(segments)
    device.step_tile(there, target, device_segments, rules, scale, outputs)
    other_bits = copy_of(expected)
    for each, found in zip(segments, device_segments, strict=True):
        parameter = each.output if compared else None
        masters = step_part(source, expected, each, rules[each.rule], scale, parameter)
        if each.output is not None:
            assert found.output is not None
            assert same_bits(found.output.cpu(), rounded(masters, each.output.dtype))
        other = each._replace(coding=each.coding._replace(stream=each.coding.stream + 1))
        step_part(source, other_bits, other, rules[each.rule], scale, parameter)
    assert same_buffers(target, expected)
    assert in_place or same_buffers(there, source)
    # The comparison is of numbers and of special ones, and of random bits.
    assert not same_buffers(target, other_bits)
    for state, name in enumerate(rules[0].states[: arrays - 1]):
        values = target.decoded(state, slice(0, numel), name in NEVER_NEGATIVE).cpu()
        assert values.isfinite().float().mean() > 0.5 and (values != 0).float().mean() > 0.3
        assert values.isnan().any() and values.isinf().any() and (values.abs() < 2.0**-100).any()


@pytest.mark.medium
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_encoded_states_equal_the_host_kernels(device: DeviceKernels, host: HostKernels, format: StateFormat) -> None:
    """After some steps in place, at other step counts each."""
    _, rules = TABLES["adam"]
    segments = encoded_segments(format, 1, masters=False)
    buffer = encoded_buffer(format, rules[0], segments[-1].buffer_offset + segments[-1].gradient.numel(), 5)
    found = on_device(buffer)
    for step in (1, 2, 3):
        rule = [replace(rules[0], step=step)]
        host.step_tile(buffer, buffer, segments, rule, SCALE)
        device.step_tile(found, found, moved(segments), rule, SCALE)
        assert same_buffers(found, buffer)


# --- checksums ---


def test_checksums_equal_those_in_plain_torch(device: DeviceKernels) -> None:
    numels = (1, BLOCK + 77, 0, 64 * BLOCK + 5)  # the last one takes two programs
    dtypes = (*SUPPORTED_DTYPES, torch.bfloat16)
    tensors = [awkward(numel, numel).to(dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
    found = device.checksums([tensor.to(DEVICE) for tensor in tensors])
    assert found.tolist() == checksums(tensors).tolist() == [int(checksum(tensor)) for tensor in tensors]
    assert device.checksums([torch.empty(0, device=DEVICE)]).tolist() == [0]


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_checksum_sees_each_bit_and_each_place(dtype: torch.dtype) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3], values[4] = 0.0, float("nan")
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    seen = {int(checksum(values))}
    for bit in range(8 * dtype.itemsize):
        for place in (3, 4, 199):
            other = values.clone()
            other.view(integer)[place] ^= torch.tensor(1).to(integer) << bit
            seen.add(int(checksum(other)))
    for place in range(199):
        seen.add(int(checksum(values.roll(place + 1))))
    seen.add(int(checksum(values[:199])))
    assert len(seen) == 1 + 3 * 8 * dtype.itemsize + 199 + 1


# --- accumulate, reconcile ---


def every_value(dtype: torch.dtype) -> Tensor:
    """Every value that there is; of float32, many."""
    if dtype == torch.float32:
        return awkward(5000, 4)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.quick(0)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_accumulate_equals_the_host_kernels(device: DeviceKernels, host: HostKernels, dtype: torch.dtype) -> None:
    source = every_value(dtype)
    for add in (True, False):
        target = awkward(source.numel(), 1)
        found = target.to(DEVICE, copy=True)
        host.accumulate(target, source, add=add)
        device.accumulate(found, source.to(DEVICE), add=add)
        assert same_bits(found.cpu(), target)
    # A copy keeps the bits of NaN, too.
    assert torch.equal(found.cpu().view(torch.int32), target.view(torch.int32))
    second = every_value(dtype).flip(0)
    host.sum_of_two(target, source, second)
    device.sum_of_two(found, source.to(DEVICE), second.to(DEVICE))
    assert same_bits(found.cpu(), target)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_reconcile_equals_the_host_kernels(device: DeviceKernels, host: HostKernels, dtype: torch.dtype) -> None:
    parameter = every_value(dtype)
    near = parameter.float() * (1 + 2.0**-9 * torch.randn(parameter.numel()))  # rounds to either side
    master = torch.where(torch.rand(parameter.numel()) < 0.5, near, parameter.float())
    counts = []
    for adopt in (False, True, False):
        found, given = master.to(DEVICE, copy=True), parameter.to(DEVICE)
        expected = host.reconcile(master, parameter, adopt=adopt)
        assert device.reconcile(found, given, adopt=adopt) == expected
        assert torch.equal(found.cpu().view(torch.int32), master.view(torch.int32))
        counts.append(expected)
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.parametrize("method", ["accumulate", "reconcile"])
def test_nothing_is_nothing(device: DeviceKernels, method: str) -> None:
    empty = torch.empty(0, device=DEVICE)
    option = {"add": True} if method == "accumulate" else {"adopt": True}
    assert not getattr(device, method)(empty, empty, **option)


# --- sum_of_squares ---


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("cuts", [[], [1, 16, 100], [37, 700], [5, 5, 6]], ids=str)
@pytest.mark.parametrize("scale", [UNSCALED, SCALE], ids=["unscaled", "scaled"])
def test_the_sum_is_the_hosts(device: DeviceKernels, host: HostKernels, cuts: list[int], scale: Scale) -> None:
    parameters = [[torch.randn(1)], []]
    for index, dtype in enumerate(SUPPORTED_DTYPES):
        values = (torch.randn(1000 + index) * 10.0 ** torch.empty(1000 + index).uniform_(-3, 3)).to(dtype)
        parameters.append(list(values.tensor_split(cuts)))
    parameters.append([torch.randn(20), torch.randn(20).bfloat16(), torch.randn(5).half()])
    moved = [[piece.to(DEVICE) for piece in pieces] for pieces in parameters]
    assert sum_of_squares(device, moved, scale) == sum_of_squares(host, parameters, scale) > 0


@pytest.mark.slow
def test_the_sum_of_a_large_parameter_is_the_hosts(device: DeviceKernels, host: HostKernels) -> None:
    """Larger than a block, and cut inside and at the end of one."""
    values = torch.randn((1 << 16) + 200)
    pieces = list(values.tensor_split([900, 1 << 16]))
    expected = sum_of_squares(host, [[values]], SCALE)
    assert sum_of_squares(device, [[piece.to(DEVICE) for piece in pieces]], SCALE) == expected
    one_by_one = numpy.add.accumulate((values * 0.7 * (1 / 3)).double().square().numpy())[-1]
    assert one_by_one != expected and one_by_one == pytest.approx(expected, rel=1e-12)  # the order matters


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**-149])
def test_special_values_in_the_sum(device: DeviceKernels, host: HostKernels, value: float) -> None:
    values = torch.full((7,), 2.0**-149)
    values[3] = value
    for scale in (UNSCALED, Scale(float("inf"))):
        expected = sum_of_squares(host, [[values]], scale)
        numpy.testing.assert_equal(sum_of_squares(device, [[values.to(DEVICE)]], scale), expected)
    assert sum_of_squares(device, []) == sum_of_squares(device, [[torch.empty(0, device=DEVICE)]]) == 0.0


# --- scalars ---


def test_doubles_round_to_float32_in_any_float_mode() -> None:
    generator = numpy.random.default_rng(0)
    exponents = generator.uniform(-160, 130, 4000)
    values = [0.0, -0.0, 1e-40, 2.0**-150, 2.0**-149 * 1.5, 3.5e38, -1e300, float("inf"), float("-inf")]
    values += list(generator.choice([-1, 1], 4000) * generator.uniform(1, 2, 4000) * 2.0**exponents)
    with numpy.errstate(all="ignore"):
        expected = numpy.array(values).astype(numpy.float32).tobytes()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode that torch knows")
    try:
        found = b"".join(float32_bytes(value) for value in values)
    finally:
        torch.set_flush_denormal(False)
    assert found == expected


# --- what is refused ---


def tile(on: torch.device, **changes: Any) -> dict[str, Any]:
    buffer = torch.zeros(3, 20, device=on)
    return {"source_buffer": buffer, "target_buffer": buffer, "segments": [], "rules": RULES[:1], **changes}


def segment(on: torch.device, offset: int = 0, numel: int = 10, rule: int = 0, **changes: Any) -> TileSegment:
    return TileSegment(offset, torch.zeros(numel, device=on), None, rule)._replace(**changes)


def encoded_tile(on: torch.device, format: StateFormat, **changes: Any) -> dict[str, Any]:
    buffer = new_buffer(format, 3, 128, False, lambda words: torch.zeros(words, device=on))
    return tile(on, **{"source_buffer": buffer, "target_buffer": buffer, **changes})


Refused = Callable[[torch.device], dict[str, Any]]

REFUSED: list[Refused] = [
    lambda on: tile(on, source_buffer=torch.zeros(3, 20, device=on, dtype=torch.float64)),
    lambda on: tile(on, target_buffer=torch.zeros(60, device=on)),
    lambda on: tile(on, target_buffer=torch.zeros(3, 21, device=on)),
    lambda on: tile(
        on,
        source_buffer=(shared := torch.zeros(100, device=on))[:60].view(3, 20),
        target_buffer=shared[30:90].view(3, 20),
    ),
    lambda on: tile(on, segments=[segment(on, output=torch.zeros(9, device=on))]),
    lambda on: tile(on, segments=[segment(on, output=torch.zeros(10, device=on).double())]),
    lambda on: tile(on, segments=[segment(on, gradient=torch.zeros(10, device=on).int())]),
    lambda on: tile(on, segments=[segment(on, numel=0)]),
    lambda on: tile(on, segments=[segment(on), segment(on, 9)]),
    lambda on: tile(on, segments=[segment(on, -1)]),
    lambda on: tile(on, segments=[segment(on), segment(on, 11)]),
    lambda on: tile(on, segments=[segment(on, rule=1)]),
    lambda on: tile(on, segments=[segment(on, rule=-1)]),
    lambda on: tile(
        on, segments=[segment(on, gradient=(shared := torch.zeros(15, device=on))[:10], output=shared[5:])]
    ),
    lambda on: tile(
        on,
        segments=[
            segment(on, gradient=(shared := torch.zeros(10, device=on)), output=shared.view(torch.bfloat16)[:10])
        ],
    ),
    lambda on: tile(on, rules=[replace(RULES[0], step=0)]),
    lambda on: tile(
        on,
        rules=[AdagradRule(0.1, 0.0, 1e-10, 0.0, step=0)],
        source_buffer=torch.zeros(2, 4, device=on),
        target_buffer=torch.zeros(2, 4, device=on),
    ),
    lambda on: tile(on, rules=[RULES[0], LionRule(0.1, 0.9, 0.99, 0.0)]),
    lambda on: tile(on, rules=[LionRule(0.1, 0.9, 0.99, 0.0)]),
    lambda on: tile(on, rules=[SGDRule(0.1, 0.9, 0.0, 0.0, False, False)]),
    lambda on: tile(on, rules=[SGDRule(0.1, 0.0, 0.0, 0.0, False, False)]),
    lambda on: encoded_tile(on, StateFormat.EIGHT_BIT, segments=[segment(on)]),
    lambda on: encoded_tile(on, StateFormat.EIGHT_BIT, segments=[segment(on, 32, 64)]),
    lambda on: encoded_tile(on, StateFormat.EIGHT_BIT, segments=[segment(on, 0, 64, coding=Coding(place=32))]),
    lambda on: encoded_tile(on, StateFormat.BF16, segments=[segment(on, coding=Coding(place=-1))]),
    lambda on: encoded_tile(on, StateFormat.BF16, segments=[segment(on, 120)]),
    lambda on: encoded_tile(on, StateFormat.BF16, source_buffer=torch.zeros(2, 128, device=on)),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_step_tile_refuses_what_the_host_kernels_refuse(device: DeviceKernels, host: HostKernels, case: int) -> None:
    arguments = REFUSED[case](DEVICE)
    refusals = []
    for kernels, given in ((host, REFUSED[case](torch.device("cpu"))), (device, arguments)):
        with pytest.raises(ValueError, match=r"\w") as refused:
            kernels.step_tile(**given)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    assert block_of(arguments["target_buffer"]).eq(0).all()


def test_masters_in_outputs_are_refused(device: DeviceKernels) -> None:
    buffer, output = torch.zeros(2, 20, device=DEVICE), torch.zeros(10, device=DEVICE)
    with pytest.raises(ValueError, match="masters of state that is on a device are in its buffers"):
        device.step_tile(buffer, buffer, [segment(DEVICE, output=output)], RULES[:1], outputs=Outputs.MASTERS)


def test_a_refused_table_writes_nothing(device: DeviceKernels) -> None:
    buffer = torch.ones(3, 20, device=DEVICE)
    with pytest.raises(ValueError, match="segment 1"):
        device.step_tile(buffer, buffer, [segment(DEVICE), segment(DEVICE, 10, rule=5)], RULES[:1])
    assert buffer.eq(1).all()


@pytest.mark.parametrize("method", ["accumulate", "reconcile"])
def test_pairs_are_refused(device: DeviceKernels, method: str) -> None:
    call = getattr(device, method)
    option = {"add": True} if method == "accumulate" else {"adopt": True}
    four = torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"masters and accumulators are float32, not torch\.bfloat16"):
        call(four.bfloat16(), four, **option)
    with pytest.raises(ValueError, match="5 elements for a buffer of 4"):
        call(four, torch.zeros(5, device=DEVICE), **option)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        call(four, four.double(), **option)


def test_tensors_elsewhere_or_strided_are_refused(device: DeviceKernels) -> None:
    four, eight = torch.zeros(4, device=DEVICE), torch.zeros(8, device=DEVICE)
    buffer = torch.zeros(3, 20, device=DEVICE)
    for call in (
        lambda bad: device.accumulate(four, bad, add=True),
        lambda bad: sum_of_squares(device, [[bad]]),
        lambda bad: device.step_tile(buffer, buffer, [TileSegment(0, bad, None, 0)], RULES[:1]),
        lambda bad: device.step_tile(buffer, buffer, [TileSegment(0, four, bad, 0)], RULES[:1]),
    ):
        with pytest.raises(ValueError, match=r"contiguous tensors on .*not one of strides \(2,\)"):
            call(eight[::2])
        with pytest.raises(ValueError, match="on meta"):
            call(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="on meta"):
        device.step_tile(buffer, torch.zeros(3, 20, device="meta"), [], RULES[:1])


def test_a_device_that_triton_does_not_run_on_is_refused(device: DeviceKernels) -> None:
    with pytest.raises(ValueError, match=r"so their tensors are on (cpu|cuda), not on"):
        DeviceKernels(torch.device("cpu" if ON_CUDA else "meta"))


def test_without_triton_it_says_what_to_install(device: DeviceKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "longshore.kernels.triton_rules")
    monkeypatch.delattr("longshore.kernels.triton_rules")
    with pytest.raises(ModuleNotFoundError, match=r"needs Triton.*pip install 'longshore\[cuda\]'"):
        DeviceKernels(DEVICE)


@pytest.mark.medium
def test_triton_is_imported_when_it_is_used() -> None:
    code = "import sys, longshore.optim; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.gpu
def test_calls_follow_the_current_stream(device: DeviceKernels) -> None:
    source, target = torch.zeros(1 << 20, device=DEVICE), torch.zeros(1 << 20, device=DEVICE)
    buffer = torch.zeros(3, 1 << 20, device=DEVICE)
    stream = torch.cuda.Stream()
    rule = AdamRule(lr=1.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1, decoupled=True)
    device.step_tile(buffer, buffer, [TileSegment(0, source + 1, None, 0)], [rule])  # compiled before the race
    buffer.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.fill_(2.0)
        device.accumulate(target, source, add=True)
        device.step_tile(buffer, buffer, [TileSegment(0, target, None, 0)], [rule])
        assert not stream.query()  # nothing waited
    stream.synchronize()
    assert target.eq(2).all() and buffer[0].eq(-1).all()
