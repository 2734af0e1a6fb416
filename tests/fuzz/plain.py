"""Plain PyTorch's side: torch's own optimizers, made to round as on the vector units everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from support import PlainLion
from torch import Tensor

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
_SINGLE = frozenset({"step", "eta", "mu", "mu_product"})
"""States that are one number, of a parameter of any shape."""


class Twin:
    """One of torch's optimizers, whose parameters may have any dtype and size: a base of :func:`twin`'s classes.

    A low-precision parameter has a float32 ``master`` among its states, which is stepped and rounded; what somebody
    else wrote into the parameter becomes the master. Tensors are padded for the step, since torch rounds differently
    in the last ``numel % 16`` elements.

    Args:
        released: gradients of several backwards are added in float32, and a step ends the window, as with
            ``release_gradients=True``.
    """

    kind: ClassVar[type[torch.optim.Optimizer]]
    param_groups: list[dict[str, Any]]
    state: Any

    def __init__(self, params: Any, released: bool = False, **options: Any) -> None:
        self._released = released
        self._hooked: set[Tensor] = set()
        self._watched: set[Tensor] = set()
        """Parameters that have hooks; one that comes into another group has them already."""
        self._sums: dict[Tensor, Tensor] = {}
        """Float32 sums of a window's gradients, of parameters whose ``.grad`` is in low precision."""
        self._marks: dict[Tensor, Tensor] = {}
        """What ``.grad`` is while it stands for the sum."""
        self._lifted: set[Tensor] = set()
        """Parameters whose mark is out of ``.grad``, while autograd accumulates."""
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._taken: set[Tensor] | None = None
        """Parameters that were in the groups at the window's first gradient; the sums are theirs only."""
        self._scale, self._measured = 1.0, {}
        super().__init__(params, **how_of(self.kind), **options)
        self._step_supports_amp_scaling = False
        for state in self.state.values():  # Adagrad's, which is rounded to the parameter's dtype
            state["sum"] = torch.full(state["sum"].shape, options.get("initial_accumulator_value", 0.0))
        self._watch()

    def __reduce__(self) -> Any:
        return _copy, (type(self).__name__, self._released, self.__getstate__())  # pyright: ignore

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # pyright: ignore
        for parameter in self.param_groups[-1]["params"]:
            if self._released and parameter.dtype != torch.float32 and parameter not in self._watched:
                self._hooked.add(parameter)
        if hasattr(self, "_step_supports_amp_scaling"):  # the constructor is done
            self._watch()

    def _watch(self) -> None:
        """Sum the gradients of new low-precision parameters in float32; frozen ones have to wait for the next step."""
        for parameter in [each for each in self._hooked if each.requires_grad]:
            self._hooked.discard(parameter)
            self._watched.add(parameter)
            # torch.autograd.grad calls the hooks of a tensor, and not those of the node that accumulates.
            with torch.enable_grad():
                node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # pyright: ignore
            self._nodes.append(node)
            self._handles.append(node.register_prehook(functools.partial(self._before, parameter)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._after))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _takes(self, parameter: Tensor) -> bool:
        if self._taken is None:
            self._taken = {each for group in self.param_groups for each in group["params"]}
        return parameter in self._taken

    def _before(self, parameter: Tensor, _: Tensor) -> None:
        if not self._takes(parameter):
            return
        if parameter.grad is not None and parameter.grad is self._marks.get(parameter):
            parameter.grad = None
            self._lifted.add(parameter)
        elif parameter not in self._lifted:
            self._marks.pop(parameter, None)

    def _after(self, parameter: Tensor) -> None:
        if not self._takes(parameter):
            return
        assert parameter.grad is not None
        new = parameter.grad.float()
        mark = self._marks.get(parameter)
        if mark is None:
            self._marks[parameter], self._sums[parameter] = parameter.grad, new.clone()
        else:
            self._sums[parameter] += new
            parameter.grad = mark
        self._lifted.discard(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)  # pyright: ignore
        self._forget()

    def _forget(self) -> None:
        self._marks.clear()
        self._lifted.clear()
        self._scale, self._measured, self._taken = 1.0, {}, None

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        return self._sums[parameter] if gradient is self._marks.get(parameter) else gradient.float()

    def _members(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _check_measured(self) -> None:
        """Drop the coefficient if nothing that it was measured on is left."""
        if not any(self._measured.get(p) is p.grad for p in self._members()):
            self._scale, self._measured = 1.0, {}

    def clip(self, max_norm: float) -> Tensor:
        """As ``longshore``'s ``clip_grad_norm_``: ``.grad`` keeps its values, and the step multiplies."""
        self._check_measured()
        self._watch()
        squares = [self._gradient(p).double().pow(2).sum() for p in self._members()]  # pyright: ignore
        norm = torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum().sqrt().float()
        self._scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._measured = {p: p.grad for p in self._members()}
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_measured()
        members = self._members()
        if self.kind in FUSED and self.kind is not torch.optim.SGD and all(map(self._is_plain, members)):
            self._step_all(members)
        else:
            # torch's fused SGD takes parameters to be all at their first step, or none.
            for group in self.param_groups:
                for parameter in group["params"]:
                    if (gradient := self._gradient(parameter)) is not None:
                        self._step_one(group, parameter, gradient * torch.tensor(self._scale))
        self._watch()
        self._forget()
        if self._released:
            for parameter in members:
                parameter.grad = None
        return loss

    def step_on(self, gradients: dict[Tensor, Tensor], max_norm: float | None) -> None:
        """A step on these float32 gradients, clipped."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.to(parameter.dtype)
            self._marks[parameter], self._sums[parameter] = parameter.grad, gradient
        if max_norm is not None:
            self.clip(max_norm)
        self.step()
        for parameter in gradients:
            parameter.grad = None

    def _step_all(self, members: list[Tensor]) -> None:
        """The step of torch itself."""
        real = self.kind([torch.zeros(1)], **how_of(self.kind))  # pyright: ignore
        real.param_groups, real.state, real.defaults = self.param_groups, self.state, self.defaults
        found = [p.grad for p in members]
        for parameter in members:
            if self._scale != 1.0:
                parameter.grad = parameter.grad * torch.tensor(self._scale)  # pyright: ignore
        try:
            real.step()
        finally:
            for parameter, gradient in zip(members, found, strict=True):
                parameter.grad = gradient
        torch.autograd.graph.increment_version(members)  # as torch's other implementations do

    def _kind_of(self, group: dict[str, Any]) -> type[torch.optim.Optimizer]:
        """Whose step the parameters of a group have."""
        return self.kind

    def _is_plain(self, parameter: Tensor) -> bool:
        """Whether torch's fused kernel steps this parameter as it does elsewhere: it takes memory for contiguous."""
        arrays = [each for name, each in self.state.get(parameter, {}).items() if name not in _SINGLE]
        contiguous = all(each.is_contiguous() for each in (parameter, parameter.grad, *arrays))
        return parameter.dtype == torch.float32 and contiguous and parameter.numel() % 16 == 0

    def _step_one(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state, low = self.state[parameter], parameter.dtype != torch.float32
        flat, kind = _padded(self._master(parameter)), self._kind_of(group)
        inner = kind([flat], **how_of(kind))  # pyright: ignore
        inner.param_groups[0].update({name: group[name] for name in inner.defaults if name in group})
        inner.param_groups[0].update(how_of(kind))
        for fresh in inner.state.values():  # Adagrad's, also of a parameter that a group brought later
            fresh["sum"].fill_(self.defaults["initial_accumulator_value"])  # pyright: ignore
        given = {
            name: _padded(value) if isinstance(value, Tensor) and name not in _SINGLE else value
            for name, value in state.items()
            if name != "master"
        }
        if given:
            inner.state[flat].update(given)
        flat.grad = _padded(gradient)
        inner.step()
        for name, value in inner.state[flat].items():
            if isinstance(value, int):
                value = torch.tensor(float(value))
            elif isinstance(value, Tensor) and name not in _SINGLE:
                value = value[: parameter.numel()].view(parameter.shape)
            if isinstance(state.get(name), Tensor) and isinstance(value, Tensor):
                state[name].copy_(value)
            else:
                state[name] = value
        master = flat[: parameter.numel()].view(parameter.shape)
        if low and "master" in state:
            state["master"].copy_(master)
        elif low:
            state["master"] = master.clone()
        parameter.copy_(master)

    def _master(self, parameter: Tensor) -> Tensor:
        """The float32 values from which the next step goes on."""
        state, values = self.state[parameter], parameter.detach().float()
        if parameter.dtype == torch.float32 or "master" not in state:
            return values
        kept = state["master"]
        # Bits: over -0.0, to which a small master rounds, 0.0 was written.
        same = kept.to(parameter.dtype).view(torch.int16) == parameter.detach().view(torch.int16)
        return torch.where(same, kept, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without that of parameters out of the groups, with which torch has no ``state_dict()``."""
        members = {p for group in self.param_groups for p in group["params"]}
        others = {p: self.state.pop(p) for p in list(self.state) if isinstance(p, Tensor) and p not in members}
        found = super().state_dict()  # pyright: ignore
        self.state.update(others)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # pyright: ignore
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and parameter.dtype != torch.float32:  # torch casts it
                        self.state[parameter][name] = value.float().clone()


def how_of(kind: type[torch.optim.Optimizer]) -> dict[str, bool]:
    if kind in FUSED:
        return {"fused": True}
    return {"foreach": False} if kind.__module__.startswith("torch.") else {}


def _padded(values: Tensor) -> Tensor:
    flat = torch.zeros(max(64, -(-values.numel() // 64) * 64), dtype=torch.float32)
    flat[: values.numel()] = values.detach().reshape(-1)
    return flat


def kind_of(name: str) -> type[torch.optim.Optimizer]:
    return PlainLion if name == "Lion" else getattr(torch.optim, name)


@functools.cache
def twin(name: str) -> type[Any]:
    """The plain twin of ``longshore``'s optimizer of this name, or of one of torch's that longshore runs in tiles."""
    if name == "Muon":
        from fuzz.mixed_muon import MixedMuon, MuonTwin  # of torch 2.9 and newer

        return type(name, (MuonTwin, MixedMuon), {"kind": MixedMuon, "step": Twin.step})
    kind = kind_of(name)
    return type(name, (Twin, kind), {"kind": kind, "step": Twin.step})


def _copy(name: str, released: bool, state: dict[str, Any]) -> Any:
    """A twin with the parameters of a copied state."""
    made = twin(name)([torch.zeros(1, 1)], released)
    made.param_groups.clear()
    made.__setstate__({**state, "param_groups": []})
    for group in state["param_groups"]:
        made.add_param_group(group)
    return made
