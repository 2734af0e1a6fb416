"""What engines answer scripts of DeepSpeed."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from longshore.compat.deepspeed.ops.adam import FusedAdam
from longshore.compat.deepspeed.runtime import lr_schedules
from torch import nn

import longshore
import longshore.compat.deepspeed as deepspeed
from longshore import LongshoreError

FILE = {"train_batch_size": 1, "gradient_clipping": 0.0}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}}


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = deepspeed.initialize(model=nn.Linear(4, 4), config={**FILE, **ADAM, **getattr(request, "param", {})})[0]
    yield made
    made.destroy()


def test_names_are_those_of_the_file(engine: Any) -> None:
    assert engine.optimizer_name() == "adam" and isinstance(engine.optimizer, longshore.AdamW)
    assert engine.optimizer_params() == ADAM["optimizer"]["params"]
    assert engine.scheduler_name() is None and engine.scheduler_params() is None
    assert engine.gradient_clipping() == 0.0 and engine.config.get("gradient_clipping") == 0.0


def test_names_of_a_schedule_and_of_an_optimizer_that_is_passed() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    model = nn.Linear(2, 2)
    made = deepspeed.initialize(
        model=model, optimizer=FusedAdam(model.parameters()), config={**FILE, "scheduler": schedule}
    )
    engine: Any = made[0]
    assert engine.optimizer_name() == "FusedAdam" and engine.optimizer_params() is None
    assert engine.scheduler_name() == "WarmupLR" and engine.scheduler_params() == schedule["params"]
    engine.destroy()


ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "engine, measured",
    [(ZERO, True), ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, False), ({}, False)],
    indirect=["engine"],
)
def test_the_norm_is_there_without_clipping(engine: Any, measured: bool) -> None:
    """As with DeepSpeed, which measures it at stages 1 to 3 unless the file says otherwise."""
    batch, twin = torch.ones(2, 4), nn.Linear(4, 4)
    twin.load_state_dict(engine.module.state_dict())
    engine.backward(engine(batch).square().sum())
    engine.step()
    twin(batch).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in twin.parameters() if each.grad is not None])
    found = engine.get_global_grad_norm()
    assert found == (pytest.approx(float(norm), rel=1e-6) if measured else None)


def test_longshores_own_initialize_measures_it_where_it_is_asked_to() -> None:
    for zero, measured in (({"stage": 2}, False), ({"stage": 2, "compute_grad_norm": True}, True)):
        config = {**FILE, **ADAM, "zero_optimization": zero}
        engine = longshore.initialize(model=nn.Linear(4, 4), config=config).engine
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert (engine.get_global_grad_norm() is not None) == measured
        engine.destroy()


def test_a_folder_without_a_checkpoint_is_loaded_as_none(engine: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no checkpoint; nothing was loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)


def test_a_checkpoint_is_loaded_by_a_path_that_is_a_string(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="one", client_state={"epoch": 3})
    path, client_state = engine.load_checkpoint(tmp_path)
    assert type(path) is str and path.split("/")[-1] == "one" and Path(path).is_dir()
    assert client_state == {"epoch": 3}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam, longshore.AdamW, torch.optim.NAdam, "function"])
@pytest.mark.filterwarnings("ignore:torch.optim.NAdam has no kernel")
def test_the_optimizer_that_was_given_is_the_one_that_is_returned(kind: Any, stage: int) -> None:
    """It goes on: it steps, its groups are those that are stepped, and its state is the one of the steps."""
    model, kept = nn.Linear(16, 4), []

    def making(parameters: Any) -> Any:
        kept.append(torch.optim.SGD(parameters, lr=0.5))
        return kept[0]

    given: Any = making if kind == "function" else kind(model.parameters(), lr=0.5)
    config = {**FILE, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=given, config=config)
    assert engine is not None and optimizer is (kept[0] if kind == "function" else given)
    assert optimizer.param_groups is engine.optimizer.param_groups
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.25
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    assert engine.get_lr() == [0.25] and not torch.equal(model.weight, before)
    assert optimizer.state.keys() == engine.optimizer.state.keys() and optimizer.overflow is False
    engine.destroy()


def test_without_one_the_engines_optimizer_is_returned() -> None:
    engine, optimizer, _, _ = deepspeed.initialize(model=nn.Linear(4, 4), config={**FILE, **ADAM})
    assert optimizer is engine.optimizer
    engine.destroy()


# -- no_sync -----------------------------------------------------------------------


def test_no_sync_is_not_nested_and_has_no_step(engine: Any) -> None:
    x = torch.ones(1, 4)
    with engine.no_sync():
        engine.backward(engine(x).sum())
        for call, words in ((engine.step, "call it after the block"), (lambda: engine.no_sync().__enter__(), "leave")):
            for kind in (AssertionError, LongshoreError):
                with pytest.raises(kind, match=words):
                    call()
    engine.step()
    assert engine.was_step_applied()
    with pytest.raises(KeyError), engine.no_sync():
        raise KeyError
    with engine.no_sync():  # after an error in a block, too
        pass


@pytest.mark.parametrize(
    "engine", [{}, *({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3))], indirect=True
)
def test_coalesced_gradients_are_not_stepped_inside_nor_nested(engine: Any) -> None:
    x = torch.ones(1, 4)
    outer, inner = engine.coalesce_grad_reduction, engine.coalesce_grad_reduction
    calls = [engine.step, lambda: inner().__enter__()]
    if engine.zero_optimization_stage() < 2:
        calls.append(lambda: engine.no_sync().__enter__())
    with outer():
        engine.backward(engine(x).sum())
        for call in calls:
            for kind in (AssertionError, LongshoreError):
                with pytest.raises(kind, match=r"inside coalesce_grad_reduction\(\): DeepSpeed refuses it"):
                    call()
        engine.backward(engine(x).sum())
    assert engine.optimizer._core.window.gradients_arrived  # nothing that was refused has discarded them
    engine.step()
    assert engine.was_step_applied()
    if engine.zero_optimization_stage() < 2:
        with engine.no_sync(), pytest.raises(AssertionError, match=r"inside no_sync\(\)"):
            inner().__enter__()
    with pytest.raises(KeyError), outer():
        raise KeyError
    with outer():  # after an error in a block, too
        pass


@pytest.mark.parametrize(
    "engine", [{"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}], indirect=True
)
def test_no_sync_is_refused_where_gradients_are_sharded(engine: Any) -> None:
    stage = engine.zero_optimization_stage()
    with pytest.raises(AssertionError, match=re.escape(f"no_sync() at stage {stage}")), engine.no_sync():
        pass
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.was_step_applied()


# -- leaves ------------------------------------------------------------------------


def test_leaves_by_name_and_suffix() -> None:
    utils = deepspeed.utils
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    inner = model[1]
    assert isinstance(inner, nn.Sequential)
    assert utils.set_z3_leaf_modules_by_name(model, ["1.0"]) == ([inner[0]], [])
    assert utils.get_z3_leaf_modules(model) == [inner[0]]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0", ".1"]) == ([model[0], inner[0], inner[1]], [])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0"], flag=False) == ([model[0], inner[0]], [])
    assert utils.get_z3_leaf_modules(model) == [inner[1]]
    for call in (utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix):
        assert call(model, ["nope"], raise_if_not_found=False) == ([], ["nope"])
        with pytest.raises(ValueError, match=r"found no module nope"):
            call(model, ["nope"])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("leaf_module", "wanted"),
    [
        ({"classes": ["Sequential"]}, [0, 1]),
        ({"classes": ["torch.nn.modules.container.Sequential"]}, [0, 1]),
        ({"names": ["blocks.1"]}, [1]),
        ({"name_suffixes": ["s.0"]}, [0]),
        ({}, []),
    ],
)
@pytest.mark.parametrize("stage", [3, 2])
def test_leaves_are_what_the_file_says(leaf_module: dict[str, Any], wanted: list[int], stage: int) -> None:
    model = Blocks()
    config = {**FILE, **ADAM, "zero_optimization": {"stage": stage, "leaf_module": leaf_module}}
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    wanted = wanted if stage == 3 else []  # where the file's section is read
    assert [deepspeed.utils.z3_leaf_module(each) for each in model.blocks] == [place in wanted for place in range(2)]
    assert deepspeed.utils.get_z3_leaf_modules(engine) == [model.blocks[place] for place in wanted]
    engine.destroy()


@pytest.mark.parametrize("by", ["the file", "a function"])
def test_a_leaf_needs_an_input_with_a_gradient(by: str) -> None:
    model = Blocks()
    zero: dict[str, Any] = {"stage": 3}
    if by == "a function":
        deepspeed.utils.set_z3_leaf_modules_by_name(model, ["blocks.0"])
    else:
        zero["leaf_module"] = {"names": ["blocks.0"]}
    engine: Any = deepspeed.initialize(model=model, config={**FILE, **ADAM, "zero_optimization": zero})[0]
    x = torch.ones(1, 4)
    for kind in (RuntimeError, AssertionError):
        with pytest.raises(kind, match=r"Sequential is a leaf module .* and no input of it requires a gradient"):
            engine(x)
    with torch.no_grad():  # no gradients are reduced
        engine(x)
    engine.backward(engine(x.requires_grad_()).sum())
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    model(torch.ones(1, 4))  # an ordinary model again


def test_a_leaf_counts_where_the_stage_is_written_as_a_string() -> None:
    from longshore.compat.zero import policy_for

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    deepspeed.utils.set_z3_leaf_modules_by_name(model, ["1"])
    assert policy_for(model, {"zero_optimization": {"stage": "3"}}) is not None
    assert policy_for(model, {"zero_optimization": {"stage": "2"}}) is None


# -- schedules ---------------------------------------------------------------------


def test_constants_of_schedules_are_the_names_of_their_parameters() -> None:
    names = [name for name in dir(lr_schedules) if name.isupper() and isinstance(getattr(lr_schedules, name), str)]
    assert len(names) > 30 and lr_schedules.WARMUP_LOG_RATE == "log" and lr_schedules.WARMUP_LINEAR_RATE == "linear"
    config = {
        "type": lr_schedules.WARMUP_DECAY_LR,
        "params": {
            lr_schedules.TOTAL_NUM_STEPS: 10,
            lr_schedules.WARMUP_NUM_STEPS: 5,
            lr_schedules.WARMUP_TYPE: lr_schedules.WARMUP_LINEAR_RATE,
        },
    }
    made = deepspeed.initialize(model=nn.Linear(2, 2), config={**FILE, **ADAM, "scheduler": config})
    schedule: Any = made[3]
    assert schedule.total_num_steps == 10 and schedule.min_lrs == [0.0]
    made[0].destroy()


def test_an_engine_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        made = deepspeed.initialize(model=nn.Linear(4, 4), config={**FILE, **ADAM})[0]
        made.backward(made(torch.ones(1, 4)).sum())
        made.step()
        made.destroy()
        alive = weakref.ref(made)
        del made
        assert alive() is None
    finally:
        gc.enable()


def test_a_configuration_under_both_of_its_names() -> None:
    config = {**FILE, **ADAM}
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config, config_params={"no": "file"})[0]
    assert engine.train_batch_size() == 1
    engine.destroy()
