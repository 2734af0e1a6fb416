"""A rule is one file: signum.py, beside this one, is trained, configured, planned and documented without another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.engine.config.optimizers import _model
from longshore.kernels import MOST_STATES, Rule
from longshore.optim.family import RuleFamily
from longshore.optim.rules.lion import Lion, LionFamily

TESTS = Path(__file__).parents[1]

BEGIN = """
import sys
import torch
from optim.signum import Signum, SignumRule  # before the engine, as a file of longshore.optim.rules would be
import longshore
from support import PlainLoop, loss_of, same_weights, simulated, twins

OPTIONS = {"lr": 1e-2, "rate": 0.8, "weight_decay": 0.1}


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr, rate, weight_decay, foreach):
        super().__init__(params, {"lr": lr, "rate": rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                # An fma is a sum in double, where the product of two floats is exact; the values are not at a tie.
                one_minus = torch.tensor(1 - group["rate"]).double()
                m.copy_((one_minus * p.grad.double() + (m * torch.tensor(group["rate"])).double()).float())
                p.mul_(torch.tensor(1 - group["lr"] * group["weight_decay"]))
                p.add_(torch.tensor(-group["lr"]) * m.sign())
"""

CASES = {
    "optimizer": """
for dtype in (torch.float32, torch.bfloat16):
    for options in ({}, {"release_gradients": True, "offload": simulated(tile_numel=50)}):
        plain_model, model = twins(dtype)
        plain = PlainLoop(plain_model.parameters(), Plain, **OPTIONS)
        ours = Signum(model.parameters(), **OPTIONS, **options)
        for step in range(6):
            if step == 3:  # a state from one optimizer to another
                saved = ours.state_dict()
                ours = Signum(model.parameters(), **options)
                ours.load_state_dict(saved)
            loss_of(plain_model, step, dtype).backward()
            loss_of(model, step, dtype).backward()
            plain.step_on_grads()
            ours.step()
            ours.zero_grad()
            assert same_weights(plain_model, model), step
""",
    "engine": """
from engine.files import assert_trains_like, file
content = file(optimizer={"type": "signum", "params": OPTIONS})
assert_trains_like(content, lambda parameters: PlainLoop(parameters, Plain, **OPTIONS))
config = longshore.Config(optimizer={"type": "Signum"})
assert config.optimizer.arguments() == {"lr": 1e-4, "rate": 0.9, "weight_decay": 0.0, "maximize": False}
loaded = longshore.engine.config.load_config(file(optimizer={"type": "Signum"})).config
assert loaded.optimizer.rate == 0.5  # what DeepSpeed means
try:
    longshore.Config(optimizer={"type": "Signum", "rate": 1.0})
except longshore.ConfigError as error:
    assert "rate = 1.0: must be a number of at least 0 and below 1" in str(error), error
""",
    "device": """
from kernels.device_kernels import DEVICE, device_kernels
from kernels.numbers import awkward, buffer_of, same_bits, stepped_buffer
from longshore.kernels import HostKernels, TileSegment
rule, buffer, gradient = SignumRule(1e-2, 0.9, 0.1), buffer_of(1100, 1, 2), awkward(1100, 9)
expected = stepped_buffer(buffer, gradient, rule)
found = buffer.to(DEVICE, copy=True)
HostKernels(threads=1).step_tile(buffer, buffer, [TileSegment(0, gradient, None, 0)], [rule])
with device_kernels() as kernels:
    kernels.step_tile(found, found, [TileSegment(0, gradient.to(DEVICE), None, 0)], [rule])
assert same_bits(buffer, expected) and same_bits(found.cpu(), expected)
""",
    "planner and documentation": """
from longshore.plan.job import Job, PlanChoice, configuration
job = Job(optimizer="Signum")
assert job.state_arrays == 2
written = configuration(job, PlanChoice(stage=0, offload="cpu"))
assert written["optimizer"] == {"type": "Signum", "params": {"lr": 1e-4}}
from scripts.docs import config_page
page = config_page.page()
assert "### `Signum`" in page and "| `rate` | a number of at least 0 and below 1 | `0.9` |" in page
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_one_file(case: str) -> None:
    """In a process of its own: what is made from all rules is made when it is imported."""
    if case == "device":
        pytest.importorskip("triton")
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + CASES[case]],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_rule_with_more_states_than_kernels_step_is_an_error_when_it_is_defined() -> None:
    most = (TESTS.parent / "native/kernels.h").read_text()
    assert f"kMostArrays = {MOST_STATES + 1};" in most
    with pytest.raises(TypeError, match=r"Adan has 4 states, exp_avg, .*, and the kernels step at most 2 beside the"):
        type("Adan", (Rule,), {"states": ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad")})


def test_an_option_that_a_configuration_cannot_read_is_named() -> None:
    def shape(value: object, name: str) -> object:
        return value

    family = type("OddFamily", (RuleFamily,), {"options": {**LionFamily.options, "betas": shape}})
    odd = type("OddLion", (Lion,), {"rules": family})
    with pytest.raises(
        TypeError, match=r"OddLion: a configuration has no field for what shape\(\) reads, .*option betas"
    ):
        _model(odd)
