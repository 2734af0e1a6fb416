"""Error of AdamW's update when its moments are kept in 8-bit codes: ``python -m benchmarks.state_codes``.

Codes are companded: each block of consecutive elements of a parameter has a scale, a power of two (the exponent of
the block's largest magnitude), and each element one byte, the index of a point in a fixed table of magnitudes between
0 and 2, times the scale. A minifloat ``ExMy`` has 2**y points an octave, no subnormal numbers, and a code for zero.
Rounding is to nearest, or stochastic: up with the probability that makes the decoded value right on average.

Two measurements, both on a small decoder that learns bytes of the Python standard library:

- *Without feedback*, each code's moments follow the gradients of one fp32 training run, and the updates they give are
  compared with those of the fp32 moments. The step decodes, computes in fp32, and encodes after the weight update.
- *With feedback*, the weights follow the update of the codes, and the validation loss at the end is compared.
"""

from __future__ import annotations

import argparse
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from longshore.cli.data import Sequences, TokenBatch, byte_corpus, read_text

BETA1, EPSILON, WEIGHT_DECAY = 0.9, 1e-8, 0.1
SEQ_LEN, BATCH_SIZE, WARMUP_STEPS = 128, 8, 30
KINDS = ("embedding", "attention", "mlp", "norm")
"""A parameter is of the last kind that is a part of its name, or of the first one."""
PADDING = 128
"""Each parameter starts at a multiple of this many elements of the flat vector, so that no block has two."""

Pair = tuple[str, str]
"""Names of a code for the first moment and of one for the second."""
Shares = tuple[float, float]


class Code(ABC):
    """A way to keep a moment; ``name`` is shown in the tables."""

    name = "fp32"

    @abstractmethod
    def round_trip(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return ``values`` encoded and decoded; ``noise`` has a uniform number in [0, 1) for each of them."""

    def clipped(self, values: Tensor) -> Shares:
        """Return the shares of nonzero elements below the smallest nonzero point and above the largest one."""
        return 0.0, 0.0


class Exact(Code):
    """Keep a moment in fp32."""

    def round_trip(self, values: Tensor, noise: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class Bfloat16(Code):
    """Keep a moment in bf16, rounded to nearest, or stochastically with 16 random bits below the last bit kept."""

    stochastic: bool

    @property
    def name(self) -> str:
        return "bf16" if self.stochastic else "bf16 nearest"

    def round_trip(self, values: Tensor, noise: Tensor) -> Tensor:
        if not self.stochastic:
            return values.bfloat16().float()
        bits = values.view(torch.int32) + (noise * 65536).to(torch.int32)
        return (bits & -65536).view(torch.float32)


@dataclass(frozen=True)
class BlockCode(Code):
    """Keep a moment as one byte an element and one power of two a block.

    Attributes:
        points: magnitudes relative to the block's power of two, fp32, ascending; the first is 0.
        raise_small: whether values between zero and the smallest nonzero point become that point, as the second
            moment needs: a denominator that is too small makes an update that is too large.
    """

    label: str
    points: Tensor = field(repr=False)
    block_numel: int = 64
    stochastic: bool = True
    raise_small: bool = False

    @property
    def name(self) -> str:
        return f"{self.label} /{self.block_numel}" + ("" if self.stochastic else " nearest")

    def _relative(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return magnitudes in [0, 2), [blocks, block_numel], and the power of two of each block."""
        blocks = values.abs().view(-1, self.block_numel)
        top = blocks.amax(1, keepdim=True)
        exponent = (torch.frexp(top).exponent - 1).clamp(min=-126)
        scale = torch.ldexp(torch.ones_like(top), exponent)
        return blocks / scale, scale

    def round_trip(self, values: Tensor, noise: Tensor) -> Tensor:
        relative, scale = self._relative(values)
        flat = relative.view(-1)
        index = torch.bucketize(flat, self.points, right=True).sub_(1).clamp_(max=self.points.numel() - 2)
        low, high = self.points.index_select(0, index), self.points.index_select(0, index + 1)
        up = (flat - low) / (high - low) > (noise if self.stochastic else 0.5)
        if self.raise_small:
            up |= (low == 0) & (flat > 0)
        decoded = torch.where(up, high, low).view_as(relative) * scale
        return decoded.view(-1).copysign(values)

    def clipped(self, values: Tensor) -> Shares:
        relative, _ = self._relative(values)
        nonzero = (relative > 0).sum().clamp(min=1)
        below, above = (relative > 0) & (relative < self.points[1]), relative > self.points[-1]
        return (below.sum() / nonzero).item(), (above.sum() / nonzero).item()


def minifloat(mantissa_bits: int, codes: int, top_is_two: bool = True) -> Tensor:
    """Return 0 and the ``codes - 1`` largest values with that many mantissa bits, up to 2 or to the last one below 2.

    With 2 as the last point, no value in [0, 2) is above it: even the largest of a block is rounded without bias.
    """
    octave = 2**mantissa_bits
    index = torch.arange(1, codes, dtype=torch.float64) + top_is_two
    positive = (1 + index % octave / octave) * 2.0 ** (torch.floor(index / octave) + 1 - codes / octave)
    return torch.cat([torch.zeros(1, dtype=torch.float64), positive]).float()


def power_points(exponent: int, codes: int) -> Tensor:
    """Return points that are equidistant in the root of this exponent."""
    return (2 * torch.linspace(0, 1, codes, dtype=torch.float64) ** exponent).float()


def softsign_points(codes: int) -> Tensor:
    """Return points that are equidistant in 2x / (1 + x), x in [0, 1] being the value as a part of the largest."""
    equidistant = torch.linspace(0, 1, codes, dtype=torch.float64)
    return (2 * equidistant / (2 - equidistant)).float()


def first_codes() -> list[Code]:
    """Return fp32 and the candidates for the first moment: 127 magnitudes, zero and a sign."""
    e4m3, e3m4, square = minifloat(3, 128), minifloat(4, 128), power_points(2, 128)
    codes = [BlockCode("E4M3", e4m3), BlockCode("E3M4", e3m4), BlockCode("E5M2", minifloat(2, 128))]
    codes += [BlockCode("linear", power_points(1, 128)), BlockCode("softsign", softsign_points(128))]
    codes += [BlockCode("square", square, numel) for numel in (64, 32, 128)]
    codes += [BlockCode("cube", power_points(3, 128)), BlockCode("E4M3 top 1.875", minifloat(3, 128, False))]
    codes += [BlockCode("E4M3", e4m3, stochastic=False), BlockCode("E3M4", e3m4, stochastic=False)]
    codes += [BlockCode("square", square, stochastic=False)]
    return [Exact(), *codes, Bfloat16(True), Bfloat16(False)]


def second_codes() -> list[Code]:
    """Return fp32 and the candidates for the second moment: 255 magnitudes and zero."""
    e4m4, fourth = minifloat(4, 256), power_points(4, 256)
    codes = [BlockCode("E4M4", e4m4, numel, raise_small=True) for numel in (64, 32, 128)]
    codes += [BlockCode("fourth", fourth, numel, raise_small=True) for numel in (64, 32, 128)]
    others = {"E5M3": minifloat(3, 256), "E6M2": minifloat(2, 256)}
    others |= {"square": power_points(2, 256), "cube": power_points(3, 256)}
    codes += [BlockCode(label, points, raise_small=True) for label, points in others.items()]
    codes += [BlockCode(name, points, 64, False, True) for name, points in (("E4M4", e4m4), ("fourth", fourth))]
    codes += [BlockCode("fourth small to 0", fourth), BlockCode("E4M4 small to 0", e4m4)]
    return [Exact(), *codes, Bfloat16(True), Bfloat16(False)]


class Block(nn.Module):
    """One block of a decoder: attention and MLP, each after a layer norm, all with biases."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention_in = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_out = nn.Linear(hidden_size, hidden_size)
        self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size)
        self.mlp_out = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.attention_in(self.norm_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp_out(nn.functional.gelu(self.mlp_in(self.norm_mlp(hidden))))


class Decoder(nn.Module):
    """A decoder of bytes with learned positions and an output layer of its own."""

    def __init__(self, hidden_size: int = 160, layers: int = 3, heads: int = 5) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, hidden_size), nn.Embedding(SEQ_LEN, hidden_size)
        self.blocks = nn.Sequential(*(Block(hidden_size, heads) for _ in range(layers)))
        self.norm, self.output_embedding = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position.weight
        return self.output_embedding(self.norm(self.blocks(hidden)))


class Task:
    """The decoder and its batches; weights and gradients as flat padded vectors. ``kind`` is -1 in padding."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Decoder()
        self.sequences = Sequences(byte_corpus(read_text((), 8 << 20).documents, 256), SEQ_LEN, seed)
        self.named = list(self.model.named_parameters())
        self.padded = [-(-parameter.numel() // PADDING) * PADDING for _, parameter in self.named]
        kinds = [max(k * (kind in name) for k, kind in enumerate(KINDS)) for name, _ in self.named]
        kind_parts = [torch.full((p.numel(),), kind + 1) for (_, p), kind in zip(self.named, kinds, strict=True)]
        self.kind = self._flatten(kind_parts) - 1
        is_matrix = [torch.full((p.numel(),), float(p.dim() == 2)) for _, p in self.named]
        self.decay = WEIGHT_DECAY * self._flatten(is_matrix)
        self.weights = self._flatten([parameter.detach().flatten() for _, parameter in self.named])
        for (_, parameter), part in zip(self.named, self.weights.split(self.padded), strict=True):
            parameter.data = part[: parameter.numel()].view_as(parameter)

    def _flatten(self, parts: list[Tensor]) -> Tensor:
        padded = zip(parts, self.padded, strict=True)
        return torch.cat([nn.functional.pad(part, (0, numel - part.numel())) for part, numel in padded])

    def _loss(self, batch: TokenBatch) -> Tensor:
        return cross_entropy(self.model(batch.inputs).flatten(0, 1), batch.targets.flatten())

    def gradient(self, step: int) -> Tensor:
        """Return the gradient of batch ``step`` at the current weights."""
        self.model.zero_grad()
        self._loss(self.sequences.training_batch(step, BATCH_SIZE)).backward()
        return self._flatten([p.grad.flatten() for _, p in self.named if p.grad is not None])

    def apply(self, update: Tensor, step: int, lr: float) -> None:
        """Move the weights by one AdamW step; ``step`` counts from 0."""
        warm = lr * min(1.0, (step + 1) / WARMUP_STEPS)
        self.weights.mul_(1 - warm * self.decay).sub_(update, alpha=warm)

    @torch.no_grad()
    def validation_loss(self, batches: int = 24) -> float:
        losses = [self._loss(batch) for batch in self.sequences.validation_batches(batches, BATCH_SIZE)]
        return torch.stack(losses).mean().item()


def advance(moment: Tensor, value: Tensor, beta: float) -> Tensor:
    return moment * beta + value * (1 - beta)


def update_of(first: Tensor, second: Tensor, step: int, beta2: float) -> Tensor:
    """Return the update in units of the learning rate; ``step`` counts from 0."""
    corrected = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(EPSILON)
    return first / (1 - BETA1 ** (step + 1)) / corrected


def noises(numel: int, seed: int) -> Iterator[Tensor]:
    """Yield for each step uniform numbers in [0, 1), [2, numel]: for the first and for the second moment."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand(2, numel, generator=generator)


class UpdateError(NamedTuple):
    """Error of one step's update: relative, of the whole and by ``KINDS``; bias of the mean magnitude; in units of the
    learning rate, the largest error of an element; and the share of elements whose error is more than 0.1."""

    relative: float
    of_kind: tuple[float, ...]
    bias: float
    largest: float
    share_large: float


def compare(update: Tensor, exact: Tensor, kind: Tensor) -> UpdateError:
    difference = update - exact
    of_kind = tuple((difference[kind == k].norm() / exact[kind == k].norm()).item() for k in range(len(KINDS)))
    bias = update.abs().sum() / exact.abs().sum() - 1
    relative, largest = difference.norm() / exact.norm(), difference.abs().max()
    share_large = (difference.abs() > 0.1).sum() / (kind >= 0).sum()
    return UpdateError(relative.item(), of_kind, bias.item(), largest.item(), share_large.item())


def is_compared(first: Code, second: Code) -> bool:
    """Return whether one of the two is exact, or both are bf16 or codes for blocks of 64, rounded stochastically."""
    names = first.name, second.name
    return "fp32" in names or all(name == "bf16" or re.fullmatch(r"\w+ /64", name) for name in names)


def without_feedback(settings: argparse.Namespace) -> None:
    """Print the error of every candidate's update along one fp32 training run."""
    task, firsts, seconds = Task(0), first_codes(), second_codes()
    kept_firsts = [torch.zeros_like(task.weights) for _ in firsts]
    kept_seconds = [torch.zeros_like(task.weights) for _ in seconds]
    recorded = sorted({settings.steps * share // 100 - 1 for share in (5, 25, 50, 75, 100)} - {-1})
    errors: dict[Pair, list[UpdateError]] = {}
    clipped: dict[Pair, Shares] = {}
    source = noises(task.weights.numel(), 1)
    both = itertools.product(enumerate(firsts), enumerate(seconds))
    pairs = [pair for pair in both if is_compared(pair[0][1], pair[1][1])]
    for step in range(settings.steps):
        gradient, noise = task.gradient(step), next(source)
        news = [advance(kept, gradient, BETA1) for kept in kept_firsts]
        new_seconds = [advance(kept, gradient * gradient, settings.beta2) for kept in kept_seconds]
        exact = update_of(news[0], new_seconds[0], step, settings.beta2)
        if step in recorded:
            for (row, first), (column, second) in pairs:
                clipped[("m", first.name)] = first.clipped(news[row])
                clipped[("v", second.name)] = second.clipped(new_seconds[column])
                update = update_of(news[row], new_seconds[column], step, settings.beta2)
                errors.setdefault((first.name, second.name), []).append(compare(update, exact, task.kind))
        task.apply(exact, step, settings.lr)
        kept_firsts = [code.round_trip(new, noise[0]) for code, new in zip(firsts, news, strict=True)]
        kept_seconds = [code.round_trip(new, noise[1]) for code, new in zip(seconds, new_seconds, strict=True)]
    print_errors(errors, clipped, [step + 1 for step in recorded])


def print_errors(errors: dict[Pair, list[UpdateError]], clipped: dict[Pair, Shares], steps: list[int]) -> None:
    """Print three tables: first moments beside an exact second one, second moments beside an exact first, pairs."""
    tables = {
        "First moment, second in fp32": [pair for pair in errors if pair[1] == "fp32"],
        "Second moment, first in fp32": [pair for pair in errors if pair[0] == "fp32"],
        "Both": [pair for pair in errors if "fp32" not in pair],
    }
    columns = "".join(f"{'@' + str(step):>8}" for step in steps) + "".join(f"{kind:>11}" for kind in KINDS)
    header = f"{'code':35}{columns}{'bias':>9}{'largest':>9}{'>0.1lr':>9}{'below':>9}{'above':>9}"
    for title, pairs in tables.items():
        print(f"\n{title}: error of the update in percent, by step and kind (last step); largest in lr\n{header}")
        for pair in sorted(pairs, key=lambda pair: errors[pair][-1].relative):
            found = errors[pair]
            last = "".join(f"{100 * value:11.3f}" for value in found[-1].of_kind)
            over = "".join(f"{100 * item.relative:8.3f}" for item in found)
            bias = 100 * sum(item.bias for item in found) / len(found)
            largest, share = max(item.largest for item in found), 100 * found[-1].share_large
            below, above = clipped[("m", pair[0]) if pair[1] == "fp32" else ("v", pair[1])]
            name = " + ".join(name for name in pair if name != "fp32" or title == "Both")
            rest = f"{bias:9.3f}{largest:9.3f}{share:9.4f}{100 * below:9.4f}{100 * above:9.4f}"
            print(f"{name or 'fp32':35}{over}{last}{rest}")


EXACT = ("fp32", "fp32")
FEEDBACK_PAIRS = [("bf16", "bf16"), ("bf16 nearest", "bf16 nearest"), ("E4M3 /64", "E5M3 /64")]
FEEDBACK_PAIRS += [("E4M3 /64", "E4M4 /64"), ("square /64", "fourth /64"), ("E3M4 /64", "E4M4 /64")]
FEEDBACK_PAIRS += [("softsign /64", "square /64")]


def final_loss(pair: Pair, seed: int, settings: argparse.Namespace, nudge: float = 0.0) -> float:
    """Train with these codes, from weights changed at random by a part ``nudge``, and return the validation loss."""
    task = Task(seed)
    task.weights *= 1 + nudge * torch.randn_like(task.weights)
    first_code = {code.name: code for code in first_codes()}[pair[0]]
    second_code = {code.name: code for code in second_codes()}[pair[1]]
    first, second = torch.zeros_like(task.weights), torch.zeros_like(task.weights)
    source = noises(task.weights.numel(), seed + 1)
    for step in range(settings.steps):
        gradient, noise = task.gradient(step), next(source)
        first, second = advance(first, gradient, BETA1), advance(second, gradient * gradient, settings.beta2)
        task.apply(update_of(first, second, step, settings.beta2), step, settings.lr)
        first, second = first_code.round_trip(first, noise[0]), second_code.round_trip(second, noise[1])
    return task.validation_loss()


def with_feedback(settings: argparse.Namespace) -> None:
    """Print the validation loss of each pair of codes, and its difference from fp32's, for each seed."""
    print(f"\nWith feedback, beta2 {settings.beta2}: validation loss after {settings.steps} steps, minus fp32's")
    exact = {seed: final_loss(EXACT, seed, settings) for seed in settings.seeds}
    print(f"{'fp32':35}" + "".join(f"{loss:19.4f}" for loss in exact.values()), flush=True)
    runs = [("fp32 nudged by 1e-6", EXACT, 1e-6), *((" + ".join(pair), pair, 0.0) for pair in FEEDBACK_PAIRS)]
    for name, pair, nudge in runs:
        print(f"{name:35}", end="")
        for seed in settings.seeds:
            loss = final_loss(pair, seed, settings, nudge)
            print(f"{loss:10.4f} {loss - exact[seed]:+8.4f}", end="", flush=True)
        print()


PARTS = {"error": without_feedback, "feedback": with_feedback}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure 8-bit codes for Adam's moments.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--part", choices=tuple(PARTS), help="both without it")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    for part in [settings.part] if settings.part else PARTS:
        PARTS[part](settings)


if __name__ == "__main__":
    main()
