from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longshore
from longshore.activations import HostInput
from longshore.checkpointing import checkpoint, configure, held_host_bytes, is_configured, reset
from longshore.compat.config.table import KEYS
from longshore.engine import ConfigError, activation_checkpointing


@pytest.fixture(autouse=True)
def _not_configured() -> Iterator[None]:
    activation_checkpointing.install(None)
    yield
    activation_checkpointing.install(None)


class Block(nn.Module):
    """Dropout shows whether the random state of the recomputation is that of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)
        return x if scale is None else x * scale


def gradients(call: Any, blocks: list[Block]) -> list[Tensor]:
    """Of every weight and of the input, after two backwards that accumulate."""
    torch.manual_seed(7)
    leaf = torch.randn(5, 24, requires_grad=True)
    scale = torch.randn(24, requires_grad=True)
    for _ in range(2):
        x = leaf * 2
        for block in blocks:
            x = call(block, x, scale=scale)
        x.square().sum().backward()
    found = [leaf.grad, scale.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    for block in blocks:
        block.zero_grad()
    return [grad.clone() for grad in found if grad is not None] + [torch.rand(3)]  # and the random state afterwards


@pytest.mark.parametrize("in_cpu", [False, True])
def test_gradients_are_the_same_bits(in_cpu: bool) -> None:
    blocks = [Block() for _ in range(3)]
    plain = gradients(lambda block, x, scale: block(x, scale), blocks)
    configure(None, checkpoint_in_cpu=in_cpu)
    for block in blocks:
        block.calls = 0
    checkpointed = gradients(checkpoint, blocks)
    assert [block.calls for block in blocks] == [4, 4, 4]  # twice forward, twice again
    assert len(plain) == len(checkpointed) == 9
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))


def test_only_the_inputs_are_held_on_the_host_and_only_until_backward() -> None:
    block = Block()
    configure(checkpoint_in_cpu=True)
    x = torch.randn(5, 24, requires_grad=True)
    out = checkpoint(block, x * 1, scale=torch.ones(24))
    assert held_host_bytes() == (5 * 24 + 24) * 4
    outside = torch.sin(out)  # what is saved after the call is not ours
    assert held_host_bytes() == (5 * 24 + 24) * 4
    outside.sum().backward()
    del out, outside
    assert held_host_bytes() == 0

    out = checkpoint(block, x * 1)  # a forward without backward, as in evaluation
    assert held_host_bytes() == 5 * 24 * 4
    reset()
    assert is_configured()
    del out
    assert held_host_bytes() == 0
    with torch.no_grad():
        out = checkpoint(block, x * 1)
    assert not out.requires_grad and held_host_bytes() == 0


def test_without_cpu_checkpointing_nothing_is_held() -> None:
    for configured in (False, True):
        if configured:
            configure(None, checkpoint_in_cpu=False)
        out = checkpoint(Block(), torch.randn(5, 24, requires_grad=True))
        assert held_host_bytes() == 0
        out.sum().backward()


def test_what_is_held_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place after forward, the input that backward sees is still the one of forward."""
    restored: list[Tensor] = []
    original = HostInput.restore

    def watched(self: HostInput) -> Tensor:
        restored.append(original(self))
        return restored[-1]

    monkeypatch.setattr(HostInput, "restore", watched)
    configure(checkpoint_in_cpu=True)
    weight = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor([1.0, 2.0])
    out = checkpoint(lambda x: (weight * x).square().sum(), x)
    x.mul_(100)
    out.backward()
    assert weight.grad == 2 * 3 * (1 + 4)
    # Torch up to 2.10 saves an empty tensor of its own, too.
    assert [tensor.tolist() for tensor in restored if tensor.numel() > 0] == [[1.0, 2.0]]


def test_a_parameter_given_as_an_argument_gets_its_gradient() -> None:
    configure(checkpoint_in_cpu=True)
    weight = nn.Parameter(torch.randn(4, 3))
    x = torch.randn(2, 4)
    checkpoint(torch.matmul, x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.t() @ torch.ones(2, 3))


def test_a_checkpoint_within_one_is_part_of_the_outer() -> None:
    blocks = [Block(), Block()]

    def inner(x: Tensor) -> Tensor:
        return checkpoint(blocks[1], checkpoint(blocks[0], x))

    leaf = torch.randn(5, 24, requires_grad=True)

    def run(wrap: Any) -> tuple[list[Tensor], int]:
        torch.manual_seed(3)
        x = leaf * 1
        out = wrap(inner, x)
        held = held_host_bytes()
        out.square().sum().backward()
        grads = [parameter.grad.clone() for block in blocks for parameter in block.parameters()]
        for block in blocks:
            block.zero_grad()
        return grads, held

    plain, _ = run(lambda function, x: function(x))
    configure(checkpoint_in_cpu=True)
    nested, held = run(checkpoint)
    assert held == 5 * 24 * 4
    assert all(torch.equal(one, other) for one, other in zip(plain, nested, strict=True))


@pytest.mark.parametrize("in_cpu", [False, True])
def test_one_tensor_in_several_places_is_one_again(in_cpu: bool) -> None:
    configure(checkpoint_in_cpu=in_cpu)
    weight = torch.tensor(3.0, requires_grad=True)
    asked: list[tuple[bool, ...]] = []

    def asks(q: Tensor, k: Tensor, other: Tensor, *, named: Tensor, within: dict[str, Any]) -> Tensor:
        asked.append((k is q, other is q, named is q, within["inside"][0] is q, within["inside"][1] is other))
        return (weight * q if k is q and within["inside"][0] is named else q).sin().sum()

    x = torch.randn(4, requires_grad=True) * 2
    loss = checkpoint(asks, x, x, x.view(4), named=x, within={"inside": (x, x.view(4)), "text": "a"})
    assert held_host_bytes() == (2 * 16 if in_cpu else 0)  # x, and the view
    loss.backward()
    assert asked == [(True, False, True, True, False)] * 2 and weight.grad is not None
    assert torch.equal(weight.grad, ((3 * x).cos() * x).sum())


def test_an_exception_leaves_nothing_behind() -> None:
    configure(checkpoint_in_cpu=True)

    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint(fails, torch.randn(3, requires_grad=True))
    gc.collect()  # the traceback held the graph
    assert held_host_bytes() == 0
    out = checkpoint(torch.sin, torch.randn(3, requires_grad=True) * 1)  # not taken for a nested one
    assert held_host_bytes() == 12
    out.sum().backward()


base = torch.arange(240, dtype=torch.float32)
VIEWS = {
    "contiguous": base.view(12, 20),
    "transposed": base.view(12, 20).t(),
    "channels last": base.view(2, 3, 4, 10).to(memory_format=torch.channels_last),
    "slice with gaps": base.view(12, 20)[:, 3:9],
    "every second": base[::2],
    "expanded": base[:20].expand(6, 20),
    "expanded with gaps": base.view(12, 20)[:, :4].expand(3, 12, 4),
    "windows that overlap": base[:20].unfold(0, 5, 1),
    "misaligned": base[1:101],
    "scalar": base[7],
    "empty": base[:0].view(0, 4),
    "bool": base.view(12, 20)[2:, 1:] > 50,
    "bfloat16": base[3:50].bfloat16(),
    "complex": torch.complex(base, -base).view(12, 20).t(),
    "negated": torch.complex(base, base).conj().imag,
    "conjugated": torch.complex(base, -base).conj(),
    "sparse": base.view(12, 20).to_sparse(),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_what_comes_back_is_what_went_down_to_strides_and_alignment(kind: str) -> None:
    tensor = VIEWS[kind]
    packed = HostInput(tensor)
    back = packed.restore()
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.layout == tensor.layout
    dense, wanted = (each.to_dense().resolve_conj() for each in (back, tensor))
    assert torch.equal(dense, wanted)
    if kind == "sparse":
        return
    assert back.stride() == tensor.stride()
    assert back.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
    assert back.data_ptr() % 64 == tensor.data_ptr() % 64 or tensor.numel() == 0
    distinct = {"expanded": 20, "expanded with gaps": 11 * 20 + 4, "windows that overlap": 20}
    assert packed.host_bytes == distinct.get(kind, tensor.numel()) * tensor.element_size()


def test_a_parallel_thread_is_not_taken_for_a_nested_call() -> None:
    import threading

    configure(checkpoint_in_cpu=True)
    held: list[int] = []

    def outer(x: Tensor) -> Tensor:
        def elsewhere() -> None:
            out = checkpoint(torch.sin, torch.ones(8, requires_grad=True))
            held.append(held_host_bytes())
            out.sum().backward()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    checkpoint(outer, torch.ones(4, requires_grad=True))
    assert held == [16 + 32]


class Mpu:
    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size


USERS_SECTION = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": False,
    "synchronize_checkpoint_boundary": True,
    "number_checkpoints": 0,
    "profile": False,
}


def is_on_host() -> bool:
    out = checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    held = held_host_bytes()
    del out
    return held > 0


def test_configure_takes_what_people_give_it(tmp_path: Path) -> None:
    assert not is_configured() and not is_on_host()
    configure(None)
    assert is_configured() and not is_on_host()
    configure(Mpu(1), deepspeed_config={"activation_checkpointing": {**USERS_SECTION, "cpu_checkpointing": True}})
    assert is_on_host()
    configure(None, {"activation_checkpointing": USERS_SECTION})
    assert not is_on_host()
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"activation_checkpointing": {"cpu_checkpointing": True}}))
    configure(None, str(path), True, True, 4, None, True, True)
    assert is_on_host()
    configure(None, path, checkpoint_in_cpu=False)
    assert not is_on_host()
    configure(None, {})
    assert is_configured() and not is_on_host()
    assert set(USERS_SECTION) == {name for section, name in KEYS if section == "activation_checkpointing"}


def test_configure_converts_what_files_have() -> None:
    with pytest.warns(UserWarning, match=r"cpu_checkpointing = 'false' \(str\) is read as False"):
        configure(None, {"activation_checkpointing": {"cpu_checkpointing": "false"}})
    assert not is_on_host()
    with pytest.warns(UserWarning, match=r"number_checkpoints = '4' \(str\) is read as 4"):
        configure(None, {"activation_checkpointing": {"number_checkpoints": "4"}})


def test_configure_refuses_all_at_once_and_keeps_what_was() -> None:
    configure(checkpoint_in_cpu=True)
    section: Any = {"cpu_checkpoint": True, "partition_activations": 2, "number_checkpoints": -1}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each part is looked for below
        configure(None, {"activation_checkpointing": section}, profile="loud")  # type: ignore[arg-type]
    for part in (
        "activation_checkpointing.cpu_checkpoint = True (bool): is not known; did you mean 'cpu_checkpointing'?",
        "activation_checkpointing.partition_activations = 2 (int): must be true or false",
        "activation_checkpointing.number_checkpoints = -1 (int): must be an integer of at least 0",
        "activation_checkpointing.profile = 'loud' (str): must be true or false",
    ):
        assert part in str(caught.value)
    assert is_on_host()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Mpu(2),), r"get_model_parallel_world_size\(\) is 2: use one"),
        ((object(),), "object does not: use mpu_=None"),
        ((None, {"activation_checkpointing": [1]}), "activation_checkpointing must be a section"),
    ],
)
def test_what_configure_cannot_honour_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configure(*arguments)
    assert not is_configured()


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{]")
    with pytest.raises(ValueError, match=r"(?s)ds\.json has 1 problem:.*must be JSON, and at line 1"):
        configure(None, path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"(?s)ds\.json has 1 problem:.*must be a JSON object"):
        configure(None, path)
    with pytest.raises(ConfigError, match="there is no such file"):
        configure(None, tmp_path / "none.json")


def test_it_needs_a_function() -> None:
    with pytest.raises(TypeError, match="takes a function and its arguments"):
        checkpoint(torch.ones(2), 1)  # type: ignore[arg-type]


def test_it_is_there_without_an_import_of_its_own() -> None:
    assert longshore.checkpointing.checkpoint is checkpoint
    assert "checkpointing" in dir(longshore)
