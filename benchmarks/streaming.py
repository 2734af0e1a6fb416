"""Models larger than the device: a step beside the larger of its computing and its copying.

The device is the simulated accelerator, on which both take the time that they are told: a block computes for so many
milliseconds, and bytes are copied at a bandwidth, in each direction. So the figures are of the order in which blocks
are fetched and freed, and not of the machine. What computing and copying take alone is measured in the same run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from benchmarks.report import Row, at_most
from benchmarks.timing import Case, Note, interleave, paired_ratio, summary
from longshore.accelerator import current_stream_is
from longshore.transfer import DeviceCopyStream

PART = "models larger than the device"

CASES = {"computing takes longer": (2.0, 1.1), "copying takes longer": (0.2, 1.1), "both take as long": (2 / 3, 1.2)}
"""Time in which a block computes forward, over the time in which it is copied, and the goal. Backward takes twice as
long as forward."""


@dataclass(frozen=True)
class Settings:
    """``blocks`` of ``width`` times ``width`` elements, each of which is copied in ``copy_ms``."""

    blocks: int
    width: int
    copy_ms: float
    rounds: int


class _Busy(torch.autograd.Function):
    """The identity, for which the device takes some milliseconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        _sleep(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _sleep(ctx.backward_ms)
        return gradients[0].clone(), None, None


def _sleep(milliseconds: float) -> None:
    torch.get_device_module()._sleep(round(2e6 * milliseconds))


class _Block(nn.Module):
    def __init__(self, width: int, forward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._forward_ms = forward_ms

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(self.linear(x), self._forward_ms, 2 * self._forward_ms)


def _throttle(ms_per_byte: float) -> None:
    """Let each copy take as long as its bytes do."""
    begin, start = DeviceCopyStream.fetch, DeviceCopyStream._start

    def slow_begin(self: Any, source: Tensor, target: Tensor, *rest: Any) -> Any:
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with current_stream_is(self.stream):
            _sleep(ms_per_byte * source.nbytes)
        return begin(self, source, target, *rest)

    def slow_start(self: Any, source: Any, target: Any, ready: Any, after: Any) -> Any:
        with current_stream_is(self.stream):
            for mark in ready:
                self.stream.wait_event(mark)
            _sleep(ms_per_byte * source.nbytes)
        return start(self, source, target, ready, after)

    DeviceCopyStream.fetch = slow_begin
    DeviceCopyStream._start = slow_start


def _step(model: nn.Module, width: int) -> None:
    model(torch.ones(1, width, device="sim", requires_grad=True)).sum().backward()
    torch.accelerator.synchronize()
    model.zero_grad()


def _copy(values: Sequence[Tensor]) -> None:
    stream = DeviceCopyStream(torch.device("sim", 0))
    for each in values:
        target = torch.empty_like(each, device="sim")
        stream.fetch(each, target, target)
    torch.accelerator.synchronize()


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    settings = Settings(**values)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import simulated_device

    simulated_device.register()
    torch.set_num_threads(1)
    _throttle(settings.copy_ms / (4 * settings.width**2))
    results: dict[str, Any] = {}
    for name, (share, _) in CASES.items():
        model = nn.Sequential(*(_Block(settings.width, share * settings.copy_ms) for _ in range(settings.blocks)))
        resident = copy.deepcopy(model).to("sim")
        handle = longshore.stream(model, "sim")
        # Each block is copied for forward and for backward, but for the last one, which is still there.
        parameters = [parameter.detach() for parameter in model.parameters()]
        copied = (parameters * 2)[:-1]
        cases = {
            "step": Case(partial(_step, model, settings.width)),
            "computing": Case(partial(_step, resident, settings.width)),
            "copying": Case(partial(_copy, copied)),
        }
        # The order is learned in the first step.
        seconds = interleave(cases, settings.rounds, lambda text, of=name: note(f"{of}: {text}"), warmups=2)
        results[name] = {"counts": handle.counts._asdict(), **{case: summary(found) for case, found in seconds.items()}}
        handle.close()
    return {"settings": asdict(settings), "torch": torch.__version__, "cases": results}


def rows(results: Mapping[str, Any]) -> list[Row]:
    table = []
    for name, entry in results["cases"].items():
        ms = {case: 1e3 * entry[case]["median_s"] for case in ("step", "computing", "copying")}
        longer = max(("computing", "copying"), key=lambda case: ms[case])
        ratio = paired_ratio(entry["step"]["rounds_s"], entry[longer]["rounds_s"])
        note = f"{', '.join(f'{case} {found:.0f} ms' for case, found in ms.items())}; simulated"
        what = f"a step where {name}, over the longer of the two"
        table.append(at_most(PART, what, ratio, "x", CASES[name][1], note))
    return table
