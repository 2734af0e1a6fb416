"""One cell of the table, run on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from on_device import device_type, keep_busy
from plain_states import StatesLoop
from support import whole

import longshore
from engine.scenarios import MUON, SCENARIOS, Oracle, Scenario, drive, groups_of, make_model, norm_of, width_for
from longshore.accelerator import current_stream_is
from longshore.kernels import HostRule, Scale
from longshore.optim.dtensor import held_part
from longshore.tiles import Forecast
from longshore.tiles.speculation import Predictor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", **OPTIONS},
    "Muon": {
        "type": "Muon",
        "muon_lr": MUON["lr"],
        "weight_decay": MUON["weight_decay"],
        "adam_lr": OPTIONS["lr"],
        "adam_weight_decay": OPTIONS["weight_decay"],
    },
}
"""As a configuration has them."""
BUCKETS = {"small": 50, "about": 1100, "large": 100_000}
"""The largest parameter has 1089 elements, and the largest of the wide model about four times as many."""


AHEAD = ("off", "on", "wrong", "mixed")
"""Whether tiles are stepped ahead, and whether the scale that they assume is the true one."""


class WrongForecast(Forecast):
    """Assumes another scale: always, or every other time."""

    def __init__(self, true: Forecast, sometimes: bool) -> None:
        self._true = true
        self._sometimes = sometimes
        self._count = 0

    def scale(self) -> Scale:
        self._count += 1
        return self._true.scale() if self._sometimes and self._count % 2 else Scale(0.375)

    def rules(self) -> Mapping[int, HostRule]:
        return self._true.rules()


class Stubborn(Predictor):
    """Bets whatever happened."""

    @property
    def bets(self) -> bool:
        return True


def step_ahead(store: Any, ahead: str) -> None:
    for speculator in (tier.speculator for tier in store.tiles.tiers):
        if speculator.record is not None:
            speculator._predictor = Stubborn()
            if ahead != "on":
                speculator.forecast = WrongForecast(speculator.forecast, ahead == "mixed")


def _device(place: str, rank: int) -> torch.device:
    """Where the model computes: on the accelerator of this rank if ``place`` begins with ``"device"``."""
    return torch.device(device_type(), rank) if place.startswith("device") else torch.device("cpu")


def engine_of(
    scenario: Scenario,
    stage: int,
    place: str,
    bucket: str,
    dtype: torch.dtype,
    ahead: str,
    optimizer: str = "AdamW",
    states: str = "fp32",
) -> Any:
    """The engine of a cell, on this rank."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    on = "cpu" if place == "device streamed" else _device(place, rank)
    model = make_model(dtype, scenario.tied, on, width_for(states))
    scenario.prepare(model)
    # At stage 2 a bucket has half of what is asked for: another is on its way meanwhile.
    bucket_numel = BUCKETS[bucket] * (2 if stage >= 2 else 1) * (1 if states == "fp32" else 4)
    config = longshore.Config(
        stage=stage,
        offload_device="none" if place == "none" else "cpu",
        param_device="cpu" if place == "device streamed" else "none",
        reduce_bucket_numel=bucket_numel,
        allgather_bucket_numel=bucket_numel,
        gradient_clipping=scenario.clip,
        optimizer=OPTIMIZERS[optimizer],
        **scenario.config,
    )
    staged = place in ("simulated", "split")
    transfer = longshore.SimulatedTransfer(rank, scenario.max_delay_s) if staged else None
    offload = longshore.Offload(
        scenario.tile_numel,
        threads=1,
        transfer=transfer,
        device=config.offload_device,
        speculation_memory=0 if ahead == "off" else "100%",
        ratio=0.2 if place.endswith("split") else 1.0,
        states=states,
        accumulate="device" if place == "split" else "auto",
    )
    schedule = scenario.schedule
    units = ("first", "heads.a", "heads.b", *(() if scenario.tied else ("second",)))
    with warnings.catch_warnings():
        if optimizer == "Muon" or states != "fp32":
            # Of the little that AdamW steps beside Muon, or in larger buckets, a rank may have no parameter that fits
            # the device's share.
            warnings.filterwarnings("ignore", "ratio=")
        return longshore.initialize(
            model=model,
            model_parameters=groups_of(scenario, model, optimizer),
            config=config,
            offload=offload,
            wrap_policy=(lambda fqn, _: fqn in units) if stage == 3 else None,
            lr_scheduler=(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule))
            if schedule
            else None,
        ).engine


def program(stage: int, place: str, optimizer: str = "AdamW") -> list[Any]:
    """What an engine of this stage and place is made of: equal lists train with the same code."""
    engine = engine_of(SCENARIOS["single backward"], stage, place, "small", torch.float32, "off", optimizer)
    try:
        store = engine.optimizer._core.members.store
        made = [type(entry) for part in store.tiles.tiers for entry in (part.streams, part.kernels)]
        return [type(store), *made, engine.explain(False).tiles]
    finally:
        engine.optimizer.close()


def run(
    name: str,
    stage: int,
    place: str,
    bucket: str,
    dtype_name: str,
    ahead: str,
    world_size: int,
    optimizer: str = "AdamW",
    states: str = "fp32",
) -> dict[str, Any]:
    """Train the scenario on an engine and in plain torch; raises where a weight differs in a bit."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    scenario, dtype = SCENARIOS[name], DTYPES[dtype_name]
    engine = engine_of(scenario, stage, place, bucket, dtype, ahead, optimizer, states)
    model = engine.module
    oracle = Oracle(scenario, dtype, world_size, stage, _device(place, rank), optimizer, states, **OPTIONS)
    base = [group["lr"] for group in oracle.loop.param_groups]
    clipped = kept = redone = 0
    step_ahead(engine.optimizer._core.members.store, ahead)
    try:
        for step in range(scenario.steps):
            if scenario.write is not None:
                for ours, theirs in zip(model.parameters(), oracle.model.parameters(), strict=True):
                    scenario.write(held_part(ours), step)
                    scenario.write(theirs, step)
                oracle.loop.refresh_all()
            window = scenario.plan(step)
            accumulation = window.accumulation or engine.gradient_accumulation_steps()
            drive(engine, window, step, rank, dtype)
            if scenario.schedule is not None:
                for group, lr in zip(oracle.loop.param_groups, base, strict=True):
                    group["lr"] = lr * scenario.schedule(step)
            gradients = oracle.gradients(window, step, accumulation)
            coefficient = 1.0
            if scenario.clip is not None:
                norm = engine.get_global_grad_norm()
                assert norm is not None
                assert abs(norm - norm_of(gradients)) <= 1e-6 * norm
                coefficient = float(torch.clamp(scenario.clip / (torch.tensor(norm) + 1e-6), max=1.0))
                clipped += coefficient < 1.0
            oracle.loop.step(gradients, coefficient)
            for (fqn, ours), theirs in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
                assert torch.equal(whole(ours), theirs.to(ours.device)), f"step {step}: {fqn} differs"
            if (record := engine.optimizer.speculation) is not None:
                kept, redone = kept + record.kept, redone + record.redone
            for entry, parameter in zip(engine.explain(False).parameters, oracle.loop.parameters, strict=True):
                gradient = gradients[[id(p) for p in oracle.loop.parameters].index(id(parameter))]
                assert entry.applied == (gradient is not None), entry
        check_states(engine, oracle)
        tiles = engine.explain(False).tiles
        formats = {
            tile.format.value for part in engine.optimizer._core.members.store.tiles.tiers for tile in part.tiles
        }
        found = {"clipped": clipped, "tiles": tiles, "steps": engine.global_steps, "kept": kept, "redone": redone}
        return {**found, "formats": formats}
    finally:
        engine.optimizer.close()


def check_states(engine: Any, oracle: Oracle) -> None:
    """States that are not float32 are the oracle's; every rank has to ask."""
    if not isinstance(oracle.loop, StatesLoop):
        return
    ours = dict(engine.module.named_parameters())
    index_of = {id(parameter): index for index, parameter in enumerate(oracle.loop.parameters)}
    for fqn, theirs in oracle.model.named_parameters():
        kept = oracle.loop.kept[index_of[id(theirs)]]
        state = engine.optimizer.state[ours[fqn]] if kept.has_states else {}
        assert state.get("step", 0) == kept.step, fqn
        for name in kept.names if kept.has_states else ():
            assert torch.equal(whole(state[name]).cpu(), kept.read(name).view(theirs.shape)), (fqn, name)


def distance(name: str, stage: int, world_size: int) -> float:
    """The largest difference to the plain loop's weights after three steps, relative to the largest weight."""
    import torch.distributed as dist

    scenario = SCENARIOS[name]
    model = make_model(torch.float32)
    config = longshore.Config(stage=stage, optimizer={"type": "AdamW", **OPTIONS}, **scenario.config)
    engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(100, threads=1)).engine
    oracle = Oracle(scenario, torch.float32, world_size, stage, **OPTIONS)
    try:
        for step in range(scenario.steps):
            drive(engine, scenario.plan(step), step, dist.get_rank(), torch.float32)
            accumulation = engine.gradient_accumulation_steps()
            oracle.loop.step(oracle.gradients(scenario.plan(step), step, accumulation))
        pairs = [
            (whole(ours), theirs) for ours, theirs in zip(model.parameters(), oracle.model.parameters(), strict=True)
        ]
        largest = max(float(theirs.detach().abs().max()) for _, theirs in pairs if theirs.numel())
        return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs if ours.numel()) / largest
    finally:
        engine.optimizer.close()


class Late(torch.autograd.Function):
    """Keeps the stream busy in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        keep_busy(40_000_000)
        return gradients[0]


class OnTwoStreams(torch.nn.Module):
    """Two branches, the first on a stream of its own; the gradients of one of them are late."""

    def __init__(self, device: torch.device, late: int) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 16, device=device) for _ in range(2))
        self.late = late
        self.beside: torch.Stream | None = None

    def branch(self, place: int, x: torch.Tensor) -> torch.Tensor:
        y = self.branches[place](x)
        return Late.apply(y) if place == self.late else y  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.beside is None:
            return (self.branch(0, x) + self.branch(1, x)).pow(2).mean()
        current = torch.accelerator.current_stream()
        self.beside.wait_stream(current)
        with current_stream_is(self.beside):
            first = self.branch(0, x)
        x.record_stream(self.beside)
        first.record_stream(current)
        second = self.branch(1, x)
        current.wait_stream(self.beside)
        return (first + second).pow(2).mean()


def weights_of_two_streams(stage: int, late: int) -> list[list[torch.Tensor]]:
    """Weights after three steps: all on one stream, and on two."""
    import torch.distributed as dist

    device = _device("device", dist.get_rank())
    found = []
    for beside in (False, True):
        torch.manual_seed(0)
        model = OnTwoStreams(device, late)
        nodes = []
        if beside:
            model.beside = torch.Stream(device)
            with current_stream_is(model.beside):  # gradients accumulate where these were made
                nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in model.branches[0].parameters()]
        config = longshore.Config(stage=stage, optimizer={"type": "AdamW", **OPTIONS})
        engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(100, threads=1)).engine
        assert len(nodes) == 2 * beside  # kept until here: the engine has them now
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            engine.backward(engine(torch.randn(4, 16, generator=generator).to(device)))
            engine.step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
        engine.destroy()
    return found


def device_of_collectives(stage: int) -> int:
    """The current device of the thread that calls them."""
    engine = engine_of(Scenario(), stage, "device", "small", torch.float32, "off")
    store: Any = engine.optimizer._core.members.store
    found = store.collectives.run(torch.accelerator.current_device_index)
    engine.destroy()
    return found
