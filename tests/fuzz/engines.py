"""An engine on both sides: ``longshore.initialize``, and what docs/engine.md says that its weights are."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longshore
from fuzz.encoded import encoded_twin
from fuzz.plain import twin
from longshore.engine.config.model import LossScaling
from longshore.engine.precision import LossScaleError


@functools.cache
def _group() -> Any:
    """A process group that plain PyTorch has for itself."""
    return dist.new_group(backend="gloo")


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_group())
    return values


def our_engine(settings: dict[str, Any], model: nn.Module, kind: str, params: Any, options: dict[str, Any]) -> Any:
    """An engine with the settings of ``ours()``."""
    settings = dict(settings)
    bucket, stage = settings.pop("bucket", 100_000), settings.pop("stage")
    scheduler = _schedule if options.pop("schedule", False) else None
    clip, accumulation = options.pop("clip", None), options.pop("accumulation", 1)
    scaling = options.pop("scaling", None)
    units = settings.pop("wrap_policy", 1 << 30)  # one unit: each rank may use another head
    config = longshore.Config(
        stage=stage,
        offload_device="cpu",
        param_device=settings.pop("param_device", "none"),
        reduce_bucket_numel=bucket,
        allgather_bucket_numel=bucket,
        gradient_clipping=clip,
        gradient_accumulation_steps=accumulation,
        loss_scaling=None if scaling is None else LossScaling(**scaling),
        optimizer=None if kind == "Muon" else {"type": kind, **options},
    )
    # Its groups are those of the program, and not what a configuration finds in a model.
    own = {"optimizer": longshore.Muon(params, **options)} if kind == "Muon" else {"model_parameters": params}
    if "simulated" in settings:
        settings["transfer"] = longshore.SimulatedTransfer(settings.pop("simulated"), max_delay_s=1e-4)
    return longshore.initialize(
        model=model,
        **own,
        config=config,
        offload=longshore.Offload(**{"threads": 1, **settings}),
        lr_scheduler=scheduler,
        wrap_policy=units if stage == 3 else None,
    ).engine


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def made_twin(
    settings: dict[str, Any], kind: str, params: Any, names: dict[Tensor, str] | None = None, **options: Any
) -> Any:
    """The twin of an optimizer with the settings of ``ours()``."""
    if "states" not in settings:
        return twin(kind)(params, **options)
    states = {name: settings[name] for name in ("states", "states_seed") if name in settings}
    return encoded_twin(kind)(params, **states, names=names, **options)


class PlainScale:
    """A loss scale, after the rules of ``LossScaling``."""

    def __init__(
        self,
        scale: float | None = None,
        initial_scale_power: int = 16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        self.value = 2.0**initial_scale_power if scale is None else scale
        self._dynamic, self._least = scale is None, min_scale
        self._window, self._hysteresis, self._refilled = window, hysteresis, consecutive_hysteresis
        self._left, self._clean = hysteresis, 0

    def update(self, overflow: bool) -> None:
        """End a window; LossScaleError if the scale is at its minimum and would have to be halved."""
        if not self._dynamic:
            return
        if overflow and self._left > 1:
            self._left -= 1
        elif overflow and self.value == self._least:
            raise LossScaleError("the scale is at its minimum")
        elif overflow:
            self.value = max(self.value / 2, self._least)
        elif self._clean and self._clean % self._window == 0:
            self.value, self._left = self.value * 2, self._hysteresis
        elif self._refilled:
            self._left = self._hysteresis
        self._clean = 0 if overflow else self._clean + 1


class PlainEngine:
    """A loop over several ranks: stages 0 and 1 take the mean of the ranks' sums over backwards, 2 and 3 the sum over
    backwards of the ranks' means. Gradients are added in float32."""

    def __init__(
        self, settings: dict[str, Any], model: nn.Module, kind: str, params: Any, options: dict[str, Any]
    ) -> None:
        self._each_backward = settings["stage"] >= 2 and len(gathered(None)) > 1
        self._model = model
        self._clip = options.pop("clip", None)
        self._accumulation = options.pop("accumulation", 1)
        scaling = options.pop("scaling", None)
        self.loss_scaling = PlainScale(**scaling or {"scale": 1.0})
        self._skips = scaling is not None
        self.skipped_steps = 0
        scheduled = options.pop("schedule", False)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizer = made_twin(settings, kind, params, names, **options)
        self.lr_scheduler = _schedule(self.optimizer) if scheduled else None
        self._boundary: bool | None = None
        self._hooked: set[Tensor] = set()
        self._synchronize = True
        self._begin()

    def _begin(self) -> None:
        self._rounds: list[list[dict[int, Tensor]]] = []
        """Backwards by the round in which they are reduced."""
        self._waiting: list[dict[int, Tensor]] = []
        self._found: dict[int, Tensor] = {}
        self._backwards = 0

    def __call__(self, *inputs: Any) -> Tensor:
        return self._model(*inputs)

    def _after(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        new = parameter.grad.float()
        self._found[index] = self._found[index] + new if index in self._found else new
        parameter.grad = None

    def _watch(self) -> None:
        for index, parameter in enumerate(self._model.parameters()):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(functools.partial(self._after, index))

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        steps = self._accumulation if scale_wrt_gas else 1
        self.raw(self.scale(loss / steps if steps > 1 else loss), retain_graph)
        self._backwards += 1

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaling.value == 1.0 else loss.float() * self.loss_scaling.value

    def raw(self, loss: Tensor, retain_graph: bool = False) -> None:
        """A ``loss.backward()`` of the script's own."""
        self._watch()
        try:
            loss.backward(retain_graph=retain_graph)
        finally:  # what a backward brought before it raised is there, as in torch
            self._waiting.append(self._found)
            if self._synchronize and self._each_backward:
                self._rounds += [self._waiting[:-1], self._waiting[-1:]] if len(self._waiting) > 1 else [self._waiting]
                self._waiting = []
            self._found = {}

    def no_sync(self) -> Any:
        outer = self

        class Unsynchronized:
            def __enter__(self) -> None:
                outer._synchronize = False

            def __exit__(self, *_: Any) -> None:
                outer._synchronize = True

        return Unsynchronized()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._begin()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self._boundary = is_boundary

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation = steps

    def _due(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        return self._accumulation == 1 or self._backwards >= self._accumulation

    @torch.no_grad()
    def _gradients(self) -> dict[int, Tensor]:
        rounds = [*self._rounds, *([self._waiting] if self._waiting else [])]
        sums = [functools.reduce(_added, members, {}) for members in rounds]
        ranks = gathered(sums)
        most = max(map(len, ranks))
        means = []
        for number in range(most):
            total = functools.reduce(_added, [each[number] for each in ranks if number < len(each)], {})
            means.append({index: value * (1.0 / len(ranks)) for index, value in total.items()})
        return functools.reduce(_added, means, {})

    def step(self) -> None:
        if not self._due():
            return
        gradients = self._gradients()
        if self._boundary is None and self._backwards == 0 and not gradients:
            return
        parameters = list(self._model.parameters())
        if self._skips:
            gradients = {index: value / self.loss_scaling.value for index, value in gradients.items()}
            overflow = not all(bool(value.isfinite().all()) for value in gradients.values())
            if overflow:
                self.skipped_steps += 1
                self._begin()
            self.loss_scaling.update(overflow)
            if overflow:
                return
        members = {p for group in self.optimizer.param_groups for p in group["params"]}
        found = {parameters[index]: value for index, value in gradients.items() if parameters[index] in members}
        self.optimizer.step_on(found, self._clip)
        self._begin()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def saved(self) -> Any:
        """A checkpoint."""
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        states = self._model.state_dict(), self.optimizer.state_dict(), schedule
        return copy.deepcopy((*states, self.loss_scaling, self.skipped_steps))

    def loaded(self, save: Any) -> None:
        """Go on from a checkpoint."""
        # Accumulation is a setting of the run, and stays.
        model, optimizer, schedule, scaling, skipped = copy.deepcopy(save)
        if scaling is not None:  # an optimizer without an engine has none
            self.loss_scaling, self.skipped_steps = scaling, skipped
        self._model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.lr_scheduler is not None and schedule is not None:
            self.lr_scheduler.load_state_dict(schedule)
        self.zero_grad()


def _added(a: dict[int, Tensor], b: dict[int, Tensor]) -> dict[int, Tensor]:
    return {**a, **{index: a[index] + value if index in a else value for index, value in b.items()}}
