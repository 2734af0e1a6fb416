"""Reading and writing full values, run on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support import whole
from torch import nn

import longshore
from engine.scenarios import Backward, Oracle, Scenario, Window, drive, inputs, make_model
from longshore import utils

OPTIONS = {"lr": 2e-3, "weight_decay": 0.05}
NAMES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def read_and_write(stage: int, dtype: torch.dtype, world_size: int, staged: bool) -> None:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make_model(dtype)
    config = longshore.Config(
        stage=stage, offload_device="cpu", reduce_bucket_numel=500, optimizer={"type": "AdamW", **OPTIONS}
    )
    transfer = longshore.SimulatedTransfer(seed=rank) if staged else None
    offload = longshore.Offload(100, threads=1, transfer=transfer)
    engine = longshore.initialize(model=model, config=config, offload=offload).engine
    oracle = Oracle(Scenario(), dtype, world_size, stage, **OPTIONS)
    names = [name for name, _ in model.named_parameters()]
    try:
        for step in range(2):
            drive(engine, Window(), step, rank, dtype)
            oracle.loop.step(oracle.gradients(Window(), step, 1))
        for index, parameter in enumerate(model.parameters()):
            master = oracle.loop.masters[index][: parameter.numel()].detach().view(parameter.shape)
            assert torch.equal(utils.safe_get_full_fp32_param(parameter), master), names[index]
            moments = oracle.loop.moments(index) if parameter.numel() else (torch.zeros(0, 4),) * 2
            for key, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                found = utils.safe_get_full_optimizer_state(parameter, key)
                if parameter.numel():
                    assert torch.equal(found, expected), (names[index], key)
        # A gradient is read before the step, and replaced.
        engine.backward(engine(inputs(7, 0, rank, dtype), ("a",)))
        gradients = oracle.gradients(drive_once(("a",)), 7, 1)
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            found = utils.safe_get_full_grad(parameter)
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found, expected)
        chosen = model.second.weight
        index = [id(parameter) for parameter in model.parameters()].index(id(chosen))
        replacement = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(1)).to(dtype).float()
        utils.safe_set_full_grad(chosen, replacement)
        assert torch.equal(utils.safe_get_full_grad(chosen), replacement)
        gradients[index] = replacement
        # So are a master and a moment.
        bias = model.first.bias
        place = [id(parameter) for parameter in model.parameters()].index(id(bias))
        value = torch.linspace(-1.0, 1.0, bias.numel()) / 3
        utils.safe_set_full_fp32_param(bias, value)
        assert torch.equal(utils.safe_get_full_fp32_param(bias), value)
        assert torch.equal(whole(bias.detach()), value.to(dtype))
        utils.safe_set_full_optimizer_state(bias, value.abs(), "exp_avg_sq")
        with torch.no_grad():
            oracle.loop.masters[place][: bias.numel()] = value
            oracle.loop.optimizer.state[oracle.loop.masters[place]]["exp_avg_sq"][: bias.numel()] = value.abs()
        engine.step()
        oracle.loop.step(gradients)
        for name, ours, theirs in zip(names, model.parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs), name
    finally:
        engine.optimizer.close()


def edit_state(stage: int) -> None:
    """Edits of handed-out states on all ranks; a copy that is edited after a step which it did not follow."""
    import torch.distributed as dist

    rank = dist.get_rank()
    model = make_model(torch.float32)
    config = longshore.Config(stage=stage, offload_device="cpu", optimizer={"type": "AdamW", **OPTIONS})
    engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(100, threads=1)).engine
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    try:
        for step in range(3):
            drive(engine, Window(), step, rank, torch.float32)
            oracle.loop.step(oracle.gradients(Window(), step, 1))
            index = [parameter.numel() > 20 for parameter in model.parameters()].index(True)
            state = engine.optimizer.state[list(model.parameters())[index]]
            theirs = oracle.loop.optimizer.state[oracle.loop.masters[index]]
            state["exp_avg"].mul_(0.5)
            state["step"].add_(1)
            kept = state["exp_avg_sq"]
            kept[:1] = 0.25
            theirs["exp_avg"].mul_(0.5)
            theirs["step"].add_(1)
            theirs["exp_avg_sq"][: kept[:1].numel()] = 0.25
        for ours, plain in zip(model.parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), plain)
        drive(engine, Window(), 3, rank, torch.float32)
        kept.zero_()
        with pytest.raises(longshore.LongshoreError, match=r"exp_avg_sq, which was read .* before a step, was edited"):
            drive(engine, Window(), 4, rank, torch.float32)
    finally:
        engine.optimizer.close()


def read_between_backwards(stage: int, raw: bool) -> None:
    """What came before a reading and what comes after it are both stepped, each reduced by itself."""
    import torch.distributed as dist

    rank, dtype = dist.get_rank(), torch.float32
    model = make_model(dtype)
    config = longshore.Config(
        stage=stage, offload_device="cpu", reduce_bucket_numel=500, optimizer={"type": "AdamW", **OPTIONS}
    )
    engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(100, threads=1)).engine
    oracle = Oracle(Scenario(), dtype, 2, 2, **OPTIONS)
    window = Window((Backward((("a",),), raw=raw), Backward((("a", "b"),), raw=raw)))
    try:
        for step in range(2):
            for number, backward in enumerate(window.backwards):
                loss = engine(inputs(step, 10 * number, rank, dtype), backward.forwards[0])
                loss.backward() if raw else engine.backward(loss)
                so_far = oracle.gradients(Window(window.backwards[: number + 1]), step, 1)
                for parameter, expected in zip(model.parameters(), so_far, strict=True):
                    found = utils.safe_get_full_grad(parameter)
                    assert (found is None) == (expected is None)
                    assert found is None or torch.equal(found, expected)
            engine.step()
            oracle.loop.step(so_far)
            for (name, ours), theirs in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
                assert torch.equal(whole(ours), theirs), name
    finally:
        engine.optimizer.close()


def write_while_gradients_travel(stage: int) -> int:
    """A moment is written between backward and ``step()``, while reductions are under way that step tiles ahead.

    Returns:
        How many tiles were stepped ahead, and kept, in the windows with a write.
    """
    import torch.distributed as dist

    rank, dtype = dist.get_rank(), torch.float32
    model = make_model(dtype)
    config = longshore.Config(
        stage=stage, offload_device="cpu", reduce_bucket_numel=600, optimizer={"type": "AdamW", **OPTIONS}
    )
    offload = longshore.Offload(
        100, threads=1, transfer=longshore.SimulatedTransfer(rank, 0.0), speculation_memory="100%"
    )
    engine = longshore.initialize(model=model, config=config, offload=offload).engine
    oracle = Oracle(Scenario(), dtype, 2, stage, **OPTIONS)
    weight = model.second.weight
    place = [id(parameter) for parameter in model.parameters()].index(id(weight))
    store = engine.optimizer._core.members.store
    void, kept = store.states.ranges._void, 0

    def slowly(parameter: int) -> None:
        """The worst moment: passes end after they were voided, and before the buffer is written."""
        void(parameter)
        store.collectives._worker.idle_within(5.0)
        store.tiles.tier.worker.drain()

    try:
        for step in range(4):
            store.collectives._worker._on_start = lambda: time.sleep(0.005)
            engine.backward(engine(inputs(step, 0, rank, dtype), ("a", "b", "c")))
            if step >= 2:
                store.states.ranges._void = slowly
                utils.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.5), "exp_avg")
                store.states.ranges._void = void
                oracle.loop.optimizer.state[oracle.loop.masters[place]]["exp_avg"][: weight.numel()] = 0.5
            engine.step()
            oracle.loop.step(oracle.gradients(Window(), step, 1))
            for (name, ours), theirs in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
                assert torch.equal(whole(ours), theirs), f"step {step}: {name}"
            kept += engine.optimizer.speculation.kept if step >= 2 else 0
        return kept
    finally:
        engine.optimizer.close()


def drive_once(heads: tuple[str, ...]) -> Window:
    return Window((Backward((heads,)),))


def frozen_members(stage: int, dtype: torch.dtype) -> None:
    """Frozen parameters that were passed to ``initialize()`` are read and written as others are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 5))
    for frozen in (model[0].weight, model[2].bias):
        frozen.requires_grad_(False)
    expected = {name: each.detach().to(dtype).float().clone() for name, each in model.named_parameters()}
    config = longshore.Config(stage=stage, dtype=NAMES[dtype], optimizer={"type": "AdamW", **OPTIONS})
    engine = longshore.initialize(model=model, model_parameters=list(model.parameters()), config=config).engine
    try:
        for step in range(2):
            for name, parameter in engine.module.named_parameters():
                found = utils.safe_get_full_fp32_param(parameter)
                assert found.shape == expected[name].shape and found.dtype == torch.float32
                if not parameter.requires_grad or step == 0:
                    assert torch.equal(found, expected[name]), name
                    assert utils.safe_get_full_grad(parameter) is None
                    assert utils.safe_get_full_optimizer_state(parameter, "exp_avg") is None
                else:
                    assert not torch.equal(found, expected[name]), name
            engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().square().sum())
            engine.step()
        value = torch.linspace(-1, 1, 12).view(3, 4).to(dtype).float()
        utils.safe_set_full_fp32_param(engine.module[0].weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(engine.module[0].weight), value)
        assert torch.equal(whole(engine.module[0].weight).float(), value)
    finally:
        engine.destroy()


def read_without_an_engine(how: str, dtype: torch.dtype, sharded: bool) -> None:
    """Gradients in ``.grad``, and those that an optimizer ``"released"`` to the host, of several backwards."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    released = how == "released"
    made = None if how == "plain" else longshore.AdamW(model.parameters(), release_gradients=released)
    assert utils.safe_get_full_grad(model[0].weight) is None
    for number in range(2):
        for each in (model, twin):
            each(torch.full((2, 6), number + 1.0, dtype=dtype)).float().square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            found, expected = utils.safe_get_full_grad(ours), theirs.grad
            assert found is not None and expected is not None
            assert found.dtype == torch.float32 and found.device.type == "cpu" and found.shape == theirs.shape
            # On the host several backwards are added in float32.
            exact = not released or dtype == torch.float32 or number == 0
            assert torch.equal(found, expected.float()) if exact else torch.allclose(found, expected.float(), rtol=1e-2)
    if made is not None:
        made.step()
        made.zero_grad()
    model.zero_grad()
    assert utils.safe_get_full_grad(model[0].weight) is None
