"""Plain PyTorch's side where states are not float32: whole parameters, and the oracle's step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from plain_states import STATES, rule_of, to_nearest
from torch import Tensor

from fuzz.plain import Twin, kind_of
from longshore.kernels.buffers import EncodedBuffer, new_buffer
from longshore.kernels.reference import encoded_step
from longshore.layout.formats import NEVER_NEGATIVE, Coding, StateFormat, parse_state_format, stream_of


class EncodedTwin(Twin):
    """A :class:`Twin` whose states are what the codes say: rounded when a step takes them, and by random bits after it.

    Args:
        params: as for torch's optimizers.
        released: as for a :class:`Twin`.
        states: the format, as ``longshore.Offload`` has it.
        states_seed: likewise.
        names: of the parameters of an engine's model.
        **options: of the optimizer.
    """

    def __init__(
        self,
        params: Any,
        released: bool = False,
        states: str = "bf16",
        states_seed: int = 0,
        names: Mapping[Tensor, str] | None = None,
        **options: Any,
    ) -> None:
        self._how = {"states": states, "states_seed": states_seed}
        self._given_names, self._names = names or {}, {}
        super().__init__(params, released, **options)
        for state in self.state.values():  # Adagrad's
            state["sum"] = to_nearest(state["sum"], states, "sum")

    def __reduce__(self) -> Any:
        names = [self._names[each] for group in self.param_groups for each in group["params"]]
        return _copy, (type(self).__name__, self._released, self.__getstate__(), self._how, names)  # pyright: ignore

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        place, group = len(self.param_groups) - 1, self.param_groups[-1]
        names = group.get("param_names")
        for position, parameter in enumerate(group["params"]):
            name = names[position] if names else f"{place}.{position}"
            self._names.setdefault(parameter, self._given_names.get(parameter, name))

    def rounded(self, name: str, value: Tensor) -> Tensor:
        """A state of this name as the codes have it; others as they are."""
        return to_nearest(value, self._how["states"], name) if name in STATES[type(self).__name__] else value

    def _step_all(self, members: list[Tensor]) -> None:
        assert not members, "torch's own step has float32 states"

    def _is_plain(self, parameter: Tensor) -> bool:
        return False

    def _step_one(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        kind, state = type(self).__name__, self.state[parameter]
        format = parse_state_format(self._how["states"]).of_parameter(parameter.shape)
        coding = Coding(format, stream_of(self._how["states_seed"], self._names[parameter]))
        names, everything = STATES[kind], slice(0, parameter.numel())
        buffer = new_buffer(format, 1 + len(names), parameter.numel(), False, torch.zeros)
        assert isinstance(buffer, EncodedBuffer) and format is not StateFormat.FP32
        buffer.master.copy_(self._master(parameter).reshape(-1))
        if kind == "Adagrad" and "sum" not in state:
            state["sum"] = torch.full(parameter.shape, float(self.defaults["initial_accumulator_value"]))  # pyright: ignore
        for number, name in enumerate(names):
            if name in state:
                buffer.encode(number, everything, name in NEVER_NEGATIVE, state[name].reshape(-1))
        step, first = int(state.get("step", 0)) + 1, "momentum_buffer" not in state
        options = {"decoupled_weight_decay": kind == "AdamW", **group}
        buffer, master = encoded_step(buffer, gradient.reshape(-1), rule_of(kind, options, step, first), coding)
        _write(state, "step", torch.tensor(float(step)))
        if group.get("momentum") != 0.0:
            for number, name in enumerate(names):
                decoded = buffer.decoded(number, everything, name in NEVER_NEGATIVE)
                _write(state, name, decoded.view(parameter.shape))
        if parameter.dtype != torch.float32:
            _write(state, "master", master.view(parameter.shape).clone())
        parameter.copy_(master.view(parameter.shape))


def _write(state: dict[str, Any], name: str, value: Tensor) -> None:
    """As torch does, in place: somebody may keep the tensor."""
    if isinstance(state.get(name), Tensor):
        state[name].copy_(value)
    else:
        state[name] = value.clone()


@functools.cache
def encoded_twin(name: str) -> type[Any]:
    """The twin of ``longshore``'s optimizer of this name with ``Offload(states=...)``."""
    kind = kind_of(name)
    return type(name, (EncodedTwin, kind), {"kind": kind, "step": Twin.step})


def _copy(name: str, released: bool, state: dict[str, Any], how: dict[str, Any], names: list[str]) -> Any:
    made = encoded_twin(name)([torch.zeros(1)], released, **how)
    made.param_groups.clear()
    made._names.clear()
    made.__setstate__({**state, "param_groups": []})
    members = [each for group in state["param_groups"] for each in group["params"]]
    made._names.update(zip(members, names, strict=True))
    for group in state["param_groups"]:
        made.add_param_group(group)
    return made
