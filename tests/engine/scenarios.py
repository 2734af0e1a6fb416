"""The ways in which people train, told once: to the engine, and to a plain torch loop.

A scenario says for each step which backwards there are and how they are called.
:func:`drive` runs it on an engine; :class:`Oracle` computes on a twin of the
model what plain PyTorch would have made of it, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from plain_states import StatesLoop
from support import PlainLoop
from torch import Tensor, nn

HEADS = ("a", "b", "c")


WIDE = 64
"""Width of a trunk whose square matrices are the smallest that may have states of 8 bits."""


class MultiTask(nn.Module):
    """A trunk with heads of odd sizes; heads are registered last."""

    def __init__(self, tied: bool = False, width: int = 33) -> None:
        super().__init__()
        self.first = nn.Linear(19, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        if tied:
            self.third.weight = self.second.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.heads = nn.ModuleDict({name: nn.Linear(width, 3 + 2 * place) for place, name in enumerate(HEADS)})

    def forward(self, x: Tensor, heads: Sequence[str]) -> Tensor:
        x = nn.functional.gelu(self.norm(self.first(x)))
        x = self.third(nn.functional.gelu(self.second(x)))
        return torch.stack([self.heads[name](x).float().pow(2).sum() for name in heads]).sum()


def make_model(
    dtype: torch.dtype, tied: bool = False, device: torch.device | str = "cpu", width: int = 33
) -> MultiTask:
    torch.manual_seed(0)
    model = MultiTask(tied, width).to(device=device, dtype=dtype)
    if tied:  # where a device is an extension of torch, each module has got a parameter of its own
        model.third.weight = model.second.weight
    return model


def width_for(states: str) -> int:
    """The width of the model: wide, where states of 8 bits shall occur."""
    return 33 if states == "fp32" else WIDE


def inputs(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(5, 19, generator=generator).to(dtype)


@dataclass(frozen=True)
class Backward:
    """One backward: the sum of the losses of some forwards.

    Attributes:
        forwards: the heads that each of them uses.
        raw: ``loss.backward()`` rather than ``engine.backward(loss)``.
        boundary: declared before it.
        unsynchronized: inside ``no_sync()``.
    """

    forwards: tuple[tuple[str, ...], ...] = (HEADS,)
    raw: bool = False
    boundary: bool | None = None
    unsynchronized: bool = False


@dataclass(frozen=True)
class Window:
    """The backwards of one optimizer step.

    Attributes:
        backwards: in order.
        step_each: ``step()`` after every backward, not only after the last.
        forwards_first: all forwards, then all backwards.
        accumulation: ``set_gradient_accumulation_steps`` before the window.
    """

    backwards: tuple[Backward, ...] = (Backward(),)
    step_each: bool = False
    forwards_first: bool = False
    accumulation: int | None = None


@dataclass(frozen=True)
class Scenario:
    """Attributes:
    plan: the window of a step.
    steps: how many.
    config: merged into the configuration.
    prepare: called with the model before anything: freezing, say.
    groups: from a model to parameter groups; None: all parameters, one group.
    clip: largest norm.
    schedule: factor of the learning rate at each step.
    tied: the trunk shares a matrix.
    max_delay_s: of each simulated copy; there is one for each tile, and in each direction.
    write: done to this rank's part of each parameter before a step's forwards, where torch cannot see it.
    steady: some tile gets in every window what it got in the one before, so that it is stepped ahead.
    """

    plan: Callable[[int], Window] = lambda step: Window()
    steps: int = 3
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[MultiTask], None] = lambda model: None
    groups: Callable[[MultiTask], list[dict[str, Any]]] | None = None
    clip: float | None = None
    schedule: Callable[[int], float] | None = None
    tied: bool = False
    tile_numel: int = 100
    max_delay_s: float = 0.0005
    write: Callable[[Tensor, int], None] | None = None
    steady: bool = True


def _boundaries(step: int) -> Window:
    return Window(tuple(Backward(boundary=number == 3) for number in range(4)), step_each=True)


def _changing(step: int) -> Window:
    counts = (1, 3, 2)[step % 3]
    head = HEADS[step % 3]
    return Window(tuple(Backward(forwards=((head,),)) for _ in range(counts)), step_each=True, accumulation=counts)


def _only_before_the_boundary(step: int) -> Window:
    return Window((Backward((("a", "b"),), boundary=False), Backward((("a",),), boundary=True)), step_each=True)


def _freeze_some(model: MultiTask) -> None:
    model.second.weight.requires_grad_(False)
    model.heads["b"].bias.requires_grad_(False)


def _freeze_trunk(model: MultiTask) -> None:
    for module in (model.first, model.norm):
        module.requires_grad_(False)


def _different_groups(model: MultiTask) -> list[dict[str, Any]]:
    return [
        {"params": [*model.first.parameters(), *model.norm.parameters()], "lr": 1e-3, "weight_decay": 0.1},
        {"params": list(model.second.parameters()), "betas": (0.5, 0.9), "eps": 1e-5},
        {"params": [], "lr": 7.0},
        {
            "params": [*model.third.parameters(), model.empty],
            "decoupled_weight_decay": False,
            "weight_decay": 0.3,
            "lr": 3e-3,
        },
        {"params": list(model.heads.parameters()), "weight_decay": 0.0, "betas": (0.0, 0.99)},
    ]


def _clamp_unseen(held: Tensor, step: int) -> None:
    if step % 3 == 2:
        held.data.clamp_(-0.1, 0.1)


def _trunk_and_heads(model: MultiTask) -> list[dict[str, Any]]:
    trunk = [*model.first.parameters(), *model.norm.parameters()]
    rest = [*model.second.parameters(), *model.third.parameters(), model.empty, *model.heads.parameters()]
    return [{"params": trunk, "lr": 5e-3}, {"params": rest, "lr": 2e-3}]


SCENARIOS: dict[str, Scenario] = {
    "single backward": Scenario(),
    "four backwards with boundary calls": Scenario(_boundaries),
    "two backwards with none": Scenario(lambda step: Window((Backward(), Backward((("a",), ("b",)))))),
    "accumulation of 4": Scenario(
        lambda step: Window((Backward(),) * 4, step_each=True), config={"gradient_accumulation_steps": 4}
    ),
    "accumulation of 4, one step call": Scenario(
        lambda step: Window((Backward(),) * 4), config={"gradient_accumulation_steps": 4}
    ),
    "changing accumulation with different heads": Scenario(_changing, steps=6),
    "alternating heads": Scenario(lambda step: Window((Backward(((HEADS[step % 3],),)),)), steps=6),
    "a head used only before the boundary": Scenario(_only_before_the_boundary),
    "two forwards, then two backwards": Scenario(lambda step: Window((Backward(), Backward()), forwards_first=True)),
    "summed loss": Scenario(lambda step: Window((Backward((("a",), ("b", "c"), ("a",))),))),
    "raw backward": Scenario(lambda step: Window((Backward(raw=True),))),
    "two raw backwards and one of the engine's": Scenario(
        lambda step: Window((Backward(raw=True), Backward((("b",),), raw=True), Backward((("a", "c"),))))
    ),
    "no_sync": Scenario(lambda step: Window((Backward(unsynchronized=True), Backward((("a",),))))),
    "backwards that stay, then raw ones": Scenario(
        lambda step: Window((Backward(unsynchronized=True), Backward((("a",),), raw=True), Backward(raw=True)))
    ),
    "groups that differ in everything": Scenario(groups=_different_groups),
    "a schedule": Scenario(schedule=lambda step: 1.0 / (1 + step), groups=_trunk_and_heads),
    "frozen parameters": Scenario(prepare=_freeze_some),
    "a frozen group": Scenario(prepare=_freeze_trunk, groups=_trunk_and_heads),
    "tied weights": Scenario(tied=True),
    "always clipped": Scenario(clip=0.01),
    "sometimes clipped": Scenario(
        lambda step: Window((Backward((("c",) if step % 2 else HEADS,)),)), clip=4.5, steps=4
    ),
    "never clipped": Scenario(clip=1e9),
    "writes that torch cannot see": Scenario(
        lambda step: Window((Backward(((HEADS[step % 3], "a"),)),)), steps=6, write=_clamp_unseen
    ),
    "40 steps with tiny tiles": Scenario(
        lambda step: Window((Backward(((HEADS[step % 3], "a"),)),)), steps=40, tile_numel=40, max_delay_s=0.0002
    ),
}


MUON: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
"""Options of Muon's matrices in the table."""


def groups_for_muon(model: MultiTask, groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Divide parameters, or AdamW's groups, between Muon and AdamW, so that no scenario lacks one of them: every
    parameter of two dimensions is Muon's, one without elements too, but for one head, as a language model's is."""
    entries = list(groups)
    divided: list[dict[str, Any]] = []
    for entry in entries if isinstance(entries[0], dict) else [{"params": entries}]:
        options = {name: value for name, value in entry.items() if name != "params"}
        is_matrix = [each.ndim == 2 and each is not model.heads["c"].weight for each in entry["params"]]
        matrices = [each for each, is_muons in zip(entry["params"], is_matrix, strict=True) if is_muons]
        others = [each for each, is_muons in zip(entry["params"], is_matrix, strict=True) if not is_muons]
        splits = {id(model.first.weight): {"split": 3}, id(model.second.weight): {"split": 3, "split_dim": 1}}
        whole = [each for each in matrices if id(each) not in splits]
        of_muon = {"use_muon": True, **_of_matrices(options)}
        divided += [{"params": [each], **of_muon, **splits[id(each)]} for each in matrices if id(each) in splits]
        divided += [{"params": whole, **of_muon}, {"params": others, "use_muon": False, **options}]
    return divided


def _of_matrices(options: Mapping[str, Any]) -> dict[str, Any]:
    """Muon's options in place of AdamW's: what differs between AdamW's groups differs between Muon's."""
    found = {name: options[name] for name in ("lr", "weight_decay", "eps") if name in options}
    if "betas" in options:
        found["momentum"] = options["betas"][0]
    if "decoupled_weight_decay" in options:
        found |= {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    return found


def groups_of(scenario: Scenario, model: MultiTask, optimizer: str) -> list[Any]:
    """The parameters of a scenario, or groups of them, for ``"AdamW"`` or ``"Muon"``."""
    groups = scenario.groups(model) if scenario.groups else list(model.parameters())
    return groups if optimizer == "AdamW" else groups_for_muon(model, groups)


def drive(engine: Any, window: Window, step: int, rank: int, dtype: torch.dtype) -> None:
    """One window on the engine, as a user would write it."""
    if window.accumulation is not None:
        engine.set_gradient_accumulation_steps(window.accumulation)

    def loss_of(number: int, backward: Backward) -> Tensor:
        losses = [
            engine(inputs(step, 10 * number + place, rank, dtype).to(engine.device), heads)
            for place, heads in enumerate(backward.forwards)
        ]
        return torch.stack(losses).sum()

    ready = [loss_of(*entry) for entry in enumerate(window.backwards)] if window.forwards_first else []
    for number, backward in enumerate(window.backwards):
        if backward.boundary is not None:
            engine.set_gradient_accumulation_boundary(backward.boundary)
        loss = ready[number] if ready else loss_of(number, backward)
        if backward.raw:
            loss.backward()
        elif backward.unsynchronized:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)
        last = number == len(window.backwards) - 1
        if last or window.step_each:
            engine.step()
            assert engine.was_step_applied() == last


class Oracle:
    """Plain PyTorch on a twin of the model: the loop that DESIGN.md names for the stage. Its gradients are computed on
    the ``device``, and what becomes of them on the CPU. With ``states`` that are not float32, the optimizer is the
    kernels' oracle on whole parameters."""

    def __init__(
        self,
        scenario: Scenario,
        dtype: torch.dtype,
        world_size: int,
        stage: int,
        device: torch.device | str = "cpu",
        optimizer: str = "AdamW",
        states: str = "fp32",
        **defaults: Any,
    ) -> None:
        self.model = make_model(dtype, scenario.tied, device, width_for(states))
        scenario.prepare(self.model)
        self._dtype, self._world_size, self._device = dtype, world_size, device
        self._each_backward = stage >= 2
        groups = groups_of(scenario, self.model, optimizer)
        if groups and isinstance(groups[0], dict):
            groups = [group for group in groups if group["params"]]
        if states != "fp32":
            self.loop: Any = StatesLoop(groups, self.model.named_parameters(), optimizer, states, **defaults)
        elif optimizer == "AdamW":
            self.loop = PlainLoop(groups, **defaults)
        else:
            self.loop = _muon_loop(groups, torch.device(device), defaults)

    def gradients(self, window: Window, step: int, accumulation: int) -> list[Tensor | None]:
        """What the window comes to, reduced over the ranks, in float32."""
        per_backward = [
            [self._backward(backward, number, step, rank, accumulation) for rank in range(self._world_size)]
            for number, backward in enumerate(window.backwards)
        ]
        rounds: list[list[list[list[Tensor | None]]]]
        if self._each_backward:
            # Those inside no_sync() are added up on their rank.
            rounds, together = [], []
            for backward, ranks in zip(window.backwards, per_backward, strict=True):
                together.append(ranks)
                if not backward.unsynchronized:
                    rounds += [together[:-1], [ranks]] if len(together) > 1 else [[ranks]]
                    together = []
            rounds += [together] if together else []
        else:
            rounds = [per_backward]
        totals = [
            [
                _mean([_sum([backward[rank][index] for backward in members]) for rank in range(self._world_size)])
                for members in rounds
            ]
            for index in range(len(self.loop.parameters))
        ]
        return [_sum(entry) for entry in totals]

    def _backward(
        self, backward: Backward, number: int, step: int, rank: int, accumulation: int
    ) -> list[Tensor | None]:
        losses = [
            self.model(inputs(step, 10 * number + place, rank, self._dtype).to(self._device), heads)
            for place, heads in enumerate(backward.forwards)
        ]
        loss = torch.stack(losses).sum()
        if accumulation > 1 and not backward.raw:
            loss = loss / accumulation
        parameters = [parameter for parameter in self.loop.parameters if parameter.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        by_id = {id(parameter): gradient for parameter, gradient in zip(parameters, found, strict=True)}
        gradients = [by_id.get(id(parameter)) for parameter in self.loop.parameters]
        return [None if gradient is None else gradient.float().cpu() for gradient in gradients]


def _muon_loop(groups: list[dict[str, Any]], device: torch.device, adamw: Mapping[str, Any]) -> Any:
    from plain_muon import MuonLoop  # for which torch has to have a Muon

    complete = [group if group["use_muon"] else {**adamw, **group} for group in groups]
    return MuonLoop(complete, None if device.type == "cpu" else device, **MUON)


def _sum(entries: Sequence[Tensor | None]) -> Tensor | None:
    present = [entry for entry in entries if entry is not None]
    if not present:
        return None
    total = present[0]
    for entry in present[1:]:
        total = total + entry
    return total


def _mean(entries: Sequence[Tensor | None]) -> Tensor | None:
    total = _sum(entries)
    return None if total is None else total * (1.0 / len(entries))


def norm_of(gradients: Sequence[Tensor | None]) -> float:
    total = sum(float(gradient.double().pow(2).sum()) for gradient in gradients if gradient is not None)
    return float(torch.tensor(total, dtype=torch.float64).sqrt())
