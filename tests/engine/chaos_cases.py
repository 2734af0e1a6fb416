"""Random windows on random settings, with random delays on every rank's lanes; run on every rank."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from support import whole

import longshore
from engine.cases import OPTIONS, step_ahead
from engine.scenarios import HEADS, Backward, Oracle, Scenario, Window, drive, inputs, make_model


def delays(seed: int, most_s: float) -> Callable[[], None]:
    """What waits for a random time each time that it is called."""
    dice = random.Random(seed)
    return lambda: time.sleep(dice.random() * most_s)


class Schedule:
    """What a seed does, the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.stage = dice.choice([0, 1, 2])
        self.dtype = dice.choice([torch.float32, torch.bfloat16])
        self.place = dice.choice(["none", "cpu", "simulated", "simulated", "split"])
        self.ahead = dice.choice(["off", "on", "wrong", "mixed"])
        self.clip = dice.choice([None, None, 1e9, 3.0, 1e-3])
        self.overlap = dice.random() < 0.8
        self.bucket_numel = dice.choice([50, 600, 1100, 100_000])
        self.tile_numel = dice.choice([17, 100, 700])
        self.most_s = dice.choice([0.0, 0.0005, 0.002])
        self.usual = dice.choice([1, 1, 2, 3])
        self.seen: Counter[str] = Counter()

    def config(self) -> longshore.Config:
        return longshore.Config(
            stage=self.stage,
            offload_optimizer="none" if self.place == "none" else "cpu",
            reduce_bucket_numel=self.bucket_numel,
            allgather_bucket_numel=self.bucket_numel,
            overlap_comm=self.overlap,
            gradient_clipping=self.clip,
            optimizer={"type": "AdamW", **OPTIONS},
        )

    def offload(self, seed: int) -> longshore.Offload:
        staged = self.place in ("simulated", "split")
        return longshore.Offload(
            self.tile_numel,
            threads=1,
            transfer=longshore.SimulatedTransfer(seed, self.most_s) if staged else None,
            device="none" if self.place == "none" else "cpu",
            speculation_memory=0 if self.ahead == "off" else self.dice.choice([0.5, 1.0]),
            ratio=0.6 if self.place == "split" else 1.0,
        )

    def window(self) -> Window:
        """Backwards that are announced, or declared, or neither; some raw, some of which stay on their rank."""
        dice = self.dice
        count = self.usual if dice.random() < 0.7 else dice.choice([1, 2, 4])
        kind = dice.choice(["plain", "plain", "announced", "declared", "mixed"])
        self.seen[kind] += 1
        heads = [tuple(dice.sample(HEADS, dice.choice([1, 2, 3]))) for _ in range(count)]
        if kind == "announced":
            return Window(tuple(Backward((used,)) for used in heads), step_each=True, accumulation=count)
        if kind == "declared":
            last = count - 1
            backwards = [Backward((used,), boundary=number == last) for number, used in enumerate(heads)]
            return Window(tuple(backwards), step_each=True, accumulation=1)
        raw, stays = (dice.random() if kind == "mixed" else 0.0 for _ in range(2))
        backwards = []
        for used in heads:
            is_raw = dice.random() < raw
            backwards.append(Backward((used,), raw=is_raw, unsynchronized=not is_raw and dice.random() < stays))
        return Window(tuple(backwards), forwards_first=dice.random() < 0.3, accumulation=1)


def play(seed: int, windows: int = 5) -> Counter[str]:
    """Raises AssertionError where a weight is not the plain loop's; returns how often what happened."""
    import torch.distributed as dist

    rank, schedule = dist.get_rank(), Schedule(seed)
    dice, dtype = schedule.dice, schedule.dtype
    model = make_model(dtype)
    offload = schedule.offload(1000 * seed + rank)
    engine = longshore.initialize(model=model, config=schedule.config(), offload=offload).engine
    engine.optimizer.store.lane._worker._on_start = delays(1000 * seed + rank, schedule.most_s)
    step_ahead(engine.optimizer.store, schedule.ahead)
    oracle = Oracle(Scenario(), dtype, dist.get_world_size(), schedule.stage, **OPTIONS)
    try:
        for step in range(windows):
            if dice.random() < 0.2:
                _discard(engine, 100 + step, rank, dtype, raises=dice.random() < 0.5)
                schedule.seen["discarded"] += 1
            window = schedule.window()
            engine.set_gradient_accumulation_boundary(None)
            drive(engine, window, step, rank, dtype)
            gradients = oracle.gradients(window, step, window.accumulation or 1)
            oracle.loop.step(gradients, _coefficient(engine, schedule.clip))
            for (name, ours), theirs in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
                assert torch.equal(whole(ours), theirs), f"step {step}: {name} differs"
            if (record := engine.optimizer.speculation) is not None:
                schedule.seen.update(kept=record.kept, redone=record.redone, dropped=record.dropped)
            schedule.seen["stepped"] += 1
        return schedule.seen
    finally:
        engine.optimizer.close()


def _discard(engine: Any, step: int, rank: int, dtype: torch.dtype, raises: bool) -> None:
    """A backward whose window ends in ``zero_grad()``, with or without an exception in the middle."""
    handle = engine.module.first.weight.register_hook(_spoil) if raises else None
    try:
        engine.backward(engine(inputs(step, 0, rank, dtype), HEADS))
    except ArithmeticError:
        pass
    finally:
        if handle is not None:
            handle.remove()
    engine.zero_grad()


def _spoil(gradient: torch.Tensor) -> None:
    raise ArithmeticError("in the middle of backward")


def _coefficient(engine: Any, clip: float | None) -> float:
    if clip is None:
        return 1.0
    return float(torch.clamp(clip / (torch.tensor(engine.get_global_grad_norm()) + 1e-6), max=1.0))
