"""An engine on both sides: ``longshore.initialize``, and what docs/engine.md says that its weights are."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longshore
from fuzz.plain import twin


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
    config = longshore.Config(
        stage=stage,
        offload_device="cpu",
        reduce_bucket_numel=bucket,
        allgather_bucket_numel=bucket,
        gradient_clipping=clip,
        gradient_accumulation_steps=accumulation,
        optimizer={"type": kind, **options},
    )
    if "simulated" in settings:
        settings["transfer"] = longshore.SimulatedTransfer(settings.pop("simulated"), max_delay_s=1e-4)
    return longshore.initialize(
        model=model,
        model_parameters=params,
        config=config,
        offload=longshore.Offload(**{"threads": 1, **settings}),
        lr_scheduler=scheduler,
        wrap_policy=1 << 30 if stage == 3 else None,  # one unit: each rank may use another head
    ).engine


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class PlainEngine:
    """A loop over several ranks: stages 0 and 1 take the mean of the ranks' sums over backwards, 2 and 3 the sum over
    backwards of the ranks' means. Gradients are added in float32."""

    def __init__(self, stage: int, model: nn.Module, kind: str, params: Any, options: dict[str, Any]) -> None:
        self._each_backward = stage >= 2 and len(gathered(None)) > 1
        self._model = model
        self._clip = options.pop("clip", None)
        self._accumulation = options.pop("accumulation", 1)
        scheduled = options.pop("schedule", False)
        self.optimizer = twin(kind)(params, **options)
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
        self._watch()
        steps = self._accumulation if scale_wrt_gas else 1
        (loss / steps if steps > 1 else loss).backward(retain_graph=retain_graph)
        self._backwards += 1
        if not self._synchronize:
            self._waiting.append(self._found)
        elif self._each_backward:
            self._rounds += [each for each in (self._waiting, [self._found]) if each]
            self._waiting = []
        else:
            self._waiting.append(self._found)
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
        members = {p for group in self.optimizer.param_groups for p in group["params"]}
        found = {parameters[index]: value for index, value in gradients.items() if parameters[index] in members}
        self.optimizer.step_on(found, self._clip)
        self._begin()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()


def _added(a: dict[int, Tensor], b: dict[int, Tensor]) -> dict[int, Tensor]:
    return {**a, **{index: a[index] + value if index in a else value for index, value in b.items()}}
