"""A streamed model has the gradients and the weights of the same model on the device, whatever is called when."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from on_device import device_type, keep_busy
from support import PlainLoop
from torch import Tensor, nn

import longshore
from longshore.checkpointing import checkpoint, configure
from longshore.engine import activation_checkpointing
from longshore.errors import LongshoreError, ParameterError
from longshore.streaming import Stream, stream
from longshore.transfer import DeviceCopyStream

pytestmark = pytest.mark.gpu

WIDTH = 12


class Block(nn.Module):
    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one = nn.Linear(WIDTH, 20)
        self.two = nn.Linear(20, WIDTH) if shared is None else shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(self.norm(x)).sin())


class Network(nn.Module):
    """Its head is its embedding; block 3 has a layer of block 1."""

    def __init__(self, checkpointed: str | None = None, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.embedding = nn.Embedding(17, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 17, bias=False)])
        self.checkpointed = checkpointed
        self.tie()

    def tie(self) -> None:
        if not self.tied:
            return
        self.heads[1].weight = self.embedding.weight  # type: ignore[assignment]
        self.blocks[3].one.weight = self.blocks[1].one.weight  # type: ignore[union-attr, assignment]

    def forward(self, tokens: Tensor, order: Sequence[int] = (0, 1, 2, 3), head: int = 1) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for index in order:
            block = self.blocks[index]
            if self.checkpointed == "host":
                x = checkpoint(block, x)
            elif self.checkpointed is not None:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = block(x)
        return self.heads[head](x)


def tokens(seed: int) -> Tensor:
    return torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(seed)).to(device_type())


Call = Callable[[Network, int], None]


class Pair:
    """A streamed model, and the same one on the device, whose gradients step float32 masters in plain PyTorch."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        checkpointed: str | None = None,
        release: bool = False,
        tied: bool = True,
        offload: longshore.Offload | None = None,
        checkpoint: Any = False,
    ) -> None:
        torch.manual_seed(5)
        self.model = Network(checkpointed, tied).to(dtype)
        self.plain = copy.deepcopy(self.model).to(device_type())
        self.plain.tie()  # where a conversion makes new parameters, it makes one for each name
        self.reference = PlainLoop(
            [nn.Parameter(each.detach().cpu().clone()) for each in self.plain.parameters()], lr=3e-2
        )
        self.stream: Stream = stream(self.model, device_type(), checkpoint=checkpoint)
        self.optimizer = longshore.AdamW(
            self.model.parameters(), lr=3e-2, release_gradients=release, offload=offload or longshore.Offload()
        )
        self.release = release
        self.summed: list[Tensor | None] = [None for _ in self.plain.parameters()]
        for index, parameter in enumerate(self.plain.parameters()) if release else ():
            parameter.register_post_accumulate_grad_hook(partial(self._add, index))

    def _add(self, index: int, parameter: Tensor) -> None:
        """Gradients that have left are added in float32."""
        assert parameter.grad is not None
        so_far, new = self.summed[index], parameter.grad.cpu().float()
        self.summed[index] = new if so_far is None else so_far + new
        parameter.grad = None

    def step(self, call: Call, seed: int, clip: float | None = None) -> None:
        for model in (self.model, self.plain):
            call(model, seed)
        scale = 1.0
        if self.release:
            gradients, self.summed = self.summed, [None] * len(self.summed)
            if clip is not None:
                scale = torch.clamp(clip / (self.optimizer.clip_grad_norm_(clip) + 1e-6), max=1.0).item()
        else:
            gradients = [None if each.grad is None else each.grad.cpu() for each in self.plain.parameters()]
            for mine, ours in zip(gradients, self.model.parameters(), strict=True):
                assert (ours.grad is None) == (mine is None)
                assert mine is None or (ours.grad is not None and torch.equal(ours.grad, mine))
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                gradients = [None if each.grad is None else each.grad.clone() for each in self.model.parameters()]
        self.reference.step(gradients, scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(self.reference.parameters, self.plain.parameters(), strict=True):
                theirs.copy_(mine)
        self.check()

    def check(self) -> None:
        for ours, mine in zip(self.model.parameters(), self.reference.parameters, strict=True):
            assert ours.device.type == "cpu" and torch.equal(ours, mine)

    def follow(self) -> None:
        """Let the reference have the values that somebody wrote to the model."""
        for index, (mine, ours) in enumerate(zip(self.reference.parameters, self.model.parameters(), strict=True)):
            mine.data.copy_(ours.data)
            self.reference.refresh(index)


def loss_of(model: Network, seed: int, *rest: Any) -> Tensor:
    return model(tokens(seed), *rest).float().square().mean()


def plainly(model: Network, seed: int) -> None:
    loss_of(model, seed).backward()


def three_times(model: Network, seed: int) -> None:
    for part in range(3):
        loss_of(model, 10 * seed + part).backward()


def two_forwards_first(model: Network, seed: int) -> None:
    losses = [loss_of(model, seed), loss_of(model, seed + 50, (2, 0))]
    for loss in losses:
        loss.backward()


def heads_in_turn(model: Network, seed: int) -> None:
    loss_of(model, seed, (0, 1, 2, 3), seed % 2).backward()


def layers_dropped(model: Network, seed: int) -> None:
    loss_of(model, seed, [index for index in range(4) if (seed + index) % 3]).backward()


def a_block_twice(model: Network, seed: int) -> None:
    loss_of(model, seed, (0, 1, 1, 2, 0, 3)).backward()


def evaluated_between(model: Network, seed: int) -> None:
    loss = loss_of(model, seed)
    with torch.no_grad():
        loss_of(model, seed + 1)
    with torch.inference_mode():
        loss_of(model, seed + 2, (3, 1))
    loss.backward()


def one_graph_twice(model: Network, seed: int) -> None:
    loss = loss_of(model, seed)
    loss.backward(retain_graph=True)
    loss.backward()


def a_block_by_itself(model: Network, seed: int) -> None:
    x = torch.ones(2, WIDTH, dtype=model.blocks[0].one.bias.dtype, device=device_type())  # type: ignore[union-attr, arg-type]
    (model.blocks[2](x).float().square().mean() + loss_of(model, seed)).backward()


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        plainly, three_times, two_forwards_first, heads_in_turn, layers_dropped, a_block_twice, evaluated_between,
        one_graph_twice, a_block_by_itself,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    activation_checkpointing.install(None)


CHECKPOINTED = ["no", "reentrant", "not reentrant", "host"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = list(itertools.product(CALLS, CHECKPOINTED, DTYPES, [False, True]))


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize(("call", "checkpointed", "dtype", "release"), ROWS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # reentrant checkpoints without gradients
def test_weights_are_those_without_streaming(call: str, checkpointed: str, dtype: str, release: bool) -> None:
    if checkpointed == "reentrant" and call == "one_graph_twice":
        pytest.skip("torch frees what a reentrant checkpoint keeps")
    if checkpointed == "host":
        configure(checkpoint_in_cpu=True)
    pair = Pair(DTYPES[dtype], None if checkpointed == "no" else checkpointed, release)
    for step in range(4):
        pair.step(CALLS[call], step, clip=1.0 if step % 2 else None)


def test_copies_that_take_long() -> None:
    """Each copy to the device takes longer than what computes meanwhile."""
    begin = DeviceCopyStream.fetch

    def slow(self: DeviceCopyStream, *rest: Any) -> Any:
        from longshore.accelerator import current_stream_is

        with current_stream_is(self.stream):
            keep_busy(4_000_000)
        return begin(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceCopyStream, "fetch", slow)
        pair = Pair(checkpointed="not reentrant")
        for step in range(3):
            pair.step(plainly, step)


def test_a_checkpoint_keeps_nothing_and_computes_again() -> None:
    """Hooks of the blocks leave to those of the checkpoint what is no parameter."""
    pair = Pair(checkpointed="not reentrant")
    called: list[str] = []
    block: Any = pair.model.blocks[0]
    block.one.register_forward_pre_hook(
        lambda *_: called.append("again" if threading.current_thread() is not main else "")
    )
    main = threading.current_thread()
    plainly(pair.model, 0)
    assert called == ["", "again"]


class Nested(nn.Module):
    """A block that uses its own parameter before and after the blocks inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x).sin()
        for block in self.inner:
            x = block(x)
        return self.own(x)


def test_blocks_inside_of_blocks() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Nested(), Nested())
    plain = copy.deepcopy(model).to(device_type())
    stream(model, device_type(), blocks=["Block", "Nested"])
    x = torch.ones(2, WIDTH).to(device_type())
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad.cpu())


def test_two_threads_at_once_are_refused() -> None:
    pair = Pair()
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            loss_of(pair.model, 0)
        except LongshoreError as failure:
            failures.append(failure)

    def meanwhile(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    hook = pair.model.embedding.register_forward_hook(meanwhile)
    loss_of(pair.model, 0)
    assert len(failures) == 1 and "two threads call the model at once" in str(failures[0])
    pair.step(plainly, 0)


def test_frozen_parameters_are_fetched_and_have_no_gradient() -> None:
    pair = Pair()
    for model in (pair.model, pair.plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("two" in name or "heads.0" in name)
    before = pair.stream.counts.returned_bytes
    for step in range(2):
        pair.step(heads_in_turn, step)
    sizes = [each.nbytes for name, each in pair.model.named_parameters() if "two" in name]
    assert pair.stream.counts.returned_bytes - before == 2 * sum(sizes) + (WIDTH * 5 + 5) * 4
    for model in (pair.model, pair.plain):  # and back again
        model.requires_grad_(True)
    pair.step(plainly, 5)


def test_values_that_are_written_between_steps_are_seen() -> None:
    pair = Pair()
    for step in range(3):
        pair.step(plainly, step)
        for model in (pair.model, pair.plain):
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)  # which torch does not see
        pair.follow()
    state = {name: value * 0.5 for name, value in pair.model.state_dict().items()}
    pair.model.load_state_dict(state)
    pair.plain.load_state_dict(state)
    pair.follow()
    pair.step(plainly, 7)


def test_values_that_are_written_while_they_are_on_their_way_are_seen() -> None:
    pair = Pair(tied=False)
    for step in range(3):
        for model in (pair.model, pair.plain):
            second: Any = model.blocks[2]

            def write(*_: Any, bias: Tensor = second.one.bias) -> None:
                with torch.no_grad():
                    bias.mul_(0.5)

            hook = model.blocks[1].register_forward_hook(write)
            plainly(model, step)
            hook.remove()
        pair.follow()
        pair.step(lambda *_: None, step)


def test_a_parameter_that_is_written_in_forward_is_an_error() -> None:
    """It would be written on the device alone."""
    pair = Pair()
    block: Any = pair.model.blocks[2]

    def write(module: nn.Linear, *_: Any) -> None:
        with torch.no_grad():
            module.bias.clamp_(-0.1, 0.1)

    hook = block.two.register_forward_hook(write)
    with torch.no_grad(), pytest.raises(ParameterError, match=r"blocks.2.two.bias was written to in forward"):
        loss_of(pair.model, 0)
    hook.remove()
    pair.step(plainly, 0)


def test_gradients_come_to_hooks_and_to_autograd_grad() -> None:
    pair = Pair()
    seen: list[Any] = []
    weight = pair.model.embedding.weight
    weight.register_hook(lambda gradient: seen.append((gradient.device.type, gradient.clone())))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.device.type, p.grad.clone())))
    plainly(pair.model, 0)
    plainly(pair.plain, 0)
    expected = pair.plain.embedding.weight.grad
    assert expected is not None
    assert [device for device, _ in seen] == ["cpu", "cpu"]
    assert all(torch.equal(value, expected.cpu()) for _, value in seen)
    found = torch.autograd.grad(loss_of(pair.model, 0), list(pair.model.parameters()), allow_unused=True)
    assert found[0] is not None and torch.equal(found[0], expected.cpu())
    (first,) = torch.autograd.grad(loss_of(pair.model, 0), [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_parameter_that_was_written_since_forward_is_an_error_as_without_streaming() -> None:
    pair = Pair()
    for model in (pair.model, pair.plain):
        loss = loss_of(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()


class Probe(nn.Module):
    """A large square layer that notes how much of the device is taken, in forward and in backward."""

    def __init__(self, noted: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        out = torch.nn.functional.linear(x, self.weight)
        out.register_hook(lambda _: self.note())
        return out

    def note(self) -> None:
        torch.accelerator.synchronize()
        self.noted.append(torch.get_device_module().memory_allocated())


def test_two_blocks_are_on_the_device_and_no_gradient_stays() -> None:
    gc.collect()
    noted: list[int] = []
    model = nn.Sequential(*(Probe(noted) for _ in range(8)))
    handle = stream(model, device_type())
    x = torch.ones(1, 256, device=device_type())
    begun = torch.get_device_module().memory_allocated()
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    block = 256 * 256 * 4
    most = max(noted) - begun
    # Two blocks, and in backward a gradient that is being made while the one before leaves.
    assert 2 * block <= most <= 4 * block + (1 << 16), most / block
    torch.accelerator.synchronize()
    counts = handle.counts
    assert counts.returned_bytes == 3 * 8 * block
    assert counts.late <= 16 + 2 * 1  # nothing is known in the first step; later, what comes first in a call


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
def test_the_next_block_is_fetched_ahead(checkpointed: str | None) -> None:
    pair = Pair(checkpointed=checkpointed, tied=False)
    plainly(pair.model, 0)
    before = pair.stream.counts
    for _ in range(5):
        plainly(pair.model, 0)
    after = pair.stream.counts
    assert after.late - before.late == 5  # the first of each call
    assert (
        after.in_time - before.in_time == 5 * 8
    )  # the others in forward, and all but the last one, which is there, in backward
    text = pair.stream.explain()
    assert "6 blocks rest on the host" in text and f"{after.late} of them not foreseen" in text


def test_without_memory_for_the_next_block_it_is_fetched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tied=False)
    pair.step(plainly, 0)
    begin, refused = DeviceCopyStream.fetch, []

    def full(self: DeviceCopyStream, source: Tensor, *rest: Any) -> Any:
        resident = pair.stream._resident
        used = [block for block in (resident._now, resident.kept) if block is not None]
        if source.data_ptr() not in {each.rest.data_ptr() for block in used for each in block.parameters}:
            refused.append(source)
            raise torch.OutOfMemoryError("no memory is left")
        return begin(self, source, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopyStream, "fetch", full)
        pair.step(plainly, 1)
    assert refused
    pair.step(plainly, 2)


def test_what_was_kept_of_a_forward_is_not_a_number() -> None:
    """A reference to what modules have in forward is no parameter, and its memory is given to others."""
    pair = Pair()
    kept: list[Tensor] = []
    block: Any = pair.model.blocks[0]
    block.one.register_forward_hook(lambda module, *_: kept.append(module.weight))
    with torch.no_grad():
        loss_of(pair.model, 0)
    assert kept[0].device.type == device_type() and kept[0].isnan().all()
    pair.check()


def test_an_error_in_forward_leaves_the_parameters_where_they_were() -> None:
    pair = Pair()
    with pytest.raises(IndexError), contextlib.suppress(ZeroDivisionError):
        loss_of(pair.model, 0, (0, 9))
    pair.check()
    for step in range(2):
        pair.step(plainly, step)


def test_close_gives_a_plain_model_back() -> None:
    pair = Pair()
    pair.step(plainly, 0)
    pair.stream.close()
    pair.stream.close()  # once more is nothing
    assert "forward" not in pair.model.__dict__ and pair.model.scale.device.type == "cpu"  # type: ignore[union-attr]
    pair.model(tokens(0).cpu())
    copied = copy.deepcopy(pair.model)
    stream(copied, device_type())
    plainly(copied, 1)


# -- what cannot be streamed ------------------------------------------------------------------------------------------


def test_copies_of_a_streamed_model_are_refused() -> None:
    pair = Pair()
    with pytest.raises(TypeError, match=r"is streamed, and a copy would stream the parameters of this one"):
        copy.deepcopy(pair.model)
    with pytest.raises(LongshoreError, match="Network is streamed already"):
        stream(pair.model, device_type())


def _meta() -> nn.Module:
    with torch.device("meta"):
        return Network()


def _shared() -> nn.Module:
    model = Network()
    model.blocks[2].one.weight = nn.Parameter(model.blocks[1].two.weight.data.view(20, WIDTH))  # type: ignore[union-attr, operator]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "meta": (
        _meta,
        ParameterError,
        r"parameter embedding.weight is on meta, and longshore.stream takes a model on the CPU",
    ),
    "shared": (_shared, ParameterError, r"blocks.1.two.weight and blocks.2.one.weight share memory"),
    "recurrent": (
        lambda: nn.Sequential(nn.LSTM(3, 3), nn.LSTM(3, 3)),
        ParameterError,
        "LSTM keeps its parameters in a list of its own",
    ),
    "one piece": (lambda: nn.Linear(3, 3), ValueError, "Linear has no modules that repeat"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3)),
        ParameterError,
        "parameter 0.weight has no shape yet",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_streamed_is_refused_by_name(kind: str) -> None:
    make, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        stream(make(), device_type())


def test_a_device_that_is_no_accelerator_is_refused() -> None:
    for device in ("cpu", "meta", "nonsense:3", None):
        with pytest.raises(ValueError, match=f"and {device} is none of this machine"):
            stream(Network(), device)  # type: ignore[arg-type]


def test_what_happens_to_a_streamed_model_is_seen() -> None:
    pair = Pair()
    former = pair.model.heads[0].weight
    pair.model.heads[0].weight = nn.Parameter(torch.zeros(5, WIDTH))  # type: ignore[assignment]
    with pytest.raises(ParameterError, match=r"heads.0.weight was replaced after longshore.stream"):
        loss_of(pair.model, 0, (0, 1), 0)
    pair.model.heads[0].weight = former  # type: ignore[assignment]
    bias = pair.model.blocks[1].one.bias  # type: ignore[union-attr]
    values = bias.data
    bias.data = values.double()  # type: ignore[union-attr, operator]
    with pytest.raises(
        ParameterError, match=r"blocks.1.one.bias rests on the host as torch.float32 \(20,\), and is now"
    ):
        loss_of(pair.model, 0)
    bias.data = values  # type: ignore[union-attr]
    with torch.autocast(device_type(), torch.bfloat16), pytest.raises(LongshoreError, match="autocast keeps its casts"):
        loss_of(pair.model, 0)
    pair.step(plainly, 1)


@pytest.mark.parametrize("beams", [1, 2])
def test_generating(beams: int) -> None:
    """``generate()`` of transformers, which puts inputs where the parameters are."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(num_attention_heads=2, eos_token_id=None, **shape)
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model).to(device_type())
    handle = longshore.stream(model, device_type())
    tokens = torch.randint(3, 60, (2, 5), device=device_type())
    options = {"max_new_tokens": 4, "num_beams": beams, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = plain.generate(tokens, **options)
    found = model.generate(tokens, **options)
    assert found.device == tokens.device and torch.equal(found, expected)
    assert model.device.type == "cpu" and not any(parameter.device.type != "cpu" for parameter in model.parameters())
    handle.close()
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(tokens.cpu(), **{**options, "attention_mask": None}), expected.cpu())
