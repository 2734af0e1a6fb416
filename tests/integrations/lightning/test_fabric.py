"""Fabric with longshore ends with the weights of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn

import longshore
from integrations.lightning.modules import OPTIONS, Masters, assert_same, loader, network, plain_adamw, weights
from longshore.errors import CheckpointError, LongshoreError
from longshore.integrations.lightning import FabricLongshoreStrategy


def fabric(strategy: Any = "auto", **options: Any) -> Fabric:
    made = Fabric(strategy=strategy, **{"accelerator": "cpu", "devices": 1, **options})
    made.launch()
    return made


def train(run: Fabric, model: Any, optimizer: Any, schedule: Any = None, steps: int = 2, batches: int = 8) -> None:
    for number, batch in enumerate(run.setup_dataloaders(loader(batches))):
        accumulating = number % steps != steps - 1
        with run.no_backward_sync(model, enabled=accumulating):
            run.backward(model(batch).float().pow(2).mean() / steps)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()


def trained(strategy: Any = "auto", make: Any = plain_adamw, dtype: Any = None, **options: Any) -> nn.Module:
    run = fabric(strategy, **options)
    model = network().to(dtype)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    wrapped, optimizer, schedule = run.setup(model, optimizer, scheduler=schedule)
    train(run, wrapped, optimizer, schedule)
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loop_with_a_schedule(stage: int) -> None:
    assert_same(trained(FabricLongshoreStrategy(stage=stage)), trained())


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_one_line_optimizer_in_fabrics_own_strategy(precision: Any, release: bool) -> None:
    """``setup()`` converts the model when the optimizer is there already."""

    def make(parameters: Any) -> Any:
        return longshore.AdamW(parameters, release_gradients=release, **OPTIONS)

    found = trained(make=make, precision=precision)
    if precision == "bf16-true":
        for other in (make, *([] if release else [Masters])):  # Masters adds as torch does
            assert_same(found, trained(make=other, dtype=torch.bfloat16, precision=precision))
    else:
        assert_same(found, trained(precision=precision))


@pytest.mark.parametrize("name", ["longshore", "longshore_stage_1"])
def test_names(name: str) -> None:
    assert_same(trained(name), trained())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(precision: Any) -> None:
    make = Masters if precision == "bf16-true" else plain_adamw
    run = fabric(precision=precision)
    model = run.setup_module(network())
    optimizer = run.setup_optimizers(make(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)  # pyright: ignore
    train(run, model, optimizer, schedule, steps=1)
    strategy = FabricLongshoreStrategy(offload=longshore.Offload(transfer=longshore.SimulatedTransfer(seed=3)))
    ours = fabric(strategy, precision=precision)
    other = network()
    optimizer = plain_adamw(other.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    wrapped, optimizer, schedule = ours.setup(other, optimizer, scheduler=schedule)
    train(ours, wrapped, optimizer, schedule, steps=1)
    assert next(other.parameters()).dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_same(other, model.module)


def test_fp16_autocast_skips_overflows() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))
    run = fabric(FabricLongshoreStrategy(), plugins=plugin)
    model = network()
    wrapped, optimizer = run.setup(model, plain_adamw(model.parameters()))
    train(run, wrapped, optimizer, steps=1, batches=30)
    engine: Any = wrapped._forward_module
    assert 0 < engine.skipped_steps < engine.global_steps == 30
    plain = fabric(plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40)))
    twin = network()
    train(plain, *plain.setup(twin, plain_adamw(twin.parameters())), steps=1, batches=30)
    assert_same(model, twin)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_first_and_its_optimizer_later(stage: int) -> None:
    run = fabric(FabricLongshoreStrategy(stage=stage))
    with run.init_module():
        model = network()
    wrapped = run.setup_module(model)
    with torch.no_grad():
        wrapped(next(iter(loader())))
    given = plain_adamw(wrapped.parameters())
    optimizer = run.setup_optimizers(given)
    assert isinstance(optimizer, longshore.AdamW)
    train(run, wrapped, optimizer)
    expected = network()
    plain = fabric()
    train(plain, *plain.setup(expected, plain_adamw(expected.parameters())))
    assert_same(model, expected)
    with pytest.raises(ValueError, match=r"an optimizer already"):
        run.setup_optimizers(plain_adamw(wrapped.parameters()))
    with pytest.raises(ValueError, match=r"no model that was given to fabric.setup_module\(\) has"):
        run.setup_optimizers(plain_adamw(network().parameters()))


def test_clipping() -> None:
    def loop(run: Fabric, model: Any, optimizer: Any, clip: Any) -> list[float]:
        norms = []
        for batch in loader():
            run.backward(10 * model(batch).pow(2).mean())
            norms.append(float(clip(model, optimizer)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def exactly(model: nn.Module, optimizer: Any) -> torch.Tensor:
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        norm = torch.tensor(sum(float(each.double().pow(2).sum()) for each in gradients) ** 0.5, dtype=torch.float32)
        for each in gradients:
            each.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
        return norm

    run, model = fabric(FabricLongshoreStrategy()), network()
    both = run.setup(model, plain_adamw(model.parameters()))
    found = loop(run, *both, lambda *both: run.clip_gradients(*both, max_norm=0.3))
    plain, twin = fabric(), network()
    expected = loop(plain, *plain.setup(twin, plain_adamw(twin.parameters())), exactly)
    assert found == expected and max(found) > 0.3
    assert_same(model, twin)


def test_what_the_engine_cannot_clip() -> None:
    run, model = fabric(FabricLongshoreStrategy()), network()
    wrapped, optimizer = run.setup(model, plain_adamw(model.parameters()))
    run.backward(wrapped(next(iter(loader()))).sum())
    with pytest.raises(ValueError, match=r"by value .0.1.* or max_norm= .Fabric"):
        run.clip_gradients(wrapped, optimizer, clip_val=0.1)
    with pytest.raises(ValueError, match=r"norm_type=inf"):
        run.clip_gradients(wrapped, optimizer, max_norm=0.1, norm_type=float("inf"))
    optimizer.zero_grad()
    run.backward(wrapped(next(iter(loader()))).sum() * torch.inf)
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is (nan|inf)"):
        run.clip_gradients(wrapped, optimizer, max_norm=0.1)


def test_two_models_of_which_one_is_stepped_through_the_other() -> None:
    """As the generator of a GAN is, through the discriminator."""

    def loop(run: Fabric, pairs: Any) -> None:
        (first, stepper), (second, other) = pairs
        for batch in loader(4):
            other.zero_grad()
            run.backward(second(first(batch).detach()).pow(2).mean(), model=second)
            other.step()
            stepper.zero_grad()
            run.backward(second(first(batch)).mean(), model=first)
            stepper.step()

    results = []
    for strategy in ("auto", FabricLongshoreStrategy()):
        run, models = fabric(strategy), [network(), network()]
        loop(run, [run.setup(each, plain_adamw(each.parameters())) for each in models])
        results.append([parameter for each in models for parameter in weights(each)])
    assert_same(results[1], results[0])
    one = run.setup(model := network(), plain_adamw(model.parameters()))[0]
    with pytest.raises(LongshoreError, match=r"3 models have an optimizer.*backward\(loss, model=model\)"):
        run.backward(one(next(iter(loader()))).sum())


def test_a_closure() -> None:
    run, model = fabric(FabricLongshoreStrategy()), network()
    wrapped, optimizer = run.setup(model, plain_adamw(model.parameters()))
    plain, twin = fabric(), network()
    other, stepper = plain.setup(twin, plain_adamw(twin.parameters()))
    for batch in loader(3):
        for each, net, steps in ((run, wrapped, optimizer), (plain, other, stepper)):

            def closure(each: Any = each, net: Any = net, steps: Any = steps, batch: Any = batch) -> Any:
                steps.zero_grad()
                loss = net(batch).pow(2).mean()
                each.backward(loss)
                return loss

            assert torch.isfinite(steps.step(closure))
    assert_same(model, twin)


@pytest.mark.parametrize("stage", [2, 3])
def test_saving_and_going_on(tmp_path: Path, stage: int) -> None:
    def start() -> Any:
        run, model = fabric(FabricLongshoreStrategy(stage=stage)), network()
        optimizer = plain_adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return run, model, *run.setup(model, optimizer, scheduler=schedule)

    run, model, wrapped, optimizer, schedule = start()
    train(run, wrapped, optimizer, schedule)
    state = {"model": wrapped, "optimizer": optimizer, "schedule": schedule, "step": 4, "note": "here"}
    run.save(tmp_path / "all.ckpt", state)
    run.save(tmp_path / "weights.ckpt", {"model": wrapped})
    train(run, wrapped, optimizer, schedule)
    run2, model2, wrapped2, optimizer2, schedule2 = start()
    state = {"model": wrapped2, "optimizer": optimizer2, "schedule": schedule2, "step": 0}
    rest = run2.load(tmp_path / "all.ckpt", state)
    assert state["step"] == 4 and rest == {"note": "here"}
    train(run2, wrapped2, optimizer2, schedule2)
    assert_same(model2, model)
    loaded = torch.load(tmp_path / "weights.ckpt")["model"]
    run3, model3, wrapped3, *_ = start()
    run3.load(tmp_path / "all.ckpt", {"model": wrapped3})
    assert_same(list(loaded.values()), model3)
    assert run3.strategy.get_module_state_dict(wrapped3).keys() == loaded.keys()
    run3.load_raw(_raw(tmp_path, loaded), wrapped3)
    with pytest.raises(KeyError, match=r"has no 'more'"):
        run3.load(tmp_path / "all.ckpt", {"model": wrapped3, "more": 1})
    only = run3.setup_module(network())
    run3.load(tmp_path / "all.ckpt", {"model": only})
    assert_same(only.module, list(loaded.values()))


def _raw(folder: Path, state: Any) -> Path:
    torch.save(state, folder / "raw.pt")
    return folder / "raw.pt"


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    run, model = fabric(FabricLongshoreStrategy()), network()
    wrapped, optimizer = run.setup(model, plain_adamw(model.parameters()))
    state = {"model": wrapped, "optimizer": optimizer}
    with pytest.raises(TypeError, match=r"filter applies to files"):
        run.save(tmp_path / "a", state, filter={"model": lambda *_: True})
    run.backward(wrapped(next(iter(loader()))).sum())
    with pytest.raises(CheckpointError, match=r"window"):
        run.save(tmp_path / "a", state)
    optimizer.step()
    second, stepper = run.setup(other := network(), plain_adamw(other.parameters()))
    with pytest.raises(ValueError, match=r"2 models with their optimizers"):
        run.save(tmp_path / "a", {**state, "second": second, "stepper": stepper})
    run.save(tmp_path / "a", state)
    with pytest.raises(ValueError, match=r"is a folder with a model and its optimizer"):
        run.load(tmp_path / "a")
    with pytest.raises(ValueError, match=r"2 are to be loaded"):
        run.load(tmp_path / "a", {**state, "second": second})


def test_errors_say_what_to_call() -> None:
    run, model = fabric(FabricLongshoreStrategy()), network()
    with pytest.raises(ValueError, match=r"given 2 optimizers for one model"):
        run.setup(model, plain_adamw(model[0].parameters()), plain_adamw(model[3].parameters()))
    with pytest.raises(LongshoreError, match=r"0 models have an optimizer"):
        run.backward(model(next(iter(loader()))).sum())
    wrapped = run.setup_module(model)
    with pytest.raises(LongshoreError, match=r"a model that has no optimizer"):
        run.backward(wrapped(next(iter(loader()))).sum(), model=wrapped)
    counting = FabricLongshoreStrategy(gradient_accumulation_steps=2)
    naming = FabricLongshoreStrategy({"optimizer": {"type": "AdamW"}})
    with pytest.raises(longshore.ConfigError, match=r"contradicts your loop with Fabric"):
        fabric(counting).setup(other := network(), plain_adamw(other.parameters()))
    with pytest.raises(longshore.ConfigError, match=r"optimizer = .*fabric.setup"):
        fabric(naming).setup(other := network(), plain_adamw(other.parameters()))
    wrapped, _ = run.setup(other := network(), plain_adamw(other.parameters()))
    with pytest.raises(RuntimeError, match=r"fabric.backward\(loss\)"):
        wrapped(next(iter(loader()))).sum().backward()
