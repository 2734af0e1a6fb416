"""torch's own optimizers on pieces of a tile, called as the kernels are; tests/optim/test_client.py has the parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longshore.kernels import HostKernels, Outputs, Scale, TileSegment, TorchRule, next_scalars
from longshore.kernels.torch_rules import BUFFER_NUMEL
from tests.kernels.numbers import RULES, same_bits


def rule(**changes: Any) -> TorchRule:
    usual = TorchRule(
        "RMSprop", (("lr", 1e-2), ("alpha", 0.9)), rows=(("square_avg", 2),), step=3, first=False, scalars=()
    )
    return usual._replace(**changes)


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(threads=1)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adopt", [False, True])
def test_a_tile_is_stepped_as_the_kernels_step_one(
    kernels: HostKernels, in_place: bool, output_dtype: Any, adopt: bool
) -> None:
    """Segments alone are written, rows that the rule does not name are copied, and the gradient is scaled twice."""
    buffer, scale = torch.rand(3, 200), Scale(0.7, 1 / 3)
    gradients = [torch.randn(64).bfloat16(), torch.randn(100)]
    outputs = [None if output_dtype is None else torch.zeros(g.numel(), dtype=output_dtype) for g in gradients]
    source = buffer.clone()
    target = source if in_place else torch.full_like(buffer, 7.0)
    expected = target.clone()
    segments = [TileSegment(10, gradients[0], outputs[0], 1), TileSegment(90, gradients[1], outputs[1], 0)]
    rules = [rule(), rule(options=(("lr", 0.5), ("alpha", 0.9)))]
    for begin, gradient, lr in ((10, gradients[0], 0.5), (90, gradients[1], 1e-2)):
        part = buffer[:, begin : begin + gradient.numel()].clone()
        if adopt and output_dtype is not None:  # somebody wrote an element
            part[0, 5] = 0.5
        # The exact lengths that torch's loops take at once, so that there is no tail.
        padded = torch.zeros(4, 128)
        padded[:3, : gradient.numel()] = part
        padded[3, : gradient.numel()] = gradient.float() * torch.tensor(0.7) * torch.tensor(1 / 3)
        optimizer = torch.optim.RMSprop([padded[0].clone()], lr=lr, alpha=0.9, foreach=False)
        master = optimizer.param_groups[0]["params"][0]
        optimizer.state[master] = {"step": torch.tensor(2.0), "square_avg": padded[2]}
        master.grad = padded[3]
        optimizer.step()
        stepped = torch.stack([master, padded[1], padded[2]])[:, : gradient.numel()]
        expected[:, begin : begin + gradient.numel()] = stepped
    for segment, output in zip(segments, outputs, strict=True):
        if output is not None and adopt:
            output.copy_(buffer[0, segment.buffer_offset : segment.buffer_offset + output.numel()])
            output[5] = 0.5
    kernels.step_tile(source, target, segments, rules, scale, Outputs.COMPARED if adopt else Outputs.WRITTEN)
    assert same_bits(target, expected)
    assert in_place or same_bits(source, buffer)
    for segment, output in zip(segments, outputs, strict=True):
        if output is not None:
            begin = segment.buffer_offset
            assert same_bits(output, expected[0, begin : begin + output.numel()].to(output.dtype))


@pytest.mark.parametrize("in_place", [True, False])
def test_parameters_that_are_their_own_masters(kernels: HostKernels, in_place: bool) -> None:
    """As with the master in the buffer; longer than the part that is stepped at a time."""
    numel, begin = BUFFER_NUMEL + 100, 7
    buffer, gradient = torch.rand(3, begin + numel), torch.randn(numel)
    expected, parameter = buffer.clone(), buffer[0, begin:].clone()
    kernels.step_tile(expected, expected, [TileSegment(begin, gradient, None, 0)], [rule()])
    source = buffer[1:].clone()
    target = source if in_place else source.clone().fill_(7.0)
    segments = [TileSegment(begin, gradient, parameter, 0)]
    kernels.step_tile(source, target, segments, [rule()], outputs=Outputs.MASTERS)
    assert same_bits(parameter, expected[0, begin:]) and same_bits(target[:, begin:], expected[1:, begin:])
    assert in_place or same_bits(source, buffer[1:])
    with pytest.raises(ValueError, match="segment 0 of the tile has its master in an output"):
        kernels.step_tile(source, source, [TileSegment(begin, gradient, None, 0)], [rule()], outputs=Outputs.MASTERS)


@pytest.mark.parametrize(
    ("segments", "changes", "message"),
    [
        ([(0, 10, 0), (5, 10, 0)], {}, "segment 1 of the tile"),
        ([(0, 10, 0), (15, 10, 0)], {}, "segment 1 of the tile"),
        ([(0, 10, 0), (10, 0, 0)], {}, "segment 1 of the tile"),
        ([(0, 10, 1)], {}, "segment 0 of the tile"),
        ([(0, 10, 0)], {"rows": (("square_avg", 3),)}, "in rows {'square_avg': 3} behind the master, of 2"),
        ([(0, 10, 0)], {"rows": (("square_avg", 0),)}, "in rows"),
        ([(0, 10, 0)], {"rows": (("square_avg", 1), ("grad_avg", 1))}, "in rows"),
    ],
)
def test_tables_that_are_refused(kernels: HostKernels, segments: Any, changes: Any, message: str) -> None:
    buffer = torch.rand(3, 20)
    before = buffer.clone()
    table = [TileSegment(offset, torch.ones(numel), None, which) for offset, numel, which in segments]
    with pytest.raises(ValueError, match=message):
        kernels.step_tile(buffer, buffer, table, [rule(**changes)])
    with pytest.raises(ValueError, match="of one kind"):
        kernels.step_tile(buffer, buffer, table[:1], [rule(), RULES[0]])
    assert torch.equal(buffer, before)


def test_numbers_that_go_with_a_parameter() -> None:
    nadam = TorchRule("NAdam", (("lr", 1e-2),), (("exp_avg", 1), ("exp_avg_sq", 2)), step=1, first=True)
    (first,) = next_scalars(nadam, ["mu_product"])
    (second,) = next_scalars(nadam._replace(step=2, first=False, scalars=(first,)), ["mu_product"])
    parameter = torch.ones(64)
    optimizer = torch.optim.NAdam([parameter], lr=1e-2, foreach=False)
    for expected in (first, second):
        parameter.grad = torch.ones(64)
        optimizer.step()
        assert expected == ("mu_product", optimizer.state[parameter]["mu_product"].item())
    assert first != second
