"""What scripts find under DeepSpeed's names, and what they are told about the rest."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import longshore
from longshore import LongshoreError
from longshore.compat.absent import REFUSED, UNUSABLE, advice
from longshore.compat.finder import stand_aside, stand_in_for_deepspeed
from longshore.compat.names import PROVIDED

PACKAGE = Path(longshore.__file__).parent / "compat"
MODULES = sorted(f"deepspeed.{name}".removesuffix(".") for name in PROVIDED)


@pytest.fixture
def as_deepspeed() -> Iterator[None]:
    stand_in_for_deepspeed()
    yield
    stand_aside()


def tried(statement: str) -> BaseException:
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {})
    return caught.value


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize(
    "statement",
    [
        "import deepspeed; deepspeed.initialize; deepspeed.init_distributed; deepspeed.add_config_arguments",
        "import deepspeed; deepspeed.zero.Init; deepspeed.zero.GatheredParameters; deepspeed.comm.all_reduce",
        "import deepspeed; deepspeed.ops.adam.DeepSpeedCPUAdam; deepspeed.checkpointing.checkpoint; deepspeed.dist",
        "import deepspeed; deepspeed.runtime.lr_schedules.WarmupLR; deepspeed.utils.logger; deepspeed.DeepSpeedEngine",
        "import deepspeed.comm as dist; dist.get_rank; dist.get_local_rank; dist.barrier; dist.ReduceOp.MAX",
        "from deepspeed import DeepSpeedEngine, get_accelerator, zero, comm, checkpointing, __version__",
        "from deepspeed.accelerator import get_accelerator",
        "from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam",
        "from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad",
        "from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion",
        "from deepspeed.runtime.activation_checkpointing import checkpointing; checkpointing.checkpoint",
        "from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader",
        "from deepspeed.runtime.engine import DeepSpeedEngine",
        "from deepspeed.runtime.lr_schedules import OneCycle, LRRangeTest, WarmupCosineLR, WarmupDecayLR, WarmupLR",
        "from deepspeed.runtime.utils import see_memory_usage, set_random_seed",
        "from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init",
        "from deepspeed.utils import RepeatingLoader, groups, log_dist, logger, safe_get_full_grad",
        "from deepspeed.utils.logging import logger, log_dist",
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get; get",
    ],
)
def test_imports_of_scripts(statement: str) -> None:
    exec(statement, {})


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import deepspeed.inference", "deepspeed.inference: longshore trains"),
        ("from deepspeed.inference.engine import InferenceEngine", "deepspeed.inference: longshore trains"),
        ("from deepspeed.moe.layer import Experts", "deepspeed.moe.layer.Experts: .* no expert parallelism"),
        ("import deepspeed.moe.mappings", "deepspeed.moe.mappings: .* no expert parallelism"),
        ("from deepspeed import PipelineModule", "deepspeed.PipelineModule: .* no pipelines"),
        ("import deepspeed; deepspeed.init_inference", "deepspeed.init_inference: longshore trains"),
        ("from deepspeed.ops.op_builder import CPUAdamBuilder", "deepspeed.ops.op_builder: .* compiled with longshore"),
        ("from deepspeed.utils import nothing_of_theirs", "deepspeed.utils.nothing_of_theirs: .*from_deepspeed.md"),
        ("from deepspeed.runtime.lr_schedules import Nothing", "deepspeed.runtime.lr_schedules.Nothing: "),
        ("import deepspeed; deepspeed.utils.safe_get_local_grad", "safe_get_local_grad: use the safe_.*_full_"),
        ("from deepspeed.runtime.zero import register_external_parameter", "register_external_parameter: leave it out"),
        ("import deepspeed; deepspeed.get_accelerator().Stream", "deepspeed.accelerator.Stream: use torch.cuda"),
        ("import longshore.compat.deepspeed.runtime.pipe", "deepspeed.runtime.pipe: .* no pipelines"),
        ("from longshore.compat.deepspeed import tp_model_init", "deepspeed.tp_model_init: .* parallelize_module"),
    ],
)
def test_what_is_not_there_is_named_with_what_to_use(statement: str, words: str) -> None:
    error = tried(statement)
    assert error.args[0].startswith("longshore has no ")
    with pytest.raises(type(error), match=words):
        raise error


@pytest.mark.usefixtures("as_deepspeed")
def test_probing_is_silent() -> None:
    import deepspeed  # pyright: ignore[reportMissingImports]

    assert not hasattr(deepspeed, "PipelineEngine")
    assert not hasattr(deepspeed.accelerator.get_accelerator(), "Stream")
    assert getattr(deepspeed, "inference", None) is None
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.comm") is not None
    assert importlib.util.find_spec("deepspeed.inference") is None
    assert importlib.util.find_spec("longshore.compat.deepspeed.inference") is None
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    # As scripts compare it.
    assert tuple(map(int, deepspeed.__version__.split("+")[0].split("."))) >= (0, 10, 0)
    assert deepspeed.__version_major__ == 0 and "longshore" in deepspeed.__version__


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize("name", MODULES)
def test_both_names_are_one_module(name: str) -> None:
    module = importlib.import_module(name)
    assert module is importlib.import_module(f"longshore.compat.{name}")
    assert module.__spec__ is not None and module.__spec__.name == f"longshore.compat.{name}"
    for each in getattr(module, "__all__", ()):
        assert hasattr(module, each)
    with pytest.raises(AttributeError, match=f"longshore has no {name}.nothing: "):
        _ = module.nothing
    for each in REFUSED.keys() - UNUSABLE.keys():  # these are attributes once they were imported
        where, _, what = f"deepspeed.{each}".rpartition(".")
        assert where != name or not hasattr(module, what), f"{each} is there, and is said not to be"


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize("module", UNUSABLE)
def test_modules_that_scripts_import_without_using_them(module: str) -> None:
    """Their names are refused when they are used: called, subclassed, or looked into."""
    names = UNUSABLE[module].split()
    imported = importlib.import_module(f"deepspeed.{module}")
    assert imported is importlib.import_module(f"longshore.compat.deepspeed.{module}")
    assert {*names} <= {*imported.__all__}
    for name in names:
        kind = getattr(imported, name)
        assert not isinstance(torch.nn.Linear(1, 1), kind) and kind.__name__ == name
        said = re.escape(f"longshore has no deepspeed.{module}.{name}: {advice(f'{module}.{name}')}")
        with pytest.raises(LongshoreError, match=said):
            kind(torch.nn.Linear(1, 1))
        with pytest.raises(LongshoreError, match=said):
            type("Mine", (kind,), {})
        with pytest.raises(AttributeError, match=rf"longshore has no deepspeed\.{module}\.{name}\.apply: "):
            _ = kind.apply
    with pytest.raises(AttributeError, match=f"longshore has no deepspeed.{module}.nothing: "):
        _ = imported.nothing


def test_advice_is_of_the_nearest_name() -> None:
    assert advice("moe.layer.MoE") == advice("moe") != advice("nothing")
    assert advice("runtime.zero.partition_parameters.register_external_parameter") == advice(
        "zero.register_external_parameter"
    )


def test_only_this_process_and_only_while_asked() -> None:
    stand_in_for_deepspeed()
    stand_in_for_deepspeed()  # once is enough
    import deepspeed  # pyright: ignore[reportMissingImports]

    assert deepspeed.DeepSpeedEngine is longshore.Engine
    stand_aside()
    assert "deepspeed" not in sys.modules
    said = subprocess.run(
        [sys.executable, "-c", "import importlib.util; print(importlib.util.find_spec('deepspeed'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "longshore" not in said


def test_what_was_imported_already_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", type(sys)("deepspeed"))
    with pytest.raises(RuntimeError, match="imported already"):
        stand_in_for_deepspeed()


@pytest.mark.slow
def test_other_packages_that_look_for_deepspeed() -> None:
    code = """
import importlib
from longshore.compat.finder import stand_in_for_deepspeed
stand_in_for_deepspeed()
import accelerate, transformers, torch, peft
from accelerate.utils import is_deepspeed_available
assert is_deepspeed_available()
model = torch.nn.Linear(2, 2)
prepared = accelerate.Accelerator(cpu=True).prepare(model)
assert accelerate.utils.extract_model_from_parallel(prepared) is model
config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                  vocab_size=16)
peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_is_imported_for_nothing() -> None:
    """The stand-in itself must not load heavy libraries."""
    for path in PACKAGE.rglob("*.py"):
        names = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if name and name.startswith(("transformers", "accelerate"))}


def test_the_accelerator_is_where_longshore_trains() -> None:
    from longshore.compat.deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator

    accelerator = get_accelerator()
    assert isinstance(accelerator, DeepSpeedAccelerator) and accelerator is get_accelerator()
    if torch.cuda.is_available():
        assert accelerator.device_name(1) == "cuda:1" and accelerator.communication_backend_name() == "nccl"
        return
    assert accelerator.device_name() == accelerator.device_name(1) == accelerator.current_device_name() == "cpu"
    assert accelerator.communication_backend_name() == "gloo"
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated() < accelerator.total_memory()
    accelerator.manual_seed(3)
    state = accelerator.get_rng_state()
    first = torch.rand(1)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(1), first)
    assert torch.bfloat16 in accelerator.supported_dtypes() and accelerator.on_accelerator(first)
