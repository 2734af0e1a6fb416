"""The loop against the same training written out by hand, and what it does with numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from longshore.cli import model
from longshore.cli.data import Sequences, byte_corpus
from longshore.cli.loop import Diverged, Loop, Step, Validation, learning_rate
from longshore.cli.settings import LoopSettings, ModelSettings, OptimizerSettings, Shape
from longshore.cli.steppers import make_stepper

CORPUS = byte_corpus([bytes(97 + (i * i) % 23 for i in range(3000))], 256)
SHAPE = Shape(hidden_size=16, intermediate_size=32, layers=1, heads=2)


def network(dtype: str) -> nn.Module:
    return model.build_model(ModelSettings(SHAPE, dtype=dtype, device="cpu"), 8, 0, CORPUS, None)


def looped(dtype: str, loop: LoopSettings, optimizer: OptimizerSettings) -> tuple[nn.Module, list[Step | Validation]]:
    trained = network(dtype)
    sequences = Sequences(CORPUS, loop.seq_len, loop.seed)
    return trained, list(Loop(trained, sequences, make_stepper(trained, optimizer), loop, optimizer).run())


def by_hand(dtype: str, loop: LoopSettings, optimizer: OptimizerSettings) -> tuple[nn.Module, list[float]]:
    """Constant rate. Every parameter has a multiple of 16 elements, so torch's scalar tail has none."""
    trained = network(dtype)
    sequences = Sequences(CORPUS, loop.seq_len, loop.seed)
    parameters = list(trained.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    steppers = [
        torch.optim.AdamW(
            [master], lr=optimizer.lr, weight_decay=optimizer.weight_decay if master.ndim == 2 else 0, fused=True
        )
        for master in masters
    ]
    losses = []
    for step in range(loop.steps):
        trained.zero_grad()
        for micro in range(loop.accumulation):
            batch = sequences.training_batch(step * loop.accumulation + micro, loop.batch_size)
            logits = trained(input_ids=batch.inputs).logits.float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) / loop.accumulation
            loss.backward()
            losses.append(loss.item())
        if optimizer.clip:
            assert nn.utils.clip_grad_norm_(parameters, optimizer.clip) > optimizer.clip, "nothing was clipped"
        for parameter, master, stepper in zip(parameters, masters, steppers, strict=True):
            master.grad = parameter.grad.float()
            stepper.step()
            parameter.data.copy_(master)
    return trained, losses


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("kind", [{}, {"offload": False}, {"plain": True}], ids=str)
def test_equals_the_loop_by_hand(dtype, accumulation, clip, kind):
    loop = LoopSettings(seq_len=8, steps=4, batch_size=3, accumulation=accumulation, eval_every=0)
    optimizer = OptimizerSettings(schedule="constant", warmup=0, clip=clip, **kind)
    trained, events = looped(dtype, loop, optimizer)
    expected, losses = by_hand(dtype, loop, optimizer)
    for (name, ours), theirs in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    steps = [event for event in events if isinstance(event, Step)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    windows = [sum(losses[start : start + accumulation]) for start in range(0, len(losses), accumulation)]
    assert [step.loss for step in steps] == pytest.approx(windows, rel=1e-6)
    assert all((step.grad_norm is None) == (clip == 0) for step in steps)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_released_gradients(accumulation, clip):
    """fp32: the same sums, wherever they are made. With clipping the norm is longshore's, a few ulp from torch's."""
    loop = LoopSettings(seq_len=8, steps=4, batch_size=3, accumulation=accumulation, eval_every=0)
    kept, events = looped("fp32", loop, OptimizerSettings(clip=clip))
    released, released_events = looped("fp32", loop, OptimizerSettings(clip=clip, release_gradients=True))
    for (name, ours), theirs in zip(released.named_parameters(), kept.named_parameters(), strict=True):
        if clip:
            torch.testing.assert_close(ours, theirs[1], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours, theirs[1]), name
    one, other = events[-1], released_events[-1]
    assert isinstance(one, Step) and isinstance(other, Step)
    numel = model.count_parameters(kept)
    assert one.memory.device == 8 * numel
    assert other.memory.device == 4 * numel, "the gradients were not released"
    if clip:
        assert one.grad_norm is not None and one.grad_norm > clip, "nothing was clipped"
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


@pytest.mark.parametrize(
    "dtype, kind, device, host",
    [
        ("fp32", {}, 8, 8),
        ("fp32", {"offload": False}, 16, 0),
        ("fp32", {"plain": True}, 16, 0),
        ("bf16", {}, 4, 12),
        ("bf16", {"offload": False}, 16, 0),
        ("bf16", {"plain": True}, 20, 0),
    ],
    ids=str,
)
def test_memory(dtype, kind, device, host):
    trained, events = looped(dtype, LoopSettings(8, 1, 2, eval_every=0), OptimizerSettings(**kind))
    assert isinstance(events[0], Step)
    numel = model.count_parameters(trained)
    assert events[0].memory.device / numel == pytest.approx(device, abs=0.02)  # and torch's step counts
    assert host * numel <= events[0].memory.host < (host + 1) * numel or host == events[0].memory.host == 0


def test_validation_is_the_mean_over_the_first_sequences():
    loop = LoopSettings(seq_len=8, steps=5, batch_size=4, eval_every=2, eval_batches=2)
    trained, events = looped("fp32", loop, OptimizerSettings())
    validations = [event for event in events if isinstance(event, Validation)]
    assert [validation.step for validation in validations] == [0, 2, 4, 5]
    rows = Sequences(CORPUS, 8, 0).validation[:8]
    with torch.no_grad():
        tokens = torch.stack([CORPUS.tokens[row * 8 : row * 8 + 9].long() for row in rows])
        logits = trained(input_ids=tokens[:, :-1]).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert validations[-1].loss == pytest.approx(expected.item(), rel=1e-5)
    assert validations[-1].loss != validations[0].loss
    assert trained.training


def test_stop_is_asked_between_steps():
    trained = network("fp32")
    settings, optimizer = LoopSettings(seq_len=8, steps=50, batch_size=2, eval_every=0), OptimizerSettings()
    seen: list[int] = []
    stepper = make_stepper(trained, optimizer)
    loop = Loop(trained, Sequences(CORPUS, 8, 0), stepper, settings, optimizer, lambda: len(seen) == 3)
    for event in loop.run():
        seen.append(event.step)
    assert seen == [1, 2, 3]


@pytest.mark.covering(2)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient's norm"])
@pytest.mark.parametrize("plain", [False, True])
def test_diverged(value, where, plain):
    """The step is not applied: the weights are those of the last good one."""
    optimizer = OptimizerSettings(plain=plain, schedule="constant", warmup=0)
    settings = LoopSettings(seq_len=8, steps=50, batch_size=2, eval_every=0)
    good, _ = looped("fp32", LoopSettings(seq_len=8, steps=2, batch_size=2, eval_every=0), optimizer)
    trained = network("fp32")
    loop = Loop(trained, Sequences(CORPUS, 8, 0), make_stepper(trained, optimizer), settings, optimizer)
    head = trained.get_submodule("lm_head")
    calls: list[int] = []

    def poison(*_):
        calls.append(1)
        return len(calls) == 3

    if where == "loss":
        head.register_forward_hook(lambda *inputs: inputs[-1] * value if poison() else None)
    else:
        head.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * value,) if poison() else None)
    with pytest.raises(Diverged, match=rf"the {where} is (nan|inf) at step 3, so this step was not applied"):
        for _ in loop.run():
            pass
    for (name, ours), theirs in zip(trained.named_parameters(), good.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_learning_rates():
    def rates(schedule: str, warmup: int, steps: int = 6) -> list[float]:
        settings = OptimizerSettings(schedule=schedule, warmup=warmup)
        return [learning_rate(1.0, settings, step, steps) for step in range(1, steps + 1)]

    assert rates("constant", 0) == [1, 1, 1, 1, 1, 1]
    assert rates("constant", 4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates("constant", 10) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert rates("linear", 2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine", 2) == pytest.approx([0.5, 1] + [0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(4)])
