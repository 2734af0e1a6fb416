"""The recording of what kernels and collectives do: it is what runs now, and it sees each byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay.__main__ import RECORDED, differences
from replay.recorder import Recorder, Window
from replay.runs import RUNS

import longshore
from longshore.kernels import HostKernels


@pytest.mark.medium
def test_all_runs_are_as_recorded() -> None:
    """After a change that is meant to change them: ``make replay-record``."""
    command = [sys.executable, "-m", "replay"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines()[-1] == f"{len(RUNS)} runs, 0 other than recorded", done.stdout[-4000:]
    assert done.returncode == 0, done.stderr[-2000:]


def recorded(work: Callable[[], object]) -> Window:
    recorder = Recorder()
    with recorder.recording():
        work()
        return recorder.mark([])


_held: list[torch.Tensor] = []


def stepped(gradient: float = 1.0, states: str = "fp32", steps: int = 2, repeat: bool = False, at: int = 7) -> Window:
    """Two steps of a parameter, of whose gradient one element is given; ``repeat``: with nothing new between them."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 128).view(64, 2).clone())
    parameter.grad = torch.ones(64, 2)
    parameter.grad[at, 1] = gradient
    optimizer = longshore.AdamW([parameter], lr=0.1, offload=longshore.Offload(states=states, threads=1))

    def work() -> None:
        for _ in range(steps):
            optimizer.step()
            if not repeat:
                _ = optimizer.state_dict()
        optimizer.close()

    _held.append(parameter)  # so that the next one has another address
    return recorded(work)


@pytest.mark.parametrize("repeat", [False, True])
def test_equal_bytes_give_equal_records_wherever_they_are(repeat: bool) -> None:
    assert stepped(repeat=repeat) == stepped(repeat=repeat)
    assert _held[-1].data_ptr() != _held[-2].data_ptr()
    assert stepped(repeat=repeat).calls == ({"step": 1, "step_table": 1} if repeat else {"step": 2})


@pytest.mark.parametrize("repeat", [False, True])
def test_each_byte_counts(repeat: bool) -> None:
    for states, others in (("fp32", "bf16"), ("bf16", "fp32")):
        usual = stepped(states=states, repeat=repeat)
        assert stepped(1.0 + 2.0**-20, states, repeat=repeat).bytes != usual.bytes
        assert stepped(1.0 + 2.0**-20, states, repeat=repeat, at=63).bytes != usual.bytes
        assert stepped(states=states, steps=3, repeat=repeat).bytes != usual.bytes
        assert stepped(states=others, repeat=repeat).bytes != usual.bytes


def test_the_recording_has_each_native_call() -> None:
    windows = [each for by_rank in json.loads(RECORDED.read_text()).values() for rank in by_rank for each in rank]
    calls = {name for each in windows for name in each["calls"]}
    assert calls == {"step", "step_table", "accumulate", "sum_of_two", "reconcile", "block_sums"}


def test_sums_norms_and_comparisons_are_recorded() -> None:
    kernels = HostKernels(threads=1)
    target, source = torch.zeros(10), torch.arange(10.0)

    def work() -> None:
        kernels.accumulate(target, source, add=False)
        kernels.accumulate(target, source, add=True)
        kernels.sum_of_two(target, source, source)
        kernels.reconcile(target, source, adopt=True)
        kernels.block_sums([[source]])

    first = recorded(work)
    assert first.calls == {"accumulate": 2, "block_sums": 1, "reconcile": 1, "sum_of_two": 1}
    source[9] += 1
    assert recorded(work).bytes != first.bytes


def test_order_of_calls_does_not_count_and_weights_do() -> None:
    kernels, target = HostKernels(threads=1), torch.zeros(10)
    sources = [torch.arange(10.0), torch.ones(10)]

    def work(order: list[int]) -> Callable[[], None]:
        return lambda: [kernels.accumulate(target, sources[each], add=False) for each in order].clear()

    assert recorded(work([0, 1])) == recorded(work([1, 0])) != recorded(work([0, 0]))
    recorder = Recorder()
    assert recorder.mark([("w", target)]) == recorder.mark([("w", target.clone())])
    assert recorder.mark([("w", target)]) != recorder.mark([("w", target + 1)])


def test_differences_name_their_place() -> None:
    before = [[{"calls": {"step": 2}, "bytes": "a"}, {"calls": {"step": 2}, "bytes": "b"}]]
    now = [[{"calls": {"step": 2}, "bytes": "a"}, {"calls": {"step": 3}, "bytes": "b"}]]
    assert differences(before, before) == []
    assert differences(before, now) == ["0 1 calls step: 2, now 3"]
    assert differences(before, [[now[0][0]]])[0].startswith("0: [")
