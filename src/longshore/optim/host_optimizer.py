"""The ``torch.optim.Optimizer`` that all of ours are: groups and ``.grad`` in front, a store behind."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.host import ParameterStep, ParameterStore, Ranges, SpeculationRecord, annotating
from longshore.kernels import HostRule
from longshore.optim.clipping import Clipping, gradient_norm
from longshore.optim.family import History, RuleFamily, planned, records_of
from longshore.optim.forecast import OptimizerForecast, checked_backwards
from longshore.optim.gradients import GradientSource, KeptGradients, ReleasedGradients
from longshore.optim.has_state import HasState
from longshore.optim.ledger import Entry, balance
from longshore.optim.masters import adopt_masters, publish, refresh_masters
from longshore.optim.offload import Offload, Placement
from longshore.optim.parameters import ParameterRecord, check_no_shared_memory, check_parameter, group_members
from longshore.optim.state import begin_states, name_states


class HostOptimizer(HasState):
    """Everything but the signature and the rule, which is its ``family``'s business. Not for direct use."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        family: RuleFamily,
        release_gradients: bool,
        offload: Placement | None,
    ) -> None:
        offload = offload or Offload()
        if not isinstance(offload, Placement):
            raise TypeError(f"offload is a longshore.Offload, not {type(offload).__name__}")
        # Fixed. The base class calls add_param_group, which needs these.
        self._family = family
        self._offload = offload
        self._release_gradients = bool(release_gradients)
        # Grow with parameter groups.
        self._device: torch.device | None = None
        self._store: ParameterStore | None = None
        self._source: GradientSource | None = None
        self._records: dict[int, ParameterRecord] = {}
        """By ``id(parameter)``; each record keeps its parameter alive."""
        self._parameters: dict[int, Tensor] = {}
        """By the index of the record."""
        self._begun = False
        """Whether a step was applied."""
        # Change with each window.
        self._clipping = Clipping()
        self.ledger: Mapping[int, Entry] = {}  # of the last window's gradients
        self._loading: dict[int, dict[str, Any]] | None = None
        self.when_discarded: Callable[[], None] = lambda: None
        family.check_group(defaults)
        # The base class adds the groups one by one; a tile may hold several, so they are laid out together.
        self._waiting: list[ParameterRecord] | None = []
        super().__init__(params, defaults)
        waiting, self._waiting = self._waiting, None
        if not waiting:
            raise ValueError("optimizer got parameter groups without a single parameter")
        check_no_shared_memory(waiting)
        self._lay_out(waiting)

    # -- parameters -----------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: an option or a parameter that cannot be honoured, by name; the optimizer is then as it was.
        """
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), (Tensor, set)):
            param_group["params"] = group_members(self.param_groups, param_group["params"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._family.check_group(group)
            self._register(group, len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise

    def _register(self, group: dict[str, Any], place: int) -> None:
        names = group.get("param_names")
        records = []
        device = self._device
        for position, parameter in enumerate(group["params"]):
            name = names[position] if names else f"{place}.{position}"
            check_parameter(parameter, name, device, self._offload.takes_shards)
            device = parameter.device
            records.append(ParameterRecord(len(self._records) + position, name, parameter, self._offload))
        if self._waiting is None:
            check_no_shared_memory([*self._records.values(), *records])
            self._lay_out(records)
        else:
            self._waiting.extend(records)
        self._records.update((id(record.parameter), record) for record in records)
        self._device = device

    def _lay_out(self, records: list[ParameterRecord]) -> None:
        if not records:
            return
        self._parameters.update((record.index, record.parameter) for record in records)
        if self._store is None or self._source is None:
            self._store = self._offload.make_store(records[0].device, self._release_gradients, self._parameters)
            self._source = (ReleasedGradients if self._release_gradients else KeptGradients)(self._store)
            if annotating():
                self._store.add_recorder(Ranges())
            self._store.foresee(OptimizerForecast(self._clipping, self._planned_rules))
        name_states(self._store, self._family, self.param_groups)
        self._source.register(records)

    def _parts(self) -> tuple[ParameterStore, GradientSource]:
        if not self._begun and self._replaced():
            self._lay_out_anew()
        if self._store is None or self._source is None:
            raise ValueError("the optimizer has no parameters")
        return self._store, self._source

    def _replaced(self) -> bool:
        """Whether others were put in the place of all parameters before anything was stepped."""
        found = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return (
            bool(found)
            and found.isdisjoint(self._records)
            and not any(record.has_state for record in self._records.values())
        )

    def _lay_out_anew(self) -> None:
        """Accelerate makes the optimizer first, then puts the model on FSDP2, and its shards into the groups."""
        former = self._store, self._source, self._device, self._records, self._parameters
        self._store, self._source, self._device, self._records, self._parameters = None, None, None, {}, {}
        self._waiting = []
        try:
            for place, group in enumerate(self.param_groups):
                self._register(group, place)
            waiting, self._waiting = self._waiting, None
            check_no_shared_memory(waiting)
            self._lay_out(waiting)
            for recorder in former[0].recorders if former[0] is not None else ():
                if self._store is not None and not (annotating() and isinstance(recorder, Ranges)):
                    self._store.add_recorder(recorder)
        except BaseException:
            self._store, self._source, self._device, self._records, self._parameters = former
            raise
        finally:
            self._waiting = None
        _close(former[:2])

    # -- the step -------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient, and publish the new values.

        A parameter without one keeps weight, states and step count. With ``release_gradients=True`` the window ends.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            GradientError: a gradient that cannot be counted, by name; nothing was stepped.
            ParameterError: one that was moved, converted or, by ``LONGSHORE_DEBUG=1``, written unseen; likewise.
            BrokenStateError: this or an earlier step failed half way.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        store, source = self._parts()
        store.check_usable()
        gradients = store.agree(self._collect)
        records = {record.index: record for record in self._records.values()}
        with store.preparing():
            scale = self._clipping.scale_for(source.fingerprint)
            name_states(store, self._family, self.param_groups)
            steps, histories = self._steps_of(gradients)
            entries = balance(records.values(), source.produced, steps, store)
            adopt_masters(store, records.values(), steps)
            begin_states(store, self._family, [records[index] for index in steps])

        def published() -> None:
            for index, step in steps.items():
                publish(records[index], step, histories[index])
            source.consumed()
            self._clipping.reset()
            self._begun = True

        store.commit(steps, scale, published)
        self.ledger = entries
        return loss

    def _collect(self) -> dict[int, Tensor | None]:
        """The gradients that this process found, after every check that could end the step."""
        for group in self.param_groups:
            self._family.check_group(group)
            records_of(group, self._records)
        gradients = self._parts()[1].collect()
        for record in self._records.values():
            if record.parameter.requires_grad or record.index in gradients:
                record.check()
        return gradients

    def _steps_of(self, gradients: Mapping[int, Tensor | None]) -> tuple[dict[int, ParameterStep], dict[int, History]]:
        """What to do with each parameter that has a gradient, and its history afterwards."""
        steps, histories = {}, {}
        for record, rule, history in self._planned(gradients):
            histories[record.index] = history
            steps[record.index] = ParameterStep(rule, record.values(), gradients[record.index])
        return steps, histories

    def _planned_rules(self) -> dict[int, HostRule]:
        return {record.index: rule for record, rule, _ in self._planned(range(len(self._records)))}

    def _planned(self, among: Container[int]) -> Iterator[tuple[ParameterRecord, HostRule, History]]:
        return planned(self.param_groups, self._records, self._family, self._parts()[0].arrays, among)

    # -- gradients ------------------------------------------------------------

    def expect_backwards(self, backwards: int) -> None:
        """The window under way will have so many (``ValueError`` below 1); where nobody says, as many as the last.
        Only time depends on it."""
        self._parts()[0].expect_backwards(checked_backwards(backwards))

    def look_again(self) -> None:
        """For engines: take up parameters that were frozen, or not gathered, until now."""
        self._parts()[1].look_again()

    def begin_backward(self, reduce: bool, last: bool) -> None:
        """For engines: a backward begins, on all ranks; see :meth:`ParameterStore.begin_backward`."""
        self.look_again()
        self._parts()[0].begin_backward(reduce, last)

    @property
    def gradients_arrived(self) -> int:
        """How many gradients hooks took to the host in this window (``release_gradients=True``)."""
        return sum(self._parts()[1].produced.values())

    @torch.no_grad()
    def window_gradients(self) -> dict[int, Tensor | None]:
        """The gradients of this window by the index of their record, agreed by all ranks: flat, on the device, or
        None where the store holds it."""
        return self._parts()[0].agree(self._collect)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this window, on the host too.

        Raises:
            ValueError: ``set_to_none=False`` with ``release_gradients=True``: there is no ``.grad`` to fill with zeros.
        """
        _, source = self._parts()
        if not set_to_none:
            if self._release_gradients:
                raise ValueError(
                    "zero_grad(set_to_none=False) fills .grad with zeros, and release_gradients=True keeps none on "
                    "the device; use zero_grad()"
                )
            super().zero_grad(set_to_none=False)
        else:
            source.zero_grad()
        self._clipping.reset()
        self.when_discarded()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients of this window: float32, 0-dim, on the CPU.

        Squares are added in float64 and the root is rounded once.
        """
        gradients, (store, source) = self.window_gradients(), self._parts()
        scale, shards = self._clipping.scale_for(source.fingerprint), self._offload.shards_among(self._parameters)
        return gradient_norm(store, gradients, scale, shards)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the global 2-norm to ``max_norm`` in the next ``step()``; returns the norm before.

        The coefficient is torch's, ``max_norm / (norm + 1e-6)`` and at most 1. It is multiplied in inside the step, so
        ``.grad`` keeps its values. Call it once a window, after the last backward.

        Raises:
            ValueError: ``norm_type`` is not 2, or ``max_norm`` is not positive.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
            LongshoreError: the window is clipped already.
        """
        if norm_type != 2.0:
            raise ValueError(f"clip_grad_norm_ clips the 2-norm, not norm_type={norm_type}")
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, and is {max_norm}")
        norm = self.grad_norm()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; set error_if_nonfinite=False to clip with it anyway"
            )
        self._clipping.clip(norm, float(max_norm), self._parts()[1].fingerprint())
        return norm

    def set_loss_scale(self, loss_scale: float) -> None:
        """What the losses are multiplied by from the next backward on; gradients are divided by it in the step."""
        self._clipping.set_loss_scale(loss_scale)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks this before it skips its own check for infinities; without gradients it would do so silently.
        if self._release_gradients:
            raise ValueError(
                "torch.amp.GradScaler cannot see gradients that release_gradients=True moved to the host; "
                "use release_gradients=False with a GradScaler"
            )
        return False

    # -- for engines ----------------------------------------------------------

    @property
    def store(self) -> ParameterStore:
        """Where the state is."""
        return self._parts()[0]

    @property
    def records(self) -> list[ParameterRecord]:
        """What is known of each parameter; a record's index is its place."""
        return list(self._records.values())

    @property
    def speculation(self) -> SpeculationRecord | None:
        """What was stepped ahead in the last window; None without ``speculation_memory`` or ``release_gradients``."""
        return self._parts()[0].speculation

    # -- masters and memory ---------------------------------------------------

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Adopt writes that torch cannot see: ``p.data.copy_``, NumPy views, custom kernels.

        Every element that is not the rounded master becomes the master. Other writes (``load_state_dict``,
        initialisers, ``p.data = x``) are found by themselves at the next step.
        """
        refresh_masters(self._parts()[0], self._records.values())

    def host_bytes(self) -> dict[str, int]:
        """Counted host memory by kind, in bytes: ``pages`` (masters and states), ``gradients``, ``accumulators``."""
        return self._parts()[0].host_bytes()

    def close(self) -> None:
        """Wait for what is under way, remove the hooks, and let go of threads and lanes."""
        _close((self._store, self._source))


def _close(parts: tuple[ParameterStore | None, GradientSource | None]) -> None:
    for part in reversed(parts):
        if part is not None:
            part.close()
