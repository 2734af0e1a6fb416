"""What Lightning was told and what the configuration says: together, or an error with both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import grad_norm

import longshore
from integrations.lightning.modules import Net, Stepping, fitted, loader, trainer
from longshore.engine.config import LossScaling
from longshore.integrations.lightning import FabricLongshoreStrategy, LongshoreStrategy
from longshore.integrations.lightning.settings import LightningArguments, StrategySettings

AUTO = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def refused(strategy: Any, match: str, module: Net | None = None, **options: Any) -> None:
    def start() -> None:
        run = trainer(strategy() if callable(strategy) else strategy, **options)
        run.fit(module or Net(), loader(), loader(1))

    with pytest.raises((ValueError, TypeError), match=match):
        start()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        ({"gradient_accumulation_steps": 4}, {}, r"gradient_accumulation_steps = 4: .*accumulate_grad_batches=1"),
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            r"gradient_accumulation_steps = 4: .*accumulate_grad_batches=2.*agree",
        ),
        ({"gradient_clipping": 0.5}, {"gradient_clip_val": 1.0}, r"gradient_clipping = 0.5: .*gradient_clip_val=1\)"),
        (
            {"bf16": {"enabled": True}},
            {},
            r"bf16.enabled = \"bf16\": .*precision='32-true'.*default.*precision='bf16-true'",
        ),
        (
            {"fp16": {"enabled": True}},
            {"precision": "bf16-mixed"},
            r"fp16.enabled = \"fp16\": .*precision='bf16-mixed'",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            {"precision": "bf16-true"},
            r"torch_autocast.dtype = \"bf16\": .*precision='bf16-true'.*precision='bf16-mixed'",
        ),
        ({"optimizer": {"type": "AdamW"}}, {}, r"optimizer = \"AdamW\": is given twice.*configure_optimizers"),
        ({"dataloader_drop_last": True}, {}, r"dataloader_drop_last = true: .*DataLoader\(drop_last=True\)"),
        ({"train_micro_batch_size_per_gpu": 8}, {}, r"gpu = 8: contradicts the DataLoader, whose batch_size is 4"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4}, {}, "change train_batch_size to 4"),
        ({"zero_optimisation": {}}, {}, "zero_optimization"),
        ({}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 'by value .1.*"norm"'),
        ({}, {"precision": "64-true"}, "precision='64-true' is not supported"),
    ],
)
def test_contradictions_are_errors(config: dict[str, Any], options: dict[str, Any], match: str) -> None:
    data = {**AUTO, "zero_optimization": {"stage": 1}, **config}
    refused(lambda: LongshoreStrategy(data), match, **options)


def test_all_of_them_at_once() -> None:
    config = longshore.Config(gradient_accumulation_steps=3, gradient_clipping=2.0, dtype="bf16")
    with pytest.raises(longshore.ConfigError) as caught:
        trainer(LongshoreStrategy(config), gradient_clip_val=1.0).fit(Net(), loader(), loader(1))
    assert [each.path for each in caught.value.problems] == [
        "gradient_accumulation_steps",
        "gradient_clipping",
        "dtype",
    ]


def test_what_is_wrong_by_itself_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(longshore.ConfigError, match=r"stge.*stage"):
        LongshoreStrategy(stge=2)
    with pytest.raises(longshore.ConfigError, match=r"stage = 4"):
        LongshoreStrategy(stage=4)
    with pytest.raises(ValueError, match=r"given twice: as config= and as stage"):
        LongshoreStrategy({}, stage=2)
    with pytest.raises(TypeError, match=r"not int"):
        LongshoreStrategy(3)  # pyright: ignore
    with pytest.raises(longshore.ConfigError, match=r"there is no such file"):
        LongshoreStrategy(tmp_path / "no.json")
    path = tmp_path / "bad.json"
    path.write_text('{"zero_optimization": {"stage": 9}}')
    with pytest.raises(longshore.ConfigError, match=r"bad.json has 1 problem"):
        LongshoreStrategy(str(path))


def test_a_file_whose_numbers_agree(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    numbers = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    path.write_text(json.dumps({**numbers, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}))
    strategy = LongshoreStrategy(path)
    fitted(Net(), strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
    engine = strategy.engine
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, 0.5)
    assert engine.zero_optimization_stage() == 1
    # What the file alone says holds.
    fitted(Net(), strategy := LongshoreStrategy(path), accumulate_grad_batches=2)
    assert strategy.engine.gradient_clipping() == 0.5
    # Left out is what the Trainer says, and not what it would mean in a file for DeepSpeed.
    fitted(Net(), strategy := LongshoreStrategy({}))
    assert strategy.engine.gradient_clipping() == 0.0


def test_defaults() -> None:
    fitted(Net(), strategy := LongshoreStrategy())
    config = strategy.engine.config
    assert (config.stage, config.offload_device, config.dtype, config.loss_scaling) == (2, "cpu", None, None)


def test_the_format_of_states() -> None:
    """As a field, and in a file; the engine's states have it, and an optimizer without is an error of the fit."""
    offload = {"states": "bf16", "states_seed": 3, "device": "cpu"}
    file = {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    modules = []
    for strategy in (LongshoreStrategy(states="bf16", states_seed=3), LongshoreStrategy(file), LongshoreStrategy()):
        modules.append(fitted(Net(), strategy))
        config = strategy.engine.config
        assert (config.states, config.states_seed) == (("bf16", 3) if len(modules) < 3 else ("fp32", 0))
        assert strategy.engine.explain(print_it=False).states_by_format.keys() == {config.states}
    weights = [torch.cat([each.detach().flatten() for each in module.parameters()]) for module in modules]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    with pytest.raises(longshore.ConfigError, match=r"states = \"fp8\": must be one of"):
        LongshoreStrategy(states="fp8")
    module = Net(lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3))
    refused(LongshoreStrategy(states="8bit"), "states 8bit is for .* the states of RMSprop are float32", module)


def test_the_loss_scale() -> None:
    def scaling(precision: str, config: Any = None, made: LossScaling | None = None) -> LossScaling | None:
        given = LightningArguments("Trainer", precision, 1, accumulation=1, loss_scaling=made)
        return StrategySettings(config, {}).resolved(given).config.loss_scaling

    torchs, mine = LossScaling(window=2000, hysteresis=1), LossScaling(scale=128.0)
    assert scaling("32-true") is scaling("bf16-true") is None
    assert scaling("16-mixed") == scaling("16-true") == torchs
    assert scaling("16-mixed", made=LossScaling(window=7)) == LossScaling(window=7)
    assert scaling("16-mixed", longshore.Config(loss_scaling=mine), LossScaling(window=7)) == mine
    file = {"fp16": {"enabled": True, "loss_scale": 128}, "train_batch_size": 1}
    assert scaling("16-true", file) == mine
    odd = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_factor=3.0))
    refused(LongshoreStrategy, "growth_factor=3.*powers? of two", plugins=odd)


def test_optimizers_that_cannot_be_stepped() -> None:
    class Two(Stepping):
        def configure_optimizers(self) -> Any:
            return [self.make(self.net[0].parameters()), self.make(self.net[3].parameters())]

    refused(LongshoreStrategy(), "returned 2 optimizers .AdamW, AdamW.*one with a parameter group for each", Two())

    class Nothing(Net):
        def configure_optimizers(self) -> None:
            return None

    refused(LongshoreStrategy(), "returned None, and the configuration names no optimizer", Nothing())
    refused(LongshoreStrategy(), "LBFGS cannot be stepped in tiles", Net(lambda p, **_: torch.optim.LBFGS(list(p))))


def test_clipping_by_value_or_to_another_norm_in_a_hook() -> None:
    class By(Net):
        how: Any = (0.5, "value")

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, *self.how)

    refused(LongshoreStrategy(), "clipped by value .0.5", By())
    module = By()
    module.how = (0.5, "norm")
    with pytest.raises(longshore.LongshoreError, match=r"clipped to 0.5, .* to 2; leave one"):
        trainer(LongshoreStrategy(gradient_clipping=2.0)).fit(module, loader(), loader(1))


def test_torchs_own_clipping_says_what_to_call() -> None:
    class Wrong(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    with pytest.raises(Exception, match=r"clip_grad_norm_"):
        trainer(LongshoreStrategy()).fit(Wrong(), loader(), loader(1))


def test_lightnings_own_norm_says_what_to_call() -> None:
    class Logs(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, 2))

    with pytest.raises(longshore.LongshoreError, match=r"parameter net.0.weight: .*optimizer.grad_norm\(\)"):
        trainer(LongshoreStrategy()).fit(Logs(), loader(), loader(1))


def test_there_is_no_engine_before_the_fit() -> None:
    with pytest.raises(longshore.LongshoreError, match=r"no engine before trainer.fit"):
        _ = LongshoreStrategy().engine


def test_weights_from_files_for_a_model_made_without_any(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    full = Net()
    torch.nn.init.ones_(full.net[0].weight)
    save_file(full.state_dict(), str(tmp_path / "model.safetensors"))

    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                from integrations.lightning.modules import network

                self.net = network()
                self.seen.append(self.net[0].weight.is_meta)

    late = Late()
    strategy = LongshoreStrategy(stage=3, weights=tmp_path)
    trainer(strategy, max_steps=3).fit(late, loader())
    trainer(LongshoreStrategy(stage=3), max_steps=3).fit(full, loader())
    assert late.seen == [True]
    for a, b in zip(late.parameters(), full.parameters(), strict=True):
        assert torch.equal(a, b)
    with strategy.model_init_context():
        assert torch.nn.Linear(2, 2).weight.is_meta


@pytest.mark.slow
def test_pytorch_lightning_too() -> None:
    """The older package has classes of its own, and its Trainer takes no other."""
    pytest.importorskip("pytorch_lightning")
    code = """
import warnings; warnings.filterwarnings("ignore")
import pytorch_lightning, torch, sys
from longshore.integrations.lightning import FabricLongshoreStrategy, LongshoreStrategy
class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__(); self.net = torch.nn.Linear(16, 16)
    def training_step(self, batch, index): return self.net(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.5)
run = pytorch_lightning.Trainer(
    strategy=LongshoreStrategy(), accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
net = Net(); net.net.bias.data.zero_()
run.fit(net, torch.utils.data.DataLoader(torch.ones(4, 16), batch_size=2))
assert "lightning" not in sys.modules
print(net.net.bias.tolist() == [-2.0] * 16)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True", done.stderr[-3000:]


@pytest.mark.parametrize("kind", [LongshoreStrategy, FabricLongshoreStrategy])
def test_samplers_know_all_machines(kind: Any) -> None:
    class Third(LightningEnvironment):
        def global_rank(self) -> int:
            return 3

    cpus = [torch.device("cpu")] * 2
    strategy = kind(parallel_devices=cpus, cluster_environment=Third())
    strategy.num_nodes = 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
    assert FabricLongshoreStrategy(parallel_devices=cpus[:1]).distributed_sampler_kwargs is None


def test_a_command_line_finds_that_a_configuration_may_be_a_dictionary() -> None:
    """LightningCLI's parser takes the first type that fits, and makes a string of a dictionary where that is str."""
    hint = get_type_hints(LongshoreStrategy.__init__)["config"]
    assert get_args(hint).index(Mapping[str, Any]) < get_args(hint).index(str)
