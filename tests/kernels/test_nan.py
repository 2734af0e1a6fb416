"""One NaN for all: what a rule writes is the same on every processor, wherever a NaN comes from.

The combinations below have quiet and signaling NaN of both signs, and what makes infinity minus infinity, zero times
infinity and roots of negative numbers, in the gradient, the master and the states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.kernels import SUPPORTED_DTYPES, DeviceKernels, HostKernels, Outputs, Rule, TileSegment, TorchRule
from longshore.kernels.reference import rule_output
from longshore.layout.formats import NEVER_NEGATIVE, Coding, StateFormat, stream_of
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.sgd import SGDRule
from tests.kernels.device_kernels import DEVICE, ON_CUDA, device_kernels
from tests.kernels.encoded import copy_of, empty_buffer, same_buffers, step_part
from tests.kernels.numbers import MOMENTUM_RULES, OTHER_RULES, RULES, arrays_of, rounded, same_bits, stepped_buffer

CANONICAL = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
NAN_BITS = (0x7FFFFFFF, 0x7FA5A5A5, -0x400000, -0x7FFFFF)
BLOCK = 64  # kBlock of native/kernels.inl
LOOKED_AT = 256 * BLOCK  # kLookedAt of native/nan.inl

# Rules whose state may be NaN beside a master that is not, and steps of lr 0.
UNSEEN = (
    LionRule(lr=0.1, beta1=0.5, beta2=0.0, weight_decay=0.0),
    SGDRule(lr=1e-2, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False),
    SGDRule(lr=0.0, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True, first=True),
    AdamRule(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True),
)
STEPS = [(rule, arrays_of(rule)) for rule in (*RULES, *OTHER_RULES, *UNSEEN, *MOMENTUM_RULES)]
STEPS += [(rule, 2) for rule in (*OTHER_RULES, *UNSEEN) if isinstance(rule, SGDRule) and rule.momentum == 0]


def values() -> Tensor:
    nans = torch.tensor(NAN_BITS, dtype=torch.int32).view(torch.float32)
    return torch.cat([nans, torch.tensor([torch.inf, -torch.inf, 0.0, 1.0, -2.0])])


def combinations(arrays: int) -> Tensor:
    """Each value with each other: ``[arrays, numel]``."""
    places = torch.tensor(list(itertools.product(range(len(values())), repeat=arrays)))
    return values()[places.T.contiguous()]


def gradient_in(dtype: torch.dtype, gradient: Tensor) -> Tensor:
    """Of the same values, but with the payloads of NaN that the dtype has: torch has one for them all."""
    if dtype == torch.float32:
        return gradient.clone()
    bits, first = gradient.view(torch.int32), {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    payload = (bits & 0x7F | bits >> 16 & 0x40 | 1 | (bits < 0).int() << 15) | first
    nan = torch.where(payload > 0x7FFF, payload - 0x10000, payload).to(torch.int16).view(dtype)
    return torch.where(gradient.isnan(), nan, gradient.to(dtype))


def one_nan(found: Tensor) -> bool:
    """Whether there is NaN, and all have the same bits."""
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    nans = found.cpu()[found.cpu().isnan()].view(integer)
    return len(nans) > 0 and bool((nans == CANONICAL[found.dtype]).all())


@pytest.fixture(scope="module", params=[pytest.param("", marks=[pytest.mark.gpu] if ON_CUDA else [])])
def device() -> Iterator[DeviceKernels]:
    with device_kernels() as kernels:
        yield kernels


ALL_DTYPES = list(itertools.product(SUPPORTED_DTYPES, (None, *SUPPORTED_DTYPES)))
DTYPES = list(zip(SUPPORTED_DTYPES, SUPPORTED_DTYPES, strict=True))
"""Of the gradient, and of the output."""


def check(
    kernels: HostKernels | DeviceKernels, rule: Rule, arrays: int, dtypes: Sequence[Any], in_place: bool, where: Any
) -> None:
    everything = combinations(arrays + 1)
    buffer, numel = everything[1:].contiguous(), everything.shape[1]
    for gradient_dtype, output_dtype in dtypes:
        gradient = gradient_in(gradient_dtype, everything[0])
        assert torch.equal(gradient.isnan(), everything[0].isnan())
        expected = stepped_buffer(buffer, gradient, rule)
        expected_output = rule_output(buffer.unbind(), gradient, rule)
        assert one_nan(expected[0]) and one_nan(expected_output)
        source = buffer.to(where, copy=True)
        target = source if in_place else torch.full_like(source, 7.0)
        output = None if output_dtype is None else torch.zeros(numel, dtype=output_dtype, device=where)
        kernels.step_tile(source, target, [TileSegment(0, gradient.to(where), output, 0)], [rule])
        assert same_bits(target.cpu(), expected)
        if output is not None:
            assert one_nan(output) and same_bits(output.cpu(), rounded(expected_output, output_dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
@pytest.mark.parametrize(("rule", "arrays"), STEPS, ids=str)
def test_a_step_writes_one_nan(kernels: HostKernels, rule: Rule, arrays: int, in_place: bool) -> None:
    check(kernels, rule, arrays, ALL_DTYPES, in_place, "cpu")


@pytest.mark.parametrize(("rule", "arrays"), STEPS, ids=str)
def test_a_step_on_a_device_writes_one_nan(device: DeviceKernels, rule: Rule, arrays: int) -> None:
    check(device, rule, arrays, DTYPES, True, DEVICE)


@pytest.mark.covering(2)
@pytest.mark.parametrize("numel", [1, 5, BLOCK, 65 * BLOCK, LOOKED_AT + 3 * BLOCK + 37])
@pytest.mark.parametrize("array", [0, 1, 2, "gradient"])
def test_one_nan_among_numbers_is_found_wherever_it_is(kernels: HostKernels, array: int | str, numel: int) -> None:
    """In each place of a block, in blocks that have no other, in the last one, and in one that is not whole."""
    rules = [rule for rule in (RULES[0], *OTHER_RULES, *UNSEEN) if array == "gradient" or arrays_of(rule) > int(array)]
    for rule in rules:
        buffer, gradient = torch.rand(arrays_of(rule), numel), torch.rand(numel)
        hit = gradient if array == "gradient" else buffer[int(array)]
        hit.view(torch.int32)[:: BLOCK + 1] = -1
        hit.view(torch.int32)[-1] = 0x7F800001
        expected = stepped_buffer(buffer, gradient, rule)
        outputs = [torch.zeros(numel, dtype=dtype) for dtype in SUPPORTED_DTYPES]
        for output in outputs:
            found = buffer.clone()
            kernels.step_tile(found, found, [TileSegment(0, gradient, output, 0)], [rule])
            assert same_bits(found, expected) and same_bits(output, rounded(expected[0], output.dtype))
        own, states = buffer[0].clone(), buffer[1:].clone()
        kernels.step_tile(states, states, [TileSegment(0, gradient, own, 0)], [rule], outputs=Outputs.MASTERS)
        assert same_bits(own, expected[0]) and same_bits(states, expected[1:])


@pytest.mark.parametrize(
    ("rule", "state"), [(UNSEEN[0], torch.inf), (UNSEEN[0], -torch.inf), (UNSEEN[1], -torch.nan)], ids=str
)
def test_a_state_that_is_nan_beside_a_master_that_is_not(kernels: HostKernels, rule: Rule, state: float) -> None:
    """Without a NaN in the master, nowhere near."""
    buffer, gradient = torch.rand(2, 3 * BLOCK), torch.rand(3 * BLOCK)
    buffer[1, 100] = state
    expected = stepped_buffer(buffer, gradient, rule)
    kernels.step_tile(buffer, buffer, [TileSegment(0, gradient, None, 0)], [rule])
    assert same_bits(buffer, expected)
    assert not buffer[0].isnan().any() and one_nan(buffer[1])


def test_a_nan_that_somebody_wrote_becomes_the_one(kernels: HostKernels) -> None:
    for dtype in SUPPORTED_DTYPES:
        buffer, gradient = torch.ones(1, 200), torch.ones(200)
        parameter = gradient_in(dtype, values()[torch.arange(200) % len(values())])
        expected = stepped_buffer(buffer, gradient, OTHER_RULES[7], parameter=parameter)
        segment = TileSegment(0, gradient, parameter, 0)
        kernels.step_tile(buffer, buffer, [segment], [OTHER_RULES[7]], outputs=Outputs.COMPARED)
        assert one_nan(buffer) and one_nan(parameter)
        assert same_bits(buffer, expected) and same_bits(parameter, rounded(expected[0], dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("own_master", [False, True])
@pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.EIGHT_BIT], ids=str)
@pytest.mark.parametrize("rule", [RULES[0], OTHER_RULES[0], OTHER_RULES[2], OTHER_RULES[4]], ids=str)
def test_encoded_states_and_their_masters_have_one_nan(
    kernels: HostKernels, rule: Rule, format: StateFormat, own_master: bool
) -> None:
    everything = combinations(arrays_of(rule) + 1)
    everything = everything[:, : everything.shape[1] // BLOCK * BLOCK]
    numel = everything.shape[1]
    source = empty_buffer(format, len(rule.states), numel, own_master)
    parameter = everything[1].clone()
    source.master.copy_(parameter[: source.master.numel()])
    for state, name in enumerate(rule.states):
        source.encode(state, slice(0, numel), name in NEVER_NEGATIVE, everything[2 + state])
    coding = Coding(format, stream_of(3, "weight"), 0)
    outputs = [parameter] if own_master else [None, *(torch.zeros(numel, dtype=dtype) for dtype in SUPPORTED_DTYPES)]
    for output in outputs:
        segment = TileSegment(0, everything[0].clone(), output, 0, coding)
        found, expected = copy_of(source), copy_of(source)
        masters = step_part(source, expected, segment, rule, parameter=parameter if own_master else None)
        assert one_nan(masters)
        kernels.step_tile(found, found, [segment], [rule], outputs=Outputs.MASTERS if own_master else Outputs.WRITTEN)
        assert same_buffers(found, expected)
        assert output is None or same_bits(output, rounded(masters, output.dtype))


def test_torchs_own_optimizers_write_one_nan(kernels: HostKernels) -> None:
    rule = TorchRule("RMSprop", (("lr", 1e-2), ("alpha", 0.9)), (("square_avg", 1),), step=3, first=False, scalars=())
    everything = combinations(3)
    for dtype in SUPPORTED_DTYPES:
        buffer, output = everything[1:].clone(), torch.zeros(everything.shape[1], dtype=dtype)
        kernels.step_tile(buffer, buffer, [TileSegment(0, everything[0].clone(), output, 0)], [rule])
        assert one_nan(buffer[0]) and one_nan(buffer[1]) and one_nan(output)


def check_sums(kernels: HostKernels | DeviceKernels, where: Any) -> None:
    first, second = combinations(2).repeat(1, 3).to(where)
    for dtype in SUPPORTED_DTYPES:
        addend = gradient_in(dtype, second.cpu()).to(where)
        total = first.clone()
        kernels.accumulate(total, addend, add=True)
        assert one_nan(total) and torch.equal(total.isnan(), (first + addend.float()).isnan())
        kernels.sum_of_two(total, addend, addend)
        assert one_nan(total)


def test_sums_of_gradients_have_one_nan(kernels: HostKernels) -> None:
    check_sums(kernels, "cpu")


def test_sums_of_gradients_on_a_device_have_one_nan(device: DeviceKernels) -> None:
    check_sums(device, DEVICE)
