"""flops_profiler: the times and operations of one step, counted by hand here."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from support import same_weights
from torch import Tensor, nn

import longshore
import longshore.compat.deepspeed as deepspeed

ROWS = 3
WIDTH = 16


class Model(nn.Module):
    """Two blocks of 16 x 32 x 16 and a head of 16 x 48."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
        self.blocks = nn.ModuleList(nn.Sequential(*(type(each)(*_sizes(each)) for each in kinds)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _sizes(module: Any) -> tuple[int, ...]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()


FORWARD = 2 * ROWS * (2 * 2 * WIDTH * 2 * WIDTH + WIDTH * 3 * WIDTH)
"""A multiplication and an addition for each weight and row."""
BACKWARD = 2 * FORWARD - 2 * ROWS * WIDTH * 2 * WIDTH
"""Gradients of weights and of inputs; the first layer's input needs none."""


def config_with(section: dict[str, Any] | None, stage: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        **({} if section is None else {"flops_profiler": {"enabled": True, **section}}),
        **more,
    }


def train(config: dict[str, Any], windows: int = 3, model: nn.Module | None = None) -> tuple[nn.Module, str]:
    """The model, and what was printed. An evaluation before each step belongs to no step."""
    torch.manual_seed(0)
    model = Model() if model is None else model
    engine, said = longshore.initialize(model=model, config=config).engine, io.StringIO()
    with contextlib.redirect_stdout(said):
        for window in range(windows):
            with torch.no_grad():
                engine(torch.ones(1, WIDTH))
            for micro in range(2):
                engine.backward(engine(torch.full((ROWS, WIDTH), 0.1 * (window + micro))).pow(2).mean())
                engine.step()
    engine.destroy()
    return model, said.getvalue()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Whatever other tests have compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(said: str, part: str) -> tuple[int, float]:
    """Calls, and thousands of operations."""
    found = re.search(
        rf"^{part}: (\d+) calls?, [\d.]+ ms, ([\d.]+) K FLOPs, [\d.]+ [KMG]? ?FLOPs/s$", said, re.MULTILINE
    )
    assert found is not None, said
    return int(found[1]), float(found[2])


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_operations_of_a_step(stage: int) -> None:
    _, said = train(config_with({}, stage))
    assert said.count("flops_profiler, step 2 -") == said.count("flops_profiler") == 1
    assert numbers(said, "forward") == (2, pytest.approx(2 * FORWARD / 1e3, abs=0.006))
    assert numbers(said, "backward") == (2, pytest.approx(2 * BACKWARD / 1e3, abs=0.006))
    assert re.search(r"^step: 1 call, [\d.]+ ms$", said, re.MULTILINE)
    assert re.search(r"^forward, backward and step: [\d.]+ ms, [\d.]+ samples/s on all ranks$", said, re.MULTILINE)


@pytest.mark.usefixtures("nothing_compiled")
def test_what_is_listed(tmp_path: Path) -> None:
    _, said = train(config_with({"profile_step": 0, "top_modules": 2, "module_depth": 1, "detailed": False}))
    assert "flops_profiler, step 1 -" in said and "each module" not in said
    lines = said.splitlines()
    assert lines[1] == "parameters: 2.96 K"
    at = lines.index("depth 0:")
    assert lines[at : at + 6] == [
        "depth 0:",
        "    parameters: Model 2.96 K",
        f"    forward FLOPs: Model {2 * FORWARD / 1e3:.2f} K",
        "depth 1:",
        "    parameters: ModuleList 2.14 K, Linear 816",
        f"    forward FLOPs: ModuleList {2 * 2 * ROWS * 2048 / 1e3:.2f} K, Linear {2 * 2 * ROWS * 768 / 1e3:.2f} K",
    ]
    assert "depth 2:" not in said
    path = tmp_path / "new" / "profile.txt"
    _, said = train(config_with({"output_file": str(path), "top_modules": 0}))
    written = path.read_text()
    assert said == "" and "flops_profiler, step 2 -" in written and "depth" not in written
    assert "      (2) Linear: 528 (17.8%), 6.14 K (18.2%)\n" in written  # of each block
    assert "(head) Linear: 816 (27.6%), 9.22 K (27.3%)\n" in written
    for never in ({"profile_step": 3}, {"enabled": False}):
        assert train(config_with(never))[1] == ""


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True, "check_grad_overflow": False}}], ids=["fp32", "bf16"])
def test_the_weights_are_the_same(more: dict[str, Any]) -> None:
    def trained(section: dict[str, Any] | None) -> nn.Module:
        class Attending(Model):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                x = x.to(self.head.weight.dtype)
                return super().forward(self.attention(x[None])[0])

        torch.manual_seed(0)
        return train(config_with(section, **more), model=Attending())[0]

    assert same_weights(trained({}), trained(None))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
@pytest.mark.parametrize("what", ["the model", "a function"])
def test_compiled_code_is_not_counted(what: str) -> None:
    """Under a counter it would run eagerly. The backend adds one, so that it would be seen."""

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: [each + 1 for each in graph(*inputs)]

    class Compiled(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.compile(torch.tanh, backend=backend)(x) if what == "a function" else x

    def trained(section: dict[str, Any] | None) -> tuple[nn.Module, str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Compiled()
        if what == "the model":
            model.head.compile(backend=backend)
        return train(config_with(section), model=model)

    try:
        (model, said), (expected, _) = trained({}), trained(None)
    finally:
        torch._dynamo.reset()
    assert (
        "FLOPs are not counted, since torch.compile was used in this process: compiled code would run eagerly" in said
    )
    assert re.search(r"^forward: 2 calls, [\d.]+ ms$", said, re.MULTILINE)
    assert same_weights(model, expected)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_window_that_is_discarded_is_not_counted() -> None:
    engine: Any = longshore.initialize(model=Model(), config=config_with({"profile_step": 0})).engine
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine.backward(engine(torch.ones(7, WIDTH)).sum())
        engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(torch.ones(ROWS, WIDTH)).sum())
            engine.step()
    assert numbers(said.getvalue(), "forward") == (2, pytest.approx(2 * FORWARD / 1e3, abs=0.006))
    engine.destroy()


@pytest.mark.usefixtures("nothing_compiled")
def test_a_run_that_goes_on_profiles_that_step_of_the_run(tmp_path: Path) -> None:
    config = config_with({"profile_step": 2}, gradient_accumulation_steps=1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for steps in (2, 2):
            engine: Any = longshore.initialize(model=Model(), config=config).engine
            if engine.load_checkpoint(tmp_path)[0] if any(tmp_path.iterdir()) else False:
                assert engine.global_steps == 2 and "flops_profiler" not in said.getvalue()
            for _ in range(steps):
                engine.backward(engine(torch.ones(ROWS, WIDTH)).sum())
                engine.step()
            engine.save_checkpoint(tmp_path)
            engine.destroy()
    assert said.getvalue().count("flops_profiler, step 3 -") == 1
    assert "samples/s" not in said.getvalue(), "the samples before are not known"


NOTHING = "flops_profiler printed nothing: profile_step 5 means step 6, and this run made steps {} to {}; set"


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("how", ["destroyed", "dropped", "began later"])
def test_a_step_that_is_never_reached_is_told_at_the_end(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = longshore.initialize(
        model=Model(), config=config_with({"profile_step": 5}, gradient_accumulation_steps=1)
    ).engine
    if how == "began later":
        engine.global_steps = 100
    for _ in range(3):
        engine.backward(engine(torch.ones(ROWS, WIDTH)).sum())
        engine.step()
    assert not caplog.records
    if how == "dropped":
        del engine
    else:
        engine.destroy()
        engine.destroy()
    (told,) = [each.message for each in caplog.records if "flops_profiler" in each.message]
    first, last = (101, 103) if how == "began later" else (1, 3)
    assert told.startswith(NOTHING.format(first, last)) and told.endswith(f"from {first - 1} to {last - 1}")


def test_it_is_told_at_the_end_of_a_program() -> None:
    code = (
        "import torch, longshore\n"
        "optimizer = {'type': 'SGD', 'params': {'lr': 1}}\n"
        "config = {'train_batch_size': 1, 'optimizer': optimizer, 'flops_profiler': {'enabled': True}}\n"
        "engine = longshore.initialize(model=torch.nn.Linear(1, 1), config=config).engine\n"
        "engine.backward(engine(torch.ones(1, 1)).sum())\n"
        "engine.step()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profile_step 1 means step 2, and this run made steps 1 to 1" in ran.stderr


def test_engines_that_made_no_step_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    longshore.initialize(model=Model(), config=config_with({"profile_step": 5})).engine.destroy()
    assert not caplog.records


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    with caplog.at_level(logging.WARNING, logger="longshore"):
        train(config_with({"output_file": str(tmp_path / "taken" / "profile")}))
    assert any("flops_profiler cannot write to" in record.message for record in caplog.records)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_script_of_deepspeed_that_calls_backward_itself() -> None:
    engine: Any = deepspeed.initialize(model=Model(), config=config_with({}, gradient_accumulation_steps=1))[0]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(2):
            engine(torch.ones(ROWS, WIDTH)).sum().backward()
            engine.step()
    assert "backward: not measured, as it was not called by engine.backward()\n" in said.getvalue()
    assert numbers(said.getvalue(), "forward") == (1, pytest.approx(FORWARD / 1e3, abs=0.006))
    engine.destroy()
    torch.distributed.destroy_process_group()


def on_ranks(stage: int) -> str:
    torch._dynamo.reset()
    return train(config_with({}, stage))[1]


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0_alone_prints(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(on_ranks, stage)
    assert second == "" and numbers(first, "forward") == (2, pytest.approx(2 * FORWARD / 1e3, abs=0.006))
    assert numbers(first, "backward") == (2, pytest.approx(2 * BACKWARD / 1e3, abs=0.006))
    assert "(0) Sequential: 1.07 K" in first
