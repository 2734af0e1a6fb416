"""How long forward and backward take here: measured on matrices, on what lies between them, and on a loss.

The pieces are those of a Llama, small, with random numbers; no weights of the planned model are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longshore.plan.machine import Curve, MeasuredCompute

_HIDDEN, _INNER, _HEAD_SIZE, _VOCABULARY = 768, 2432, 64, 16000
_MATRICES = 20
"""More than caches hold: a model's weights are not there either when their turn comes."""
_FEW_MATRICES = 4
"""With many tokens a product takes long, and where its weights were matters no more."""
_MANY_TOKENS = 512
_WIDTH = 11 * _HIDDEN + 3 * _INNER
"""Numbers that go in and out of a block's seven matrices, which what lies between them is counted by."""

Note = Callable[[str], None]
Clock = Callable[[], float]


class Seconds(NamedTuple):
    """Of one run of a piece."""

    forward: float
    backward: float
    release: float
    """Of the memory of the weights' gradients."""


class Probe:
    """Pieces that are made once, and run as often as somebody wants to know.

    Args:
        dtype: of parameters and activations.
        tokens: at least two numbers of tokens of a backward; between them lines are straight.
        seq_len: the most tokens that attend to each other.
        device: where; None: the CPU.
        clock: seconds; on a busy machine with one thread, ``time.process_time``.

    Raises:
        ValueError: fewer than two numbers of tokens.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        tokens: Sequence[int],
        seq_len: int,
        device: torch.device | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._points = tuple(sorted(set(tokens)))
        if len(self._points) < 2:
            raise ValueError(f"a line goes through at least two points: give two numbers of tokens, not {list(tokens)}")
        where = device or torch.device("cpu")
        watch = _Watch(where, clock)
        self._pieces = {
            (name, count): piece(count, min(count, seq_len), dtype, watch)
            for count in self._points
            for name, piece in _PIECES.items()
        }

    def measure(self, note: Note = lambda line: None) -> MeasuredCompute:
        """Run every piece once; ``note`` is told what is measured now."""
        seconds: dict[tuple[str, int], Seconds] = {}
        for (name, count), (run, numel) in self._pieces.items():
            note(f"{name} of {count} tokens")
            seconds[name, count] = Seconds(*(each / numel for each in run()))
        return MeasuredCompute(*(self._curves(seconds, which) for which in range(len(Seconds._fields))))

    def _curves(self, seconds: dict[tuple[str, int], Seconds], which: int) -> dict[str, Curve]:
        names = dict.fromkeys(name for name, _ in seconds)
        return {
            name: Curve(self._points, tuple(seconds[name, count][which] for count in self._points)) for name in names
        }


def merged(
    found: Sequence[MeasuredCompute], by: Callable[[Sequence[float]], float], times: float = 1.0
) -> MeasuredCompute:
    """Of several, point by point: ``by`` (the median of rounds, the most of ranks), and so many times that."""

    def one(curves: Sequence[Curve]) -> Curve:
        seconds = zip(*(curve.seconds for curve in curves), strict=True)
        return Curve(curves[0].tokens, tuple(times * by(each) for each in seconds))

    def of(which: str) -> dict[str, Curve]:
        each = [getattr(one, which) for one in found]
        return {name: one([curves[name] for curves in each]) for name in each[0]}

    return MeasuredCompute(*(of(which) for which in Seconds._fields))


_Piece = tuple[Callable[[], Seconds], int]
"""What runs once, and by how many numbers to divide its seconds."""


class _Watch(NamedTuple):
    """Where pieces run, and by which clock."""

    device: torch.device
    clock: Clock

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def timed(
        self, forward: Callable[[], list[Tensor]], inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> Seconds:
        """Gradients of inputs are let go of in backward, as in a model; those of weights at the end of a step."""
        start = self.now()
        outputs = forward()
        middle = self.now()
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        for each in inputs:
            each.grad = None  # giving memory back takes its time too
        end = self.now()
        for each in weights:
            each.grad = None
        return Seconds(middle - start, end - middle, self.now() - end)


def _matrices(tokens: int, seq_len: int, dtype: torch.dtype, watch: _Watch) -> _Piece:
    device = watch.device
    count = _MATRICES if tokens < _MANY_TOKENS else _FEW_MATRICES
    weights = [torch.randn(_INNER, _HIDDEN, device=device).to(dtype).requires_grad_() for _ in range(count)]
    x = torch.randn(tokens, _HIDDEN, device=device).to(dtype).requires_grad_()

    def run() -> Seconds:
        return watch.timed(lambda: [functional.linear(x, weight) for weight in weights], [x], weights)

    return run, count * _INNER * _HIDDEN


def _between(tokens: int, seq_len: int, dtype: torch.dtype, watch: _Watch) -> _Piece:
    """Norms, rotations, attention, activation and sums of one block, without its matrices."""
    device = watch.device
    batch = max(1, tokens // seq_len)
    shape = (batch, seq_len, _HIDDEN)
    x, q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(4))
    gate, up = (torch.randn(batch, seq_len, _INNER, device=device).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.ones(_HIDDEN, device=device, dtype=dtype)
    angle = torch.rand(seq_len, _HEAD_SIZE, device=device).to(dtype)

    def norm(values: Tensor) -> Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return scale * wide.to(dtype)

    def heads(values: Tensor) -> Tensor:
        return values.view(batch, seq_len, -1, _HEAD_SIZE).transpose(1, 2)

    def rotated(values: Tensor) -> Tensor:
        half = _HEAD_SIZE // 2
        turned = torch.cat((-values[..., half:], values[..., :half]), -1)
        return values * angle + turned * angle

    def forward() -> list[Tensor]:
        first = norm(x)
        mixed = functional.scaled_dot_product_attention(rotated(heads(q)), rotated(heads(k)), heads(v), is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(shape)
        middle = x + mixed
        return [first, functional.silu(gate) * up, middle + norm(middle)]

    return lambda: watch.timed(forward, [x, q, k, v, gate, up]), _WIDTH


def _loss(tokens: int, seq_len: int, dtype: torch.dtype, watch: _Watch) -> _Piece:
    device = watch.device
    logits = torch.randn(tokens, _VOCABULARY, device=device).to(dtype).requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)

    def forward() -> list[Tensor]:
        return [functional.cross_entropy(logits.float(), labels)]

    return lambda: watch.timed(forward, [logits]), _VOCABULARY


def _lookup(tokens: int, seq_len: int, dtype: torch.dtype, watch: _Watch) -> _Piece:
    weight = torch.randn(_VOCABULARY, _HIDDEN, device=watch.device).to(dtype).requires_grad_()
    which = torch.arange(tokens, device=watch.device) % _VOCABULARY
    return lambda: watch.timed(lambda: [functional.embedding(which, weight)], [], [weight]), _VOCABULARY * _HIDDEN


_PIECES = {"matrix": _matrices, "width": _between, "logit": _loss, "lookup": _lookup}
