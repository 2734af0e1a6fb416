"""Random windows on random settings, with random delays on every rank's threads; run on every rank."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from support import whole

import longshore
from engine.cases import OPTIONS, check_states, step_ahead
from engine.scenarios import HEADS, Backward, Oracle, Scenario, Window, drive, inputs, make_model, width_for
from longshore.errors import GradientError

UNITS = (("first", "heads.a", "heads.b", "second"), ("norm", "third"), HEADS, ())
"""What stage 3 gathers apart; the rest comes with the model."""
MODULES = ("first", "norm", "second", "third", "heads.a", "heads.b", "heads.c", "")
"""Where a forward or a backward raises; the last is the model itself: behind all that is gathered."""


def states_of(seed: int) -> str:
    """The format of the optimizer's states."""
    return ("fp32", "bf16", "fp32", "8bit")[seed % 4]


def delays(seed: int, most_s: float) -> Callable[[], None]:
    """What waits for a random time each time that it is called."""
    dice = random.Random(seed)
    return lambda: time.sleep(dice.random() * most_s)


class Place(NamedTuple):
    """Where a rank raises."""

    forward: bool
    """Otherwise in backward."""
    module: str


class Failure(NamedTuple):
    """A window that not all ranks get through, so that all discard it.

    Attributes:
        places: by rank; None: it does not raise by itself.
        before: backwards that succeed.
        after: backwards that the others begin behind that in which one raises.
        raw: the others call ``loss.backward()``; as every rank would that got through its forward.
    """

    places: tuple[Place | None, ...]
    before: int
    after: int
    raw: bool


class Schedule:
    """What a seed does, the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.stage = dice.choice([0, 1, 2, 3, 3])
        self.dtype = dice.choice([torch.float32, torch.bfloat16])
        self.place = dice.choice(["none", "cpu", "simulated", "simulated", "split"])
        self.ahead = dice.choice(["off", "on", "wrong", "mixed"])
        self.clip = dice.choice([None, None, 1e9, 3.0, 1e-3])
        self.overlap = dice.random() < 0.8
        self.bucket_numel = dice.choice([50, 600, 1100, 100_000])
        self.tile_numel = dice.choice([17, 100, 700])
        self.most_s = dice.choice([0.0, 0.0005, 0.002])
        self.usual = dice.choice([1, 1, 2, 3])
        self.units = dice.choice(UNITS)
        self.states = states_of(seed)
        self.seen: Counter[str] = Counter()
        self.seen[self.states] += 1

    def config(self) -> longshore.Config:
        bucket_numel = self.bucket_numel * (1 if self.states == "fp32" else 4)  # as its parameters are larger
        return longshore.Config(
            stage=self.stage,
            offload_device="none" if self.place == "none" else "cpu",
            reduce_bucket_numel=bucket_numel,
            allgather_bucket_numel=bucket_numel,
            overlap_comm=self.overlap,
            gradient_clipping=self.clip,
            optimizer={"type": "AdamW", **OPTIONS},
        )

    def wrap_policy(self) -> Callable[[str, Any], bool] | None:
        return (lambda name, _: name in self.units) if self.stage == 3 else None

    def offload(self, seed: int) -> longshore.Offload:
        staged = self.place in ("simulated", "split")
        return longshore.Offload(
            self.tile_numel,
            threads=1,
            transfer=longshore.SimulatedTransfer(seed, self.most_s) if staged else None,
            device="none" if self.place == "none" else "cpu",
            speculation_memory=0 if self.ahead == "off" else self.dice.choice(["50%", "100%"]),
            ratio=0.2 if self.place == "split" else 1.0,
            states=self.states,
            accumulate="device" if staged and seed % 2 else "auto",
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

    def failure(self, ranks: int) -> Failure:
        """On all ranks, or on one; at stage 3 each where it wants."""
        dice = self.dice
        places: list[Place | None] = [Place(dice.random() < 0.5, dice.choice(MODULES)) for _ in range(ranks)]
        alone = dice.choice([None, *range(ranks)])
        if self.stage < 3:
            # Ranks that do not gather cannot know that another one ended its forward, and wait for it in backward.
            places = [(places[0] if alone is None else Place(False, places[0].module))] * ranks
        if alone is not None:
            places = [place if rank == alone else None for rank, place in enumerate(places)]
        said = "forward" if any(place is not None and place.forward for place in places) else "backward"
        self.seen[f"{said} raised {'everywhere' if alone is None else 'on one rank'} at stage {self.stage}"] += 1
        raw = dice.random() < 0.5 and all(place is None or place.forward for place in places)
        return Failure(tuple(places), dice.choice([0, 0, 1]), dice.choice([0, 0, 1]), raw)


def play(seed: int, windows: int = 5) -> Counter[str]:
    """Raises AssertionError where a weight is not the plain loop's; returns how often what happened."""
    import torch.distributed as dist

    rank, schedule = dist.get_rank(), Schedule(seed)
    dice, dtype = schedule.dice, schedule.dtype
    model = make_model(dtype, width=width_for(schedule.states))
    offload = schedule.offload(1000 * seed + rank)
    engine = longshore.initialize(
        model=model, config=schedule.config(), offload=offload, wrap_policy=schedule.wrap_policy()
    ).engine
    _delay(engine.optimizer._core.members.store, 1000 * seed + rank, schedule.most_s)
    step_ahead(engine.optimizer._core.members.store, schedule.ahead)
    how = {"states": schedule.states, **OPTIONS}
    oracle = Oracle(Scenario(), dtype, dist.get_world_size(), schedule.stage, **how)
    try:
        for step in range(windows):
            if dice.random() < 0.1:
                engine.backward(engine(inputs(100 + step, 0, rank, dtype), HEADS))
                engine.zero_grad()
                schedule.seen["discarded"] += 1
            if dice.random() < 0.25:
                _fail(engine, schedule.failure(dist.get_world_size()), 200 + step, rank, dtype)
            if dice.random() < 0.2:
                _evaluate(engine, oracle, 300 + step, rank, tuple(dice.sample(HEADS, 2)))
                schedule.seen["evaluated"] += 1
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
        check_states(engine, oracle)
        return schedule.seen
    finally:
        engine.optimizer.close()


def _delay(store: Any, seed: int, most_s: float) -> None:
    """The thread that reduces, and at stage 3 what gathers: before it meets the other ranks, and before it waits."""
    store.collectives._worker._on_start = delays(seed, most_s)
    gathering = getattr(store.residence, "_gathers", None)
    if gathering is not None:
        wait, begin, finish = delays(-seed, most_s), gathering._collectives.begin, gathering._collectives.finish
        gathering._collectives.begin = lambda *args: (wait(), begin(*args))[1]
        gathering._collectives.finish = lambda meeting: (wait(), finish(meeting))[1]


def _evaluate(engine: Any, oracle: Oracle, step: int, rank: int, heads: tuple[str, ...]) -> None:
    x = inputs(step, 0, rank, next(oracle.model.parameters()).dtype)
    with torch.no_grad():
        assert torch.equal(engine(x, heads), oracle.model(x, heads)), f"evaluation before step {step} differs"


def _fail(engine: Any, failure: Failure, step: int, rank: int, dtype: torch.dtype) -> None:
    """A window that raises on every rank, which discards it and goes on."""
    mine, others = failure.places[rank], [place for other, place in enumerate(failure.places) if other != rank]
    engine.set_gradient_accumulation_boundary(True)
    try:
        for number in range(failure.before + 1 + failure.after):
            with contextlib.ExitStack() as stack:
                if number == failure.before and mine is not None:
                    module = engine.module.get_submodule(mine.module)
                    handle = module.register_forward_hook(_in_forward if mine.forward else _in_backward)
                    stack.callback(handle.remove)
                loss = engine(inputs(step, number, rank, dtype), HEADS)
                if failure.raw and mine is None and number >= failure.before:
                    loss.backward()
                else:
                    engine.backward(loss)
        engine.step()
    except ArithmeticError:
        assert mine is not None
    except GradientError:
        assert any(others), "no other rank failed"
    else:
        raise AssertionError(f"{failure} went unseen")
    engine.zero_grad()


def _in_forward(*_: object) -> None:
    raise ArithmeticError("in the middle of forward")


def _in_backward(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    output.register_hook(_spoil)
    return output


def _spoil(gradient: torch.Tensor) -> None:
    raise ArithmeticError("in the middle of backward")


def _coefficient(engine: Any, clip: float | None) -> float:
    if clip is None:
        return 1.0
    return float(torch.clamp(clip / (torch.tensor(engine.get_global_grad_norm()) + 1e-6), max=1.0))
