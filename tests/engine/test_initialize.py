"""``longshore.initialize``: what it takes, what it gives, and what it refuses before anything is trained."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import PlainLoop, loss_of, small_model
from torch import nn
from torch.utils.data import TensorDataset

import longshore
import longshore.checkpointing
from engine import files
from engine.files import OPTIONS, USERS_BLOCK, assert_same, file, gradients_of, started, train, without
from longshore.engine import ConfigError, activation_checkpointing
from longshore.kernels import HostKernels, usable_cpus


def initialize(**arguments: Any) -> Any:
    arguments.setdefault("model", small_model())
    return longshore.initialize(**arguments)


def test_a_real_users_file_trains(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(USERS_BLOCK)
    model, twin = small_model(), small_model()
    loop = PlainLoop(twin.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    with pytest.warns(UserWarning, match="gradient_clipping is not given"):
        engine, optimizer, loader, schedule = longshore.initialize(
            model=model, model_parameters=model.parameters(), config=path
        )
    assert isinstance(optimizer, torch.optim.Optimizer) and (loader, schedule) == (None, None)
    assert engine.module is model and engine.optimizer is optimizer
    assert (engine.zero_optimization_stage(), engine.train_batch_size(), engine.get_lr()) == (2, 1, [1e-4])
    for step in range(2):
        train(engine, [loss_of(engine, step)])
        gradients = gradients_of(twin, [loss_of(twin, step)])
        norm = torch.tensor(files.norm_of(gradients))
        loop.step(gradients, float(torch.clamp(1.0 / (norm + 1e-6), max=1.0)))
        assert_same(model, twin, step)
    engine.destroy()


def test_every_way_to_give_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file()))
    ours = longshore.Config(optimizer={"type": "AdamW", **OPTIONS}, tile_numel=100, threads=1)
    ways: list[dict[str, Any]] = [
        {"config": file()},
        {"config": path},
        {"config": str(path)},
        {"config": ours},
        {"config_params": file()},
        {"args": SimpleNamespace(deepspeed_config=str(path), other=3)},
        {"args": SimpleNamespace(other=3), "config": path},
        {"args": SimpleNamespace(deepspeed_config=None), "config": path},
    ]
    results = []
    for way in ways:
        engine = initialize(**way).engine
        train(engine, [loss_of(engine, 0)])
        results.append(engine.module)
        engine.destroy()
    for model in results:
        assert_same(model, results[0])
    assert not torch.equal(results[0][0].weight, small_model()[0].weight)


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": file(), "config_params": file()},
        {"config": file(), "args": SimpleNamespace(deepspeed_config="ds.json")},
        {"config_params": file(), "args": SimpleNamespace(deepspeed_config="ds.json")},
    ],
)
def test_a_configuration_is_given_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the configuration is given twice"):
        initialize(**arguments)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"model": None}, TypeError, r"needs model=, a torch\.nn\.Module, not NoneType"),
        ({"model": [1]}, TypeError, r"needs model=, a torch\.nn\.Module, not list"),
        ({"config": None}, ValueError, r"needs config=: a path, a dictionary, or a longshore\.Config"),
        ({"config": 3}, TypeError, r"config is a path, a dict or a longshore\.Config, not int"),
        ({"config": "nowhere.json"}, ConfigError, "there is no such file"),
        ({"mpu": object()}, ValueError, "mpu is not supported"),
        ({"mesh_param": (1, 2)}, ValueError, "mesh_param is not supported"),
        ({"config": without(file(), "optimizer")}, ConfigError, "optimizer: is missing, and none is passed; name one"),
        ({"config": longshore.Config()}, ConfigError, "optimizer: is missing, and none is passed; name one"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=1)}, ValueError, "an optimizer is given twice"),
        (
            {"config": without(file(), "optimizer"), "optimizer": 3},
            TypeError,
            r"optimizer is a torch\.optim\.Optimizer or makes one, not int",
        ),
        (
            {"config": without(file(), "optimizer"), "optimizer": lambda parameters: None},
            TypeError,
            r"optimizer= returned a NoneType, not a torch\.optim\.Optimizer",
        ),
        ({"model_parameters": nn.Parameter(torch.zeros(3))}, TypeError, "a list of parameters or groups, not one"),
        (
            {"lr_scheduler": lambda optimizer: None},
            TypeError,
            "lr_scheduler is a scheduler, .* not a function that returns NoneType",
        ),
        ({"training_data": 3}, TypeError, "training_data must have __getitem__ and __len__"),
        ({"training_data": list(range(4)), "collate_fn": 3}, TypeError, "collate_fn is a function"),
        ({"distributed_port": 3, "dist_init_required": True, "config": {}}, ConfigError, "train_batch_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        initialize(**{"config": file(), **arguments})


def test_everything_that_is_wrong_with_a_file_is_said_at_once_by_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what only the number of ranks shows; and before the ranks meet, who would not come here."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    content = {**without(file(**batch), "optimizer"), "zero_optimisation": {}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    for config, source in ((content, "config"), (path, str(path))):
        with pytest.raises(ConfigError) as caught:
            initialize(config=config)
        assert caught.value.source == source
        assert [problem.path for problem in caught.value.problems] == [
            "zero_optimisation",
            "train_batch_size",
            "optimizer",
        ]
        assert (
            "train_batch_size = 8: must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, and 8 "
            "is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x 4 ranks = 16"
        ) in str(caught.value)
    ours = longshore.Config(train_batch_size=8, micro_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as caught:
        initialize(config=ours)
    assert [problem.path for problem in caught.value.problems] == ["optimizer", "train_batch_size"]
    assert "micro_batch_size 2 x gradient_accumulation_steps 2 x 4 ranks" in str(caught.value)


def test_an_optimizer_that_cannot_be_read_is_not_called_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        initialize(config=file(optimizer={"type": "Adamm"}))
    assert [problem.path for problem in caught.value.problems] == ["optimizer.type"]


def test_other_parameters_than_the_optimizers() -> None:
    model = small_model()
    client = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="other parameters than model_parameters="):
        initialize(
            model=model,
            config=without(file(), "optimizer"),
            optimizer=client,
            model_parameters=list(model[0].parameters()),
        )


def test_ranks_that_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="dist_init_required=False, and no process group is initialised"):
        initialize(config=file(), dist_init_required=False)


@pytest.mark.parametrize(
    "late",
    [
        {"lr_scheduler": 3},
        {"training_data": 3},
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
    ],
)
def test_what_is_refused_late_leaves_the_model_as_it_was(late: dict[str, Any]) -> None:
    """A second initialize() of the same model trains as if the first had not been."""
    model, twin = small_model(), small_model()
    with pytest.raises((TypeError, ValueError)) as caught:  # which keeps everything alive
        initialize(model=model, config=file(), **late)
    assert caught.tb is not None
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "hooks were left"
    for parameter in model.parameters():
        parameter.grad = None
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(), model) as engine:
        for step in range(2):
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


def test_a_schedule_that_wants_a_metric_is_refused() -> None:
    """engine.step() has none to give, and would fail after the first step."""
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau.* step\(\) takes 'metrics'"):
        initialize(config=file(), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize("give", ["nothing", "parameters", "groups", "names", "module"])
def test_parameters_in_every_form(give: str) -> None:
    model, twin = small_model(), small_model()
    given: Any = {
        "nothing": None,
        "parameters": model.parameters(),
        "groups": [{"params": model[0].parameters()}, {"params": list(model.parameters())[2:]}],
        "names": model.named_parameters(),
        "module": model,
    }[give]
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(), model, model_parameters=given) as engine:
        names = [row.name for row in engine.explain(print_it=False).parameters]
        assert names == [name for name, _ in model.named_parameters()]
        train(engine, [loss_of(engine, 0)])
        loop.step(gradients_of(twin, [loss_of(twin, 0)]))
        assert_same(model, twin)


@pytest.mark.parametrize("drop", [None, False, True])
def test_drop_last(drop: bool | None) -> None:
    data = TensorDataset(torch.arange(10.0).view(10, 1))
    config = {**file(train_micro_batch_size_per_gpu=4), **({} if drop is None else {"dataloader_drop_last": drop})}
    engine, _, loader, _ = initialize(config=config, training_data=data)
    assert engine.training_dataloader is loader
    assert [len(x) for (x,) in loader] == ([4, 4] if drop else [4, 4, 2])
    assert len(loader) == (2 if drop else 3)
    engine.destroy()


def test_the_loader_collates_and_its_batches_train() -> None:
    samples = [torch.full((19,), float(number)) for number in range(6)]
    seen: list[int] = []

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        seen.extend(int(row[0]) for row in rows)
        return torch.stack(rows)

    engine, _, loader, _ = initialize(
        config=file(train_micro_batch_size_per_gpu=3), training_data=samples, collate_fn=collate
    )
    for x in loader:
        assert x.shape == (3, 19)
        train(engine, [engine(x).sum()])
    assert sorted(seen) == list(range(6)) and engine.global_steps == 2
    engine.destroy()


def test_host_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, threads and their CPUs are what the file says, and change no bit."""
    made: list[tuple[int | None, Any]] = []

    def spy(threads: int | None, cpu_set: Any) -> HostKernels:
        made.append((threads, cpu_set))
        return HostKernels(threads, cpu_set)

    monkeypatch.setattr("longshore.optim.offload.HostKernels", spy)
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    numel = sum(parameter.numel() for parameter in small_model().parameters())
    models = []
    for host in ({}, {"tile_numel": 160}, {"threads": 2}, {"threads": 1, "cpu_set": [cpu]}):
        with started(file(longshore=host)) as engine:
            train(engine, (loss_of(engine, step) for step in range(2)))
            explanation = engine.explain(print_it=False)
            models.append(engine.module)
        if "tile_numel" in host:
            assert explanation.tile_numel <= 160 and explanation.tiles >= numel / 160
        else:
            assert explanation.tiles == 1
    usable = len(usable_cpus())
    found = [(usable if threads is None else threads, cpus) for threads, cpus in made]
    assert found == [(usable, None), (usable, None), (2, None), (1, (cpu,))]
    for model in models:
        assert_same(model, models[0])


@pytest.mark.parametrize("wanted", [False, True])
def test_cpu_checkpointing(wanted: bool) -> None:
    """What ``longshore.checkpointing.checkpoint`` saves is in host memory until backward; the same weights."""
    activation_checkpointing.install(None)
    model, twin = small_model(), small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    x = torch.randn(5, 19, requires_grad=True)
    try:
        config = file(activation_checkpointing={"cpu_checkpointing": wanted, "partition_activations": True})
        with started(config, model) as engine:
            for step in range(2):
                loss = longshore.checkpointing.checkpoint(engine, x).pow(2).sum()
                assert (longshore.checkpointing.held_host_bytes() > 0) is wanted
                train(engine, [loss])
                assert longshore.checkpointing.held_host_bytes() == 0
                loop.step(gradients_of(twin, [twin(x).pow(2).sum()]))
                assert_same(model, twin, step)
    finally:
        activation_checkpointing.install(None)


def test_destroy_leaves_an_ordinary_model() -> None:
    engine = initialize(config=file()).engine
    train(engine, [loss_of(engine, 0)])
    engine.destroy()
    loss_of(engine.module, 1).backward()
    assert all(parameter.grad is not None for parameter in engine.module.parameters())


def test_names_that_a_deepspeed_script_has_say_what_to_call_instead() -> None:
    said = r"zero\.Init is longshore\.Init, and deepspeed\.zero\.GatheredParameters is longshore\.gather"
    with pytest.raises(AttributeError, match=said):
        _ = longshore.zero  # pyright: ignore[reportAttributeAccessIssue]
    with started({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "gradient_clipping": 1.0}) as engine:
        _check_what_the_engine_says(engine)


def _check_what_the_engine_says(engine: Any) -> None:
    assert not hasattr(engine, "offload_states")
    with pytest.raises(AttributeError, match=r"'offload_states'; .*offload_optimizer"):
        _ = engine.offload_states
    with pytest.raises(AttributeError, match=f"'nothing'; {longshore.Engine._where_else}$"):
        _ = engine.nothing


def test_the_device() -> None:
    engine = initialize(config=without(file(), "gradient_accumulation_steps"), device="cpu").engine
    assert engine.device == torch.device("cpu")
    engine.destroy()
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"asks for cuda:{count + 3}"):
        initialize(config=file(), device=f"cuda:{count + 3}")
    with pytest.raises(ValueError, match=r"device='gpu' is not a device"):
        initialize(config=file(), device="gpu")


def test_nothing_to_train_is_refused() -> None:
    model = small_model().requires_grad_(False)
    for more in ({}, {"model_parameters": [{"params": []}]}):
        with pytest.raises(ValueError, match="nothing to train"):
            initialize(model=model, config=file(), **more)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({}, TypeError, "needs model="),
        ({"model": 5}, TypeError, "needs model="),
        ({"mpu": 1, "config": {}}, TypeError, "needs model="),
        ({"model": nn.Linear(2, 2), "mpu": 1}, ValueError, "mpu is not supported"),
    ],
)
def test_of_two_mistakes_the_first_argument_is_told(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        longshore.initialize(**wrong)


def test_a_configuration_that_is_changed_while_the_engine_is_made_is_seen() -> None:
    for number in range(2):
        config: dict[str, Any] = {key: value for key, value in file().items() if key != "optimizer"}
        change = functools.partial(config.update, gradient_clipping=5.0)
        calls = [change if each == number else lambda: None for each in range(2)]
        engine, *_ = initialize(
            model=small_model(),
            config=config,
            optimizer=lambda given, calls=calls: calls[0]() or torch.optim.AdamW(given),
            lr_scheduler=lambda given, calls=calls: calls[1]() or torch.optim.lr_scheduler.ConstantLR(given),
        )
        try:
            engine.backward(loss_of(engine, 0))
            with pytest.raises(longshore.LongshoreError, match="was changed after initialize"):
                engine.step()
        finally:
            engine.destroy()


@pytest.mark.parametrize("path", [("zero_optimization",), ("data_types",), ("optimizer", "params"), ("mine", "x")])
def test_a_configuration_that_contains_itself_is_refused(path: tuple[str, ...]) -> None:
    content = file()
    section = content
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = content
    with pytest.raises(ConfigError, match=f"{path[0]}.* is not a"):
        longshore.initialize(model=nn.Linear(2, 2), config=content)
