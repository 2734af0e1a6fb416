"""Random schedules of streaming and random delays; ``make test-chaos`` plays 10,000, and a failing seed replays.

Memory of the device that was given back, and what is not there, reads as poison.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from on_device import device_type
from streaming.test_stream import CALLS, CHECKPOINTED, Network, Pair, loss_of
from torch import nn

import longshore
from longshore.engine import activation_checkpointing

pytestmark = pytest.mark.gpu

WINDOWS = 3
AT_A_TIME = 15


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    activation_checkpointing.install(None)
    delays(0, 0, 0)


def delays(seed: int, kernel_us: int, copy_us: int) -> None:
    if device_type() == "sim":  # another device is late by itself
        import simulated_device

        simulated_device.native().set_delays(seed, kernel_us, copy_us)


class Schedule:
    """What a seed does."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.seen: Counter[str] = Counter()
        delays(seed, dice.choice([0, 0, 20, 100]), dice.choice([0, 50, 200, 500]))
        release, dtype = dice.random() < 0.6, dice.choice([torch.float32, torch.bfloat16])
        itself = dice.random() < 0.4  # the stream checkpoints its blocks
        self.checkpoint = dice.choice([True, "cpu"]) if itself else False
        ahead = dice.choice([0, "100%", "50%"]) if release else 0
        self.pair = Pair(
            dtype,
            None if itself else dice.choice([None, *CHECKPOINTED[1:]]),
            release,
            tied=dice.random() < 0.7,
            offload=longshore.Offload(dice.choice([30, 100, 1000]), threads=1, speculation_memory=ahead),
            checkpoint=self.checkpoint,
        )
        self.seen[f"checkpoint {self.checkpoint}"] += 1
        activation_checkpointing.install(self.pair.model.checkpointed == "host")

    def play(self) -> Counter[str]:
        """Raises AssertionError where a bit differs; returns how often what happened."""
        try:
            for window in range(WINDOWS):
                self._window(window)
            counts = self.pair.stream.counts
            self.seen.update({"in time": counts.in_time, "late": counts.late})
            return self.seen
        finally:
            self.pair.optimizer.close()

    def _window(self, window: int) -> None:
        dice, pair = self.dice, self.pair
        for chance, change in ((0.15, self._freeze), (0.2, self._write), (0.15, self._again), (0.2, self._evaluate)):
            if dice.random() < chance:
                change()
        parts = [dice.choice([*CALLS.values(), self._any_order]) for _ in range(dice.choice([1, 1, 1, 2]))]
        seeds = [dice.randrange(1000) for _ in parts]

        def call(model: Network, _: int) -> None:
            for part, seed in zip(parts, seeds, strict=True):
                part(model, seed)

        clip = dice.choice([None, 1e9, 1e-2])
        pair.step(call, window, clip)
        self.seen[f"clipped to {clip}"] += 1

    @staticmethod
    def _any_order(model: Network, seed: int) -> None:
        dice = random.Random(seed)
        order = dice.choices(range(4), k=dice.choice([1, 3, 6]))
        loss_of(model, seed, order, dice.randrange(2)).backward()

    def _both(self) -> list[nn.Parameter]:
        index = self.dice.randrange(len(list(self.pair.model.parameters())))
        return [list(model.parameters())[index] for model in (self.pair.model, self.pair.plain)]

    def _freeze(self) -> None:
        trained = sum(each.requires_grad for each in self.pair.model.parameters())
        if trained < 6 or self.pair.model.checkpointed == "reentrant":  # whose blocks need an input that has a gradient
            return
        self.seen["frozen or thawed"] += 1
        for parameter in self._both():
            parameter.requires_grad_(not parameter.requires_grad)

    def _write(self) -> None:
        self.seen["written"] += 1
        with torch.no_grad():
            for parameter in self._both():
                parameter.mul_(0.5)
        self.pair.follow()

    def _again(self) -> None:
        self.seen["closed and streamed again"] += 1
        self.pair.stream.close()
        self.pair.stream = longshore.stream(self.pair.model, device_type(), checkpoint=self.checkpoint)

    def _evaluate(self) -> None:
        self.seen["evaluated"] += 1
        with torch.inference_mode():
            losses = [loss_of(model, 7).item() for model in (self.pair.model, self.pair.plain)]
        assert losses[0] == losses[1]


def play(first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            seen.update(Schedule(seed).play())
        except Exception as failure:
            where = "pytest --simulated-device tests/streaming/test_chaos.py -m chaos"
            raise AssertionError(f"replay with: {where} --first-seed {seed} --seeds 1") from failure
    return seen


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # reentrant checkpoints without gradients
@pytest.mark.parametrize("first", [0, pytest.param(AT_A_TIME, marks=pytest.mark.slow)])
def test_a_few_schedules(first: int) -> None:
    seen = play(first, AT_A_TIME)
    # They do what they are there for.
    happened = ("frozen or thawed", "written", "closed and streamed again", "evaluated", "in time", "late")
    for what in (*happened, "checkpoint cpu", "checkpoint True", "clipped to 0.01"):
        assert seen[what] > 0, what


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("part", range(2))
def test_chosen_schedules(part: int, request: pytest.FixtureRequest) -> None:
    """``--seeds`` of them, in two parts."""
    first, count = request.config.getoption("--first-seed"), request.config.getoption("--seeds")
    mine = (count + 1 - part) // 2
    seen = play(first + part * (count - mine), mine)
    assert sum(times for what, times in seen.items() if what.startswith("clipped to")) == WINDOWS * mine
