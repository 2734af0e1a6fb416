"""The native kernels against the oracle, and what their typed face refuses."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.kernels import (
    SUPPORTED_DTYPES,
    HostKernels,
    InstructionSet,
    Outputs,
    Rule,
    Scale,
    TileSegment,
    supported_instruction_sets,
)
from longshore.kernels.reference import canonical, rule_output
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.sgd import SGDRule
from tests.kernels.numbers import (
    MOMENTUM_RULES,
    OTHER_RULES,
    RULES,
    arrays_of,
    awkward,
    buffer_of,
    rounded,
    same_bits,
    stepped_buffer,
    written,
)
from tests.support import sum_of_squares

SCALE = Scale(0.7, 1 / 3)
PIECE_NUMEL = 1 << 16  # kPieceNumel of native/buffers.h


def cuts(numel: int, at: list[int]) -> list[tuple[int, int]]:
    """[0, numel) cut at these places, as (begin, end)."""
    places = sorted({0, numel, *(place % numel for place in at)})
    return list(itertools.pairwise(places))


# --- step_tile against the oracle ---


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", [*RULES, *OTHER_RULES, *MOMENTUM_RULES], ids=str)
@pytest.mark.parametrize("gradient_dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
def test_step_equals_the_rule_step(
    kernels: HostKernels, rule: Rule, gradient_dtype: torch.dtype, in_place: bool
) -> None:
    numel = PIECE_NUMEL + 77
    buffer, gradient = buffer_of(numel, 1, arrays_of(rule)), awkward(numel, 9).to(gradient_dtype)
    expected = stepped_buffer(buffer, gradient, rule, SCALE)
    expected_output = rule_output(buffer.unbind(), gradient, rule, SCALE)
    assert expected.isnan().any() and expected.isfinite().any()
    for output_dtype in (None, *SUPPORTED_DTYPES):
        source, given_gradient = buffer.clone(), gradient.clone()
        target = source if in_place else torch.full_like(buffer, 7.0)
        output = None if output_dtype is None else torch.full((numel,), 7.0, dtype=output_dtype)
        kernels.step_tile(source, target, [TileSegment(0, given_gradient, output, 0)], [rule], SCALE)
        assert same_bits(target, expected)
        assert in_place or same_bits(source, buffer)
        assert same_bits(given_gradient, gradient)
        if output is not None:
            assert same_bits(output, rounded(expected_output, output_dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", [*RULES, *OTHER_RULES], ids=str)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
def test_an_element_that_is_not_its_rounded_master_is_the_master(
    kernels: HostKernels, rule: Rule, dtype: torch.dtype, in_place: bool
) -> None:
    numel = PIECE_NUMEL + 77
    buffer, gradient = buffer_of(numel, 1, arrays_of(rule)), awkward(numel, 9)
    parameter = written(buffer[0], dtype)
    expected = stepped_buffer(buffer, gradient, rule, SCALE, parameter)
    ignored = stepped_buffer(buffer, gradient, rule, SCALE)
    assert 0.1 < (expected[0].view(torch.int32) != ignored[0].view(torch.int32)).float().mean() < 0.5
    source = buffer.clone()
    target = source if in_place else torch.full_like(buffer, 7.0)
    kernels.step_tile(source, target, [TileSegment(0, gradient, parameter, 0)], [rule], SCALE, outputs=Outputs.COMPARED)
    assert same_bits(target, expected)
    assert same_bits(parameter, rounded(expected[0], dtype))
    assert in_place or same_bits(source, buffer)


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", [*RULES, *OTHER_RULES], ids=str)
@pytest.mark.parametrize("gradient_dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
def test_parameters_that_are_their_own_masters(
    kernels: HostKernels, rule: Rule, gradient_dtype: torch.dtype, in_place: bool
) -> None:
    """The buffer has the states alone, of which SGD may have none, and only the segment is written."""
    numel, behind = PIECE_NUMEL + 77, 13
    buffer, gradient = buffer_of(numel, 1, arrays_of(rule)), awkward(numel, 9).to(gradient_dtype)
    expected = stepped_buffer(buffer, gradient, rule, SCALE)
    source = torch.cat([torch.full((len(buffer) - 1, behind), 3.0), buffer[1:]], 1)
    target = source if in_place else torch.full_like(source, 3.0)
    before, parameter = source.clone(), buffer[0].clone()
    segments = [TileSegment(behind, gradient, parameter, 0)]
    kernels.step_tile(source, target, segments, [rule], SCALE, Outputs.MASTERS)
    assert same_bits(parameter, expected[0])
    assert same_bits(target[:, behind:], expected[1:]) and (target[:, :behind] == 3.0).all()
    assert in_place or same_bits(source, before)


@pytest.mark.parametrize("output", [None, torch.bfloat16])
def test_masters_in_outputs_are_float32(kernels: HostKernels, output: torch.dtype | None) -> None:
    buffer, gradient = torch.zeros(2, 8), torch.ones(8)
    segments = [TileSegment(0, gradient, None if output is None else torch.zeros(8, dtype=output), 0)]
    with pytest.raises(ValueError, match="has its master in an output that is not float32"):
        kernels.step_tile(buffer, buffer, segments, RULES[:1], outputs=Outputs.MASTERS)
    with pytest.raises(ValueError, match="a buffer of 3 arrays, and Adam has 2"):
        kernels.step_tile(
            torch.zeros(3, 8),
            torch.zeros(3, 8),
            [TileSegment(0, gradient, torch.zeros(8), 0)],
            RULES[:1],
            outputs=Outputs.MASTERS,
        )
    assert not buffer.any()


def test_a_negative_zero_and_a_nan_that_somebody_wrote_are_taken(kernels: HostKernels) -> None:
    rule = SGDRule(lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=True)
    for dtype in SUPPORTED_DTYPES:
        buffer = torch.tensor([[0.0, 1.0, float("nan"), 2.0]])
        parameter = torch.tensor([-0.0, float("nan"), 3.0, 2.0], dtype=dtype)
        kernels.step_tile(
            buffer, buffer, [TileSegment(0, torch.full((4,), -0.0), parameter, 0)], [rule], outputs=Outputs.COMPARED
        )
        assert same_bits(buffer[0], torch.tensor([-0.0, float("nan"), 3.0, 2.0]).add(0.0)) or buffer[0, 0] == 0.0
        assert buffer[0, 1].isnan() and buffer[0, 2:].tolist() == [3.0, 2.0]


def test_a_parameter_to_compare_with_is_not_its_gradient(kernels: HostKernels) -> None:
    buffer, gradient = torch.zeros(3, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="overlaps its gradient"):
        kernels.step_tile(buffer, buffer, [TileSegment(0, gradient, gradient, 0)], RULES[:1], outputs=Outputs.COMPARED)


SAME_SIZE = [(a, b) for a in SUPPORTED_DTYPES for b in SUPPORTED_DTYPES if a.itemsize == b.itemsize]


@pytest.mark.covering(2)
@pytest.mark.parametrize("gradient_dtype, output_dtype", SAME_SIZE, ids=str)
def test_the_output_may_take_the_place_of_the_gradient(
    kernels: HostKernels, gradient_dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    numel = PIECE_NUMEL + 13
    buffer, gradient = buffer_of(numel, 2), awkward(numel, 8).to(gradient_dtype)
    expected = stepped_buffer(buffer, gradient, RULES[0])
    output = gradient.view(output_dtype)
    kernels.step_tile(buffer, buffer, [TileSegment(0, gradient, output, 0)], [RULES[0]])
    assert same_bits(buffer, expected)
    assert same_bits(output, rounded(expected[0], output_dtype))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torch_itself(kernels: HostKernels, decoupled: bool) -> None:
    """Past the oracle, straight to torch's fused optimizers; 16 divides the size (see test_reference)."""
    numel = PIECE_NUMEL + 16
    values = torch.randn(numel)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameter = values.clone().requires_grad_()
    plain = kind([parameter], lr=1e-3, weight_decay=0.01, fused=True)
    buffer = torch.stack([values, torch.zeros(numel), torch.zeros(numel)])
    for step in range(1, 21):
        gradient = torch.randn(numel) * 10.0 ** torch.empty(numel).uniform_(-6, 2)
        parameter.grad = gradient.clone()
        plain.step()
        rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled, step=step)
        kernels.step_tile(buffer, buffer, [TileSegment(0, gradient, None, 0)], [rule])
        state = plain.state[parameter]
        assert torch.equal(buffer, torch.stack([parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])), step


betas = st.sampled_from([0.0, 0.4, 0.5, 0.9]) | st.floats(0, 0.9999)
decays = st.sampled_from([0.0, 0.01]) | st.floats(1e-30, 1)
adam_rules = st.builds(
    AdamRule,
    lr=st.floats(0, 1),
    beta1=betas,
    beta2=st.sampled_from([0.0, 0.95, 0.999]) | st.floats(0, 0.9999),
    eps=st.sampled_from([0.0, 1e-40, 1e-8]) | st.floats(0, 1),
    weight_decay=decays,
    step=st.integers(1, 2**24),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    bias_correction=st.booleans(),
)
lion_rules = st.builds(
    LionRule, lr=st.floats(0, 1), beta1=betas, beta2=betas, weight_decay=decays, maximize=st.booleans()
)
adagrad_rules = st.builds(
    AdagradRule,
    lr=st.floats(0, 1),
    lr_decay=st.sampled_from([0.0, 0.1]),
    eps=st.sampled_from([0.0, 1e-40, 1e-10]),
    weight_decay=decays,
    step=st.integers(1, 2**24),
    maximize=st.booleans(),
)
sgd_rules = st.builds(
    SGDRule,
    lr=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.9]) | st.floats(0, 1),
    dampening=st.sampled_from([0.0, 0.3]),
    weight_decay=decays,
    nesterov=st.booleans(),
    first=st.booleans(),
    maximize=st.booleans(),
)
rules_of_one_kind = st.one_of(
    st.lists(kind, min_size=1, max_size=3) for kind in (adam_rules, lion_rules, adagrad_rules, sgd_rules)
)
scales = st.builds(Scale, st.floats(1e-6, 10), st.just(1.0) | st.floats(1e-6, 10))


@pytest.mark.medium
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_tile_equals_the_rule_step(kernels_of: Callable[..., HostKernels], data: st.DataObject) -> None:
    """Any numel, cut into any segments with gaps, any rules and dtypes, any threads."""
    numel = data.draw(st.integers(1, 700), "numel")
    seed = data.draw(st.integers(0, 1000), "seed")
    in_place = data.draw(st.booleans(), "in place")
    scale = data.draw(scales, "scale")
    table = data.draw(rules_of_one_kind, "rules")
    kernels = kernels_of(
        data.draw(st.sampled_from(supported_instruction_sets()), "instruction set"),
        data.draw(st.sampled_from([1, 2, 3, 7]), "threads"),
    )
    buffer = buffer_of(numel, seed, max(arrays_of(rule) for rule in table))
    source = buffer.clone()
    target = source if in_place else torch.full_like(buffer, 7.0)
    expected_target = target.clone()
    segments, outputs = [], []
    for begin, end in cuts(numel, data.draw(st.lists(st.integers(0, numel - 1), max_size=8), "cuts")):
        if data.draw(st.integers(0, 4), "a gap if 0") == 0:
            continue
        gradient = awkward(end - begin, seed + begin).to(data.draw(st.sampled_from(SUPPORTED_DTYPES), "gradient"))
        output_dtype = data.draw(st.sampled_from((None, *SUPPORTED_DTYPES)), "output")
        output = None if output_dtype is None else torch.empty(end - begin, dtype=output_dtype)
        which = data.draw(st.integers(0, len(table) - 1), "rule")
        segments.append(TileSegment(begin, gradient, output, which))
        stepped = stepped_buffer(buffer[:, begin:end], gradient, table[which], scale)
        expected_target[:, begin:end] = stepped
        if output is not None:
            outputs.append((output, rounded(stepped[0], output.dtype)))
    kernels.step_tile(source, target, segments, table, scale)
    assert same_bits(target, expected_target)
    assert in_place or same_bits(source, buffer)
    for output, expected in outputs:
        assert same_bits(output, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    numel=st.integers(2 * PIECE_NUMEL, 3 * PIECE_NUMEL),
    at=st.lists(st.integers(0, 3 * PIECE_NUMEL), max_size=40),
    threads=st.sampled_from([1, 2, 3, 7]),
    isa=st.sampled_from(supported_instruction_sets()),
)
def test_the_cut_and_the_threads_change_no_bit(
    kernels_of: Callable[..., HostKernels], numel: int, at: list[int], threads: int, isa: InstructionSet
) -> None:
    buffer, gradient = buffer_of(numel, numel), awkward(numel, numel + 5).bfloat16()
    whole, whole_output = buffer.clone(), torch.empty_like(gradient)
    one_thread = kernels_of(InstructionSet.BASELINE, 1)
    one_thread.step_tile(whole, whole, [TileSegment(0, gradient, whole_output, 0)], RULES[:1], SCALE)
    output = torch.empty_like(gradient)
    segments = [TileSegment(begin, gradient[begin:end], output[begin:end], 0) for begin, end in cuts(numel, at)]
    kernels_of(isa, threads).step_tile(buffer, buffer, segments, RULES[:1], SCALE)
    assert same_bits(buffer, whole)
    assert same_bits(output, whole_output)


# --- float modes ---


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode that torch knows")
    try:
        assert torch.full((1,), 2.0**-149).mul(1.0).item() == 0  # it bites
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("numel", [100, 3 * PIECE_NUMEL], ids=["one_piece", "several_pieces"])
def test_flush_to_zero_in_the_caller_changes_no_bit(kernels: HostKernels, numel: int) -> None:
    small = 2.0**-130
    buffer = torch.randn(3, numel) * small
    buffer[2].abs_()
    gradient = torch.randn(numel)
    rule = AdamRule(1e-42, 0.9, 0.999, 1e-40, 0.0, True, step=1)
    scale = Scale(small, 1.0)
    expected = stepped_buffer(buffer, gradient, rule, scale)
    summed = buffer + gradient * small
    squares = buffer[2].double().square().sum().item()
    assert ((expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)).float().mean() > 0.9
    denormals = buffer[2].clone()
    target = buffer.clone()
    addend = gradient * small
    with flushed_denormals():
        threads_made_here = HostKernels(threads=2, instruction_set=kernels.instruction_set)
        stepped = [buffer.clone(), buffer.clone()]
        for which, buffer_copy in zip((kernels, threads_made_here), stepped, strict=True):
            which.step_tile(buffer_copy, buffer_copy, [TileSegment(0, gradient, None, 0)], [rule], scale)
        for row in target:
            kernels.accumulate(row, addend, add=True)
        total = sum_of_squares(kernels, [[denormals]])
        assert torch.full((1,), 2.0**-149).mul(1.0).item() == 0  # the caller keeps its mode
    for buffer_copy in stepped:
        assert same_bits(buffer_copy, expected)
    assert same_bits(target, summed)
    assert math.isclose(total, squares, rel_tol=1e-12) and total > 0


# --- accumulate, reconcile, sum_of_squares ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000, 2 * PIECE_NUMEL + 5])
def test_accumulate_equals_torch(kernels: HostKernels, dtype: torch.dtype, numel: int) -> None:
    before, source = awkward(numel, 1), awkward(numel, 2).to(dtype)
    for add in (True, False):
        target = before.clone()
        kernels.accumulate(target, source, add=add)
        assert same_bits(target, canonical(before + source.float()) if add else source.float())
    second = awkward(numel, 3).to(dtype)
    kernels.sum_of_two(target, source, second)
    assert same_bits(target, canonical(source.float() + second.float()))
    kernels.sum_of_two(target, source, second.float())  # of two dtypes
    assert same_bits(target, canonical(source.float() + second.float()))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("adopt", [True, False])
def test_reconcile_counts_and_adopts(kernels: HostKernels, dtype: torch.dtype, adopt: bool) -> None:
    numel = 2 * PIECE_NUMEL + 5
    before = torch.randn(numel) * 10.0 ** torch.empty(numel).uniform_(-9, 4)
    before[:4] = torch.tensor([0.0, -0.0, float("inf"), 2.0**-149])
    parameter = before.to(dtype, copy=True)
    master = before.clone()
    assert kernels.reconcile(master, parameter, adopt=adopt) == 0
    assert same_bits(master, before)  # what rounding took away is kept
    written = torch.arange(0, numel, 7)
    parameter[written] = torch.where(parameter[written] == 2.5, 5.0, 2.5).to(dtype)
    parameter[0] = -0.0  # differs from 0.0 in its sign alone
    assert kernels.reconcile(master, parameter, adopt=adopt) == len(written)
    expected = before.clone()
    if adopt:
        expected[written] = parameter[written].float()
    assert same_bits(master, expected)
    assert kernels.reconcile(master, parameter, adopt=False) == (0 if adopt else len(written))


def test_sum_of_squares_is_exact_to_a_few_units_of_a_double(kernels: HostKernels) -> None:
    parameters = [torch.randn(numel) for numel in (1, 15, 16, 17, 1000, 2 * PIECE_NUMEL + 5)]
    exact = math.fsum(x * x for values in parameters for x in values.tolist())
    found = sum_of_squares(kernels, [[values] for values in parameters])
    assert found == pytest.approx(exact, rel=1e-14)
    float32 = sum(values.square().sum().item() for values in parameters)
    assert abs(float32 / exact - 1) > 1e-10  # sums in float32 would not pass
    doubles = sum(values.double().square().sum() for values in parameters)
    assert found == pytest.approx(float(doubles), rel=1e-14)


def test_sum_of_squares_scales_in_float32(kernels: HostKernels) -> None:
    values = torch.randn(5000).bfloat16()
    scaled = values.float() * torch.tensor(0.7) * torch.tensor(1 / 3)
    assert sum_of_squares(kernels, [[values]], SCALE) == sum_of_squares(kernels, [[scaled]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    numels=st.lists(st.integers(1, 500) | st.integers(PIECE_NUMEL - 20, 2 * PIECE_NUMEL), min_size=1, max_size=3),
    at=st.lists(st.integers(0, 2 * PIECE_NUMEL), max_size=20),
    dtype=st.sampled_from(SUPPORTED_DTYPES),
    threads=st.sampled_from([1, 2, 3, 7]),
    isa=st.sampled_from(supported_instruction_sets()),
)
def test_no_cut_changes_a_bit_of_the_sum(
    kernels_of: Callable[..., HostKernels],
    numels: list[int],
    at: list[int],
    dtype: torch.dtype,
    threads: int,
    isa: InstructionSet,
) -> None:
    parameters = [torch.randn(numel).to(dtype) for numel in numels]
    whole = sum_of_squares(kernels_of(InstructionSet.BASELINE, 1), [[values] for values in parameters], SCALE)
    pieces = [[values[begin:end] for begin, end in cuts(values.numel(), at)] for values in parameters]
    assert sum_of_squares(kernels_of(isa, threads), pieces, SCALE) == whole


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_sum_of_squares_shows_what_is_not_finite(kernels: HostKernels, value: float) -> None:
    values = torch.randn(1000)
    values[999] = value
    found = sum_of_squares(kernels, [[torch.randn(50)], [values]])
    assert math.isnan(found) if math.isnan(value) else found == math.inf


# --- threads, processes and the interpreter's lock ---


@pytest.mark.parametrize("call", ["step_tile", "accumulate", "reconcile", "sum_of_squares"])
def test_python_runs_while_a_kernel_does(call: str) -> None:
    numel = 1 << 22
    buffer, source = torch.zeros(3, numel), torch.zeros(numel)
    master = buffer[0]  # here, since torch's indexing lets go of the lock too
    kernels = HostKernels(threads=1, instruction_set=InstructionSet.BASELINE)
    calls: dict[str, Callable[[], Any]] = {
        "step_tile": lambda: kernels.step_tile(buffer, buffer, [TileSegment(0, source, None, 0)], RULES[:1]),
        "accumulate": lambda: kernels.accumulate(master, source, add=True),
        "reconcile": lambda: kernels.reconcile(master, source, adopt=True),
        "sum_of_squares": lambda: sum_of_squares(kernels, [[source]] * 4),
    }
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    try:
        # Nobody is asked for the lock, so the thread runs only when it is let go of.
        sys.setswitchinterval(100)
        thread.start()
        time.sleep(0.01)
        before = ticks[0]
        for _ in range(20):
            calls[call]()
        assert ticks[0] > before
        before = ticks[0]
        sum(range(1_000_000))
        assert ticks[0] == before  # while Python that holds on to the lock lets nobody in
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_threads_follow_the_affinity_and_not_openmp() -> None:
    """torchrun sets OMP_NUM_THREADS=1 for torch's sake; the host step takes what the process may use."""
    cpus = os.sched_getaffinity(0)
    code = f"""
import os, torch
from longshore.kernels import HostKernels
print(torch.get_num_threads(), HostKernels().threads, end=" ")
os.sched_setaffinity(0, [{min(cpus)}])
print(HostKernels().threads)
"""
    assert run_python(code, OMP_NUM_THREADS="1") == f"1 {len(cpus)} 1"


def test_threads_of_a_cpu_set() -> None:
    first = min(os.sched_getaffinity(0))
    assert HostKernels(cpu_set=[first, first]).threads == 1
    assert HostKernels(threads=3, cpu_set=[first]).threads == 3


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted with Linux's /proc")
def test_kernels_for_the_same_cpus_share_their_threads() -> None:
    """An optimizer for each parameter must not start threads for each."""
    cpu, values = min(os.sched_getaffinity(0)), torch.zeros(1 << 18)
    before = _native_threads()
    many = [HostKernels(threads=5) for _ in range(100)]
    assert _native_threads() == before + 4  # the caller is the fifth
    bound = [HostKernels(threads=5, cpu_set=[cpu]) for _ in range(100)]
    assert _native_threads() == before + 9
    for kernels in (*many, *bound):
        kernels.accumulate(values, values, add=True)
    del many[1:], bound, kernels  # pyright: ignore[reportPossiblyUnboundVariable]
    gc.collect()
    assert _native_threads() == before + 4
    many.pop().accumulate(values, values, add=True)
    assert _native_threads() == before  # nobody uses them any more


def test_threads_of_python_share_the_threads_of_the_kernels() -> None:
    """They take turns, and each gets its own results."""
    sums: dict[int, Tensor] = {}

    def add(number: int) -> None:
        kernels, total = HostKernels(threads=3), torch.zeros(1 << 18)
        for _ in range(20):
            kernels.accumulate(total, torch.full((1 << 18,), float(number)), add=True)
        sums[number] = total

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((sums[number] == 20.0 * number).all()) for number in range(4))


@pytest.mark.slow
def test_a_forked_child_is_told_and_does_not_hang() -> None:
    """Neither in a call nor when it drops the kernels that it inherited."""
    code = """
import os, signal, time, torch
from longshore.kernels import HostKernels
kernels, values = HostKernels(threads=2), torch.zeros(1 << 18)
kernels.accumulate(values, values, add=True)
time.sleep(0.02)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        kernels.accumulate(values, values, add=True)
    except RuntimeError as error:
        own = HostKernels(threads=2)  # threads of its own, not those of the parent
        own.accumulate(values, values, add=True)
        del kernels, own
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
print(os.waitpid(child, 0)[1])
kernels.accumulate(values, values, add=True)
"""
    assert run_python(code) == "0"


@pytest.mark.medium
def test_an_error_is_the_last_that_a_program_prints() -> None:
    """nanobind lists all objects that live on at the end; a thread that is still there keeps them."""
    code = """
import threading
from longshore.kernels import HostKernels
threading.Thread(target=lambda kept=HostKernels(threads=1): threading.Event().wait(), daemon=True).start()
raise SystemExit("the error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "the error\n"


# --- what is refused ---


def tile(**changes: Any) -> dict[str, Any]:
    buffer = torch.zeros(3, 20)
    return {"source_buffer": buffer, "target_buffer": buffer, "segments": [], "rules": list(RULES[:1]), **changes}


def segment(offset: int = 0, numel: int = 10, output: Tensor | None = None, rule: int = 0) -> TileSegment:
    return TileSegment(offset, torch.zeros(numel), output, rule)


SHARED = torch.zeros(100)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"source_buffer": torch.zeros(3, 20, dtype=torch.float64)},
            r"a buffer is float32 \[buffer_arrays, buffer_numel\], not .*float64",
        ),
        (
            {"target_buffer": torch.zeros(60)},
            r"a buffer is float32 \[buffer_arrays, buffer_numel\], not torch.float32 \[60\]",
        ),
        ({"target_buffer": torch.zeros(2, 30)}, "source and target buffers differ in size"),
        ({"rules": [OTHER_RULES[0]]}, "a buffer of 3 arrays, and Lion has 2"),
        ({"rules": [OTHER_RULES[2]]}, "a buffer of 3 arrays, and Adagrad has 2"),
        ({"rules": [OTHER_RULES[4]]}, "a buffer of 3 arrays, and SGD has 2"),
        ({"rules": [RULES[0], OTHER_RULES[0]]}, r"of one kind, not \['AdamRule', 'LionRule'\]"),
        ({"rules": [(1.0, 2.0)]}, "do not step by a tuple"),
        ({"target_buffer": torch.zeros(3, 21)}, "source and target buffers differ in size"),
        ({"target_buffer": torch.zeros(20, 3).T}, "contiguous CPU tensors, not one of strides"),
        ({"source_buffer": torch.zeros(3, 20, device="meta")}, "on meta"),
        (
            {"source_buffer": SHARED[:60].view(3, 20), "target_buffer": SHARED[30:90].view(3, 20)},
            "the source and target buffers overlap without being the same",
        ),
        ({"segments": [segment(output=torch.zeros(9))]}, "a gradient of 10 elements with an output of 9"),
        ({"segments": [segment(output=torch.zeros(10).double())]}, "float32, bfloat16 and float16, not torch.float64"),
        ({"segments": [TileSegment(0, torch.zeros(10).int(), None, 0)]}, "bfloat16 and float16, not torch.int32"),
        ({"segments": [TileSegment(0, torch.zeros(20)[::2], None, 0)]}, r"strides \(2,\) on cpu"),
        ({"segments": [segment(numel=0)]}, "segment 0 of the tile has no elements"),
        ({"segments": [segment(), segment(9)]}, "segment 1 of the tile begins before the one ahead of it ends"),
        ({"segments": [segment(-1)]}, "segment 0 of the tile begins before"),
        ({"segments": [segment(), segment(11)]}, "segment 1 of the tile reaches past the end of the buffer"),
        ({"segments": [segment(rule=1)]}, "segment 0 of the tile names a rule that the tile does not have"),
        ({"segments": [segment(rule=-1)]}, "segment 0 of the tile names a rule that the tile does not have"),
        (
            {"segments": [TileSegment(0, SHARED[:10], SHARED[5:15], 0)]},
            "segment 0 of the tile has an output that overlaps its gradient; it may only take its place exactly",
        ),
        ({"rules": [replace(RULES[0], step=0)]}, "a step count below 1"),
    ],
)
def test_step_tile_refuses(kernels: HostKernels, changes: dict[str, Any], message: str) -> None:
    arguments = tile(**changes)
    SHARED.fill_(3.0)
    with pytest.raises(ValueError, match=message):
        kernels.step_tile(**arguments)
    assert torch.all(SHARED == 3.0)


def test_a_refused_table_writes_nothing(kernels: HostKernels) -> None:
    buffer, gradient = buffer_of(20, 1), torch.randn(10)
    output = torch.randn(10)
    before, output_before = buffer.clone(), output.clone()
    good, bad = TileSegment(0, gradient, output, 0), TileSegment(10, gradient, None, 5)
    with pytest.raises(ValueError, match="segment 1"):
        kernels.step_tile(buffer, buffer, [good, bad], RULES[:1])
    assert same_bits(buffer, before) and same_bits(output, output_before)
    kernels.step_tile(buffer, buffer, [good], RULES[:1])  # which alone is stepped
    assert not same_bits(buffer, before)


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", ["accumulate", "reconcile"])
@pytest.mark.parametrize(
    "target, source, message",
    [
        (torch.zeros(4).bfloat16(), torch.zeros(4), "masters and accumulators are float32, not torch.bfloat16"),
        (torch.zeros(4), torch.zeros(5), "5 elements for a buffer of 4"),
        (torch.zeros(4), torch.zeros(4).double(), "float32, bfloat16 and float16, not torch.float64"),
        (torch.zeros(8)[::2], torch.zeros(4), r"strides \(2,\)"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "on meta"),
    ],
)
def test_pairs_are_refused(kernels: HostKernels, method: str, target: Tensor, source: Tensor, message: str) -> None:
    option = {"add": True} if method == "accumulate" else {"adopt": True}
    with pytest.raises(ValueError, match=message):
        getattr(kernels, method)(target, source, **option)


def test_sum_of_squares_refuses(kernels: HostKernels) -> None:
    with pytest.raises(ValueError, match=r"not torch\.int64"):
        sum_of_squares(kernels, [[torch.arange(4)]])
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        sum_of_squares(kernels, [[torch.zeros(4), torch.zeros(8)[::2]]])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"threads": 0}, "1 to 4096 threads, not 0"),
        ({"threads": -1}, "1 to 4096 threads, not -1"),
        ({"threads": 5000}, "1 to 4096 threads, not 5000"),
        ({"cpu_set": []}, "cpu_set is empty"),
        ({"cpu_set": [-1]}, "CPU -1 is not among those that this process may use"),
        ({"cpu_set": [100000]}, "CPU 100000 is not among those"),
    ],
)
def test_kernels_refuse_threads_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostKernels(**options)


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "longshore.kernels._native.supported_instruction_sets", lambda: [InstructionSet.BASELINE], raising=True
    )
    with pytest.raises(ValueError, match="this CPU does not run AVX2 code; it runs"):
        HostKernels(instruction_set=InstructionSet.AVX2)
    assert HostKernels(threads=1).instruction_set is InstructionSet.BASELINE


def test_the_best_instruction_set_is_taken() -> None:
    found = supported_instruction_sets()
    assert found[0] is InstructionSet.BASELINE
    assert HostKernels(threads=1).instruction_set is found[-1]
