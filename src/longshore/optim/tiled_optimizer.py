"""Base classes of longshore's optimizers: torch's interface to a core, and the one of those that have kernels."""

from __future__ import annotations

import difflib
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from longshore.errors import LongshoreError
from longshore.kernels import Scale, block_sums_on, total_of_blocks
from longshore.layout.formats import StateFormat
from longshore.optim.core import OptimizerCore
from longshore.optim.dtensor import over_ranks, present
from longshore.optim.family import RuleFamily
from longshore.optim.members import Members
from longshore.optim.offload import Offload
from longshore.optim.other_optimizers import (
    check_group_words,
    check_not_replaced,
    check_words,
    parameters_of,
    without_words,
)
from longshore.optim.parameters import group_members, names_of
from longshore.optim.state import Loading, checked_state, merged_group, write_state
from longshore.optim.user_state import StateMap
from longshore.ranks import on_made
from longshore.store import Store
from longshore.tiles import Ended, SpeculationRecord, Window

if TYPE_CHECKING:
    from typing_extensions import Self

OPTIMIZERS: dict[str, type[RuleOptimizer]] = {}
"""Every :class:`RuleOptimizer` that was defined, by the name of its class."""


def _remove_hooks(reference: weakref.ref[Members]) -> None:
    members = reference()
    if members is not None and members._source is not None:
        members._source.remove_hooks()


class TiledOptimizer(torch.optim.Optimizer):
    """Base class of all longshore optimizers, with everything but the signature and the rule (its ``family``)."""

    @_disable_dynamo
    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        family: RuleFamily,
        release_gradients: bool,
        offload: Offload | None,
    ) -> None:
        offload = offload or Offload()
        if not isinstance(offload, Offload):
            raise TypeError(f"offload is a longshore.Offload, not {type(offload).__name__}")
        # The base class calls add_param_group, which needs the core.
        self._make_core(family, offload, bool(release_gradients))
        family.check_group(defaults)
        super().__init__(params, defaults)
        self._core.members.end_building()
        for each in on_made:
            each()

    def _make_core(self, family: RuleFamily, offload: Offload, release_gradients: bool) -> None:
        me = weakref.proxy(self)  # it is alive whenever its core is used
        members = Members(lambda: me.param_groups, family, offload, release_gradients, Window())
        self._core = OptimizerCore(members)
        self._named_by_us = False  # an engine sets this; torch checks what users name
        self._loading: Loading | None = None
        # A state that somebody keeps has the members; the parameters are free of hooks nevertheless. They are not kept
        # here: after a step that failed half way they have the error, with frames that have this optimizer.
        weakref.finalize(self, _remove_hooks, weakref.ref(members)).atexit = False

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: an option or a parameter, which the message names, is not supported; the optimizer is unchanged.
        """
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), (Tensor, set)):
            unnamed = self._named_by_us and "param_names" not in param_group
            param_group["params"] = group_members(self.param_groups if unnamed else [], param_group["params"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["params"] = list(map(present, group["params"]))  # scripts may have those that shards replaced
        try:
            self._core.members.family.check_group(group)
            self._core.members.register(group, len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._core.members.user_state.place(self._core.members)

    # -- the step -------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient, and publish the new values.

        A parameter without a gradient keeps its weight, states and step count. With ``release_gradients=True`` the
        window ends.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            GradientError: a gradient, which the message names, cannot be counted; nothing was stepped.
            ParameterError: a parameter was moved or converted (with ``detect_writes=False`` and ``LONGSHORE_DEBUG=1``
                also: written where torch cannot see it); nothing was stepped.
            BrokenStateError: this or an earlier step failed half way.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._core.step()
        return loss

    # -- gradients ------------------------------------------------------------

    def expect_backwards(self, backwards: int) -> None:
        """Announce how many backwards this window will have; by default as many as the last window had are expected.
        This affects only speed.

        Raises:
            ValueError: ``backwards`` is not an integer of at least 1.
        """
        if isinstance(backwards, bool) or not isinstance(backwards, int) or backwards < 1:
            raise ValueError(f"expect_backwards takes a number of backwards, at least 1, not {backwards!r}")
        self._core.members.store.expect_backwards(backwards)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this window, on the host too.

        Raises:
            ValueError: ``set_to_none=False`` with ``release_gradients=True``: there is no ``.grad`` to fill with zeros.
        """
        if set_to_none:
            with torch.autograd.profiler.record_function(self._zero_grad_profile_name):  # as torch's
                self._core.zero_grad()
        elif self._core.members.release_gradients:
            raise ValueError(
                "zero_grad(set_to_none=False) fills .grad with zeros, and release_gradients=True keeps none on "
                "the device; use zero_grad()"
            )
        else:
            super().zero_grad(set_to_none=False)
            self._core.window.end(Ended.DISCARDED)

    @_disable_dynamo
    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of this window: float32, 0-dim, on the CPU.

        Squares are added in float64 and the root is rounded once.
        """
        members, gradients = self._core.members, self._core.window_gradients()
        scale = self._core.window.scale(members.source.fingerprint)
        shards = {record.index: record.parameter for record in members.records if record.keeps_shard}
        return _gradient_norm(members.store, gradients, scale, shards)

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the global 2-norm to ``max_norm`` in the next ``step()``, and return the norm before.

        The coefficient is torch's, ``max_norm / (norm + 1e-6)`` and at most 1. Gradients are multiplied by it inside
        the step, so ``.grad`` keeps its values. Call it once a window, after the last backward.

        Raises:
            ValueError: ``norm_type`` is not 2, or ``max_norm`` is not positive.
            TypeError: ``max_norm`` is no number.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
            LongshoreError: the window is clipped already.
        """
        _check_clipping(max_norm, norm_type)
        norm = self.grad_norm()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; set error_if_nonfinite=False to clip with it anyway"
            )
        self._core.window.clip(norm, float(max_norm), self._core.members.source.fingerprint())
        return norm

    def set_loss_scale(self, loss_scale: float, *, is_dynamic: bool = False, overflowed: bool = False) -> None:
        """Set the factor by which losses are multiplied from the next backward on; the step divides gradients by it.

        Args:
            loss_scale: the factor.
            is_dynamic, overflowed: values of :attr:`dynamic_loss_scale` and :attr:`overflow` from now on.

        Raises:
            ValueError: it is not positive and finite.
        """
        if not 0.0 < loss_scale < math.inf:
            raise ValueError(f"a loss scale is positive and finite, not {loss_scale}")
        window = self._core.window
        window.loss_scale, window.is_dynamic, window.overflowed = float(loss_scale), is_dynamic, overflowed

    @property
    def loss_scale(self) -> float:
        """Factor by which losses are multiplied; 1.0 without loss scaling."""
        return self._core.window.loss_scale

    cur_scale = loss_scale  # other engines' optimizers have both names

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether an engine changes the loss scale after overflows."""
        return self._core.window.is_dynamic

    @property
    def overflow(self) -> bool:
        """Whether the engine skipped its last step because of gradients that were not finite."""
        return self._core.window.overflowed

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks this before it skips its own check for infinities; without gradients it would do so silently.
        if self._core.members.release_gradients:
            raise ValueError(
                "torch.amp.GradScaler cannot see gradients that release_gradients=True moved to the host; "
                "use release_gradients=False with a GradScaler"
            )
        return False

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Options of groups that do not say them."""
        check_not_replaced(type(self))
        return vars(self)["defaults"]

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["defaults"] = value

    # -- state ----------------------------------------------------------------

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Mapping from parameters to their states, named as in torch (and ``master``), looked up at each access."""
        members = self._core.members
        if not members.empty:
            _ = members.source  # takes up parameters that replaced all former ones
        return StateMap(members)

    @state.setter
    def state(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        if self._core.members._source is None:  # the base class sets this before it has parameters
            return
        state = self.state
        state.clear()
        for parameter, entries in value.items():
            state[parameter] = entries

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does: its tensors are those of :attr:`state`, float32 on the CPU. The state of
        parameters that are out of the groups is left out, where torch's ends with a KeyError."""
        members = self._core.members
        members.user_state.write_back(members)
        with members.user_state.saving(None if members.empty else members.indices()):
            found = super().state_dict()
        found["state"] = {key: dict(each) if isinstance(each, dict) else each for key, each in found["state"].items()}
        return found

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of its twin in ``torch.optim``.

        States and masters stay in float32 whatever the parameter's dtype. If the state has no master, the parameter
        becomes the master. Loading also ends a broken state. Ctrl-C is taken when the whole state is loaded.

        Raises:
            ValueError: the state does not fit, as the message says; nothing was changed.
        """
        # The base class would cast every tensor to the parameter's dtype, so it gets the groups only, from a hook that
        # runs after all of the user's.
        self._loading = Loading(self._core.members)
        handle = self.register_load_state_dict_pre_hook(self._loading.take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_core" not in vars(self):  # a copy, or unpickled
            self._restore(state)
            return
        if self._loading is None:
            raise TypeError("a longshore optimizer takes a state with load_state_dict()")
        with self._loading.writing():
            self.param_groups = [
                merged_group(group, mine, self.defaults, self._core.members.family)
                for group, mine in zip(state["param_groups"], self.param_groups, strict=True)
            ]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ``copy.deepcopy`` and ``pickle``: all but gradients and hooks, as with torch's.

        Raises:
            TypeError: the optimizer is an engine's.
            LongshoreError: the gradients of this window were clipped and not stepped yet.
            BrokenStateError: a step failed half way.
        """
        members, window = self._core.members, self._core.window
        if not members.offload.alone:
            raise TypeError(
                "the optimizer of an engine cannot be copied or pickled: its state is spread over ranks, which have to "
                "act together. Use engine.save_checkpoint(), or copy its state_dict()"
            )
        if members._source is not None:
            members.store.states.check_usable()
            if window.scale(members.source.fingerprint) != window.unclipped:
                raise LongshoreError(
                    "optimizer.clip_grad_norm_() has clipped the gradients of this window, which are not copied: copy "
                    "or pickle the optimizer after step() or zero_grad()"
                )
        return {
            "defaults": self.defaults,
            "state": {key: dict(each) if isinstance(key, Tensor) else each for key, each in self.state.items()},
            "param_groups": self.param_groups,
            "names": names_of(self.param_groups, members.by_id),
            "family": members.family,
            "offload": members.offload,
            "release_gradients": members.release_gradients,
            "loss_scale": window.loss_scale,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._make_core(state["family"], state["offload"], state["release_gradients"])
        members = self._core.members
        super().__setstate__({"defaults": state["defaults"], "param_groups": state["param_groups"]})
        for place, group in enumerate(self.param_groups):
            members.register(group, place)
        for parameter, name in state.get("names", ()):  # a parameter keeps its name when it is moved
            members.by_id[id(parameter)].rename(name, members.offload)
        members.end_building()
        self._core.window.loss_scale = state["loss_scale"]
        for key, entries in state["state"].items():
            if record := members.by_id.get(id(key)):
                write_state(record, members, checked_state(record, entries))
            else:  # a key of the user's, or a parameter that was taken out of its group
                self.state[key] = entries
        members.user_state.touched = {id(key): True for key in state["state"] if id(key) in members.by_id}

    def __copy__(self) -> TiledOptimizer:
        raise TypeError("copy.copy would give two optimizers one state, which only one would step: use copy.deepcopy")

    # -- masters and memory ---------------------------------------------------

    @_disable_dynamo
    @torch.no_grad()
    def refresh_master(self) -> None:
        """Adopt now the writes to parameters, as the next step would: every element that differs from its rounded
        master becomes the master.

        With ``Offload(detect_writes=False)`` this is needed after writes that torch cannot see (``p.data.copy_``, NumPy
        views, custom kernels), before the next step.
        """
        members = self._core.members
        members.user_state.write_back(members)
        for record in members.records:
            if record.has_master:
                record.check()
                members.store.states.adopt(record.index, record.values(), keep_matching=True)
                record.mark_published()
        members.user_state.follow(members, members.parameters)

    @property
    def speculation(self) -> SpeculationRecord | None:
        """Record of steps ahead in the last window; None without ``speculation_memory`` or ``release_gradients``."""
        return self._core.members.store.tiles.tier.speculator.record

    def host_bytes(self) -> dict[str, int]:
        """Return counted host memory by kind, in bytes: ``state`` (masters and states), ``gradients``, ``accumulators``
        (of windows with several backwards), ``spares`` (for steps ahead), and ``staging`` (through which gradients and
        new parameters pass in the default mode)."""
        return self._core.members.store.tiles.host_bytes()

    def close(self) -> None:
        """Wait for work under way, remove the hooks, and end the threads."""
        self._core.members.close()


def core_of(optimizer: TiledOptimizer) -> OptimizerCore:
    """Return the core of an optimizer, for engines, checkpoints and traces."""
    return optimizer._core


def _block_sums_on_device(gradients: Mapping[int, Tensor], scale: Scale) -> dict[int, list[float]]:
    """Return sums of squares of the blocks of gradients, all on one device, by parameter. The host waits once."""
    if not gradients:
        return {}
    device = next(iter(gradients.values())).device
    sums = block_sums_on(device)([[gradient.contiguous()] for gradient in gradients.values()], scale)
    return dict(zip(gradients, sums, strict=True))


def _gradient_norm(
    store: Store, gradients: Mapping[int, Tensor | None], scale: Scale, shards: Mapping[int, Tensor]
) -> Tensor:
    """Return the 2-norm over all gradients; squares are added in float64, and the root is rounded to float32 once.

    Gradients are measured where they are: on the host, or on a device, so that they are not copied twice. ``shards``
    has the parameters whose other shards are on other ranks; if there are any, all ranks have to call this function.
    """
    on_device = {
        parameter: gradient
        for parameter, gradient in gradients.items()
        if gradient is not None and gradient.device.type != "cpu" and store.tiles.streams.staged
    }
    blocks = _block_sums_on_device(on_device, scale)
    others = {parameter: gradient for parameter, gradient in gradients.items() if parameter not in on_device}
    total = total_of_blocks(sums for parameter, sums in blocks.items() if parameter not in shards)
    total += store.sum_of_squares({each: gradient for each, gradient in others.items() if each not in shards}, scale)
    elsewhere = {each: total_of_blocks([sums]) for each, sums in blocks.items() if each in shards}
    elsewhere.update((each, store.sum_of_squares({each: others[each]}, scale)) for each in others if each in shards)
    total += over_ranks(shards, elsewhere) if elsewhere else 0.0
    return torch.tensor(math.sqrt(total) if total >= 0 else total, dtype=torch.float32, device="cpu")


def _check_clipping(max_norm: Any, norm_type: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` for arguments of ``clip_grad_norm_`` that it does not take."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float, Tensor)):
        raise TypeError(
            "clip_grad_norm_ takes max_norm, a number, and knows its own parameters; it got a "
            f"{type(max_norm).__name__} (torch's function is clip_grad_norm_(parameters, max_norm))"
        )
    if norm_type != 2.0:
        raise ValueError(f"clip_grad_norm_ clips the 2-norm, not norm_type={norm_type}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, and is {max_norm}")


class RuleOptimizer(TiledOptimizer):
    """Base class of the optimizers that have kernels, one for each name that a configuration may give.

    The constructor of a subclass has the signature of torch's, and passes ``locals()`` on: its signature is the only
    table of options and defaults, so no option can be accepted and then forgotten.
    """

    rules: ClassVar[type[RuleFamily]]
    twin: ClassVar[type[torch.optim.Optimizer] | None] = None
    """The class in ``torch.optim`` that has the same groups and states."""
    file_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of options that a configuration file leaves out, where they differ from the signature's."""
    suggested: ClassVar[Mapping[str, Any]] = {"lr": 1e-4}
    """Options that the planner writes into a configuration file, for the user to change."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if RuleOptimizer in cls.__bases__:  # not for subclasses of our own optimizers
            OPTIMIZERS[cls.__name__] = cls
            cls.__init__ = without_words(cls, cls.__init__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_words(cls, parameters_of(cls), args, kwargs)
        return super().__new__(cls)

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Build the optimizer from ``locals()`` of the subclass's constructor, taken first."""
        options = self.rules.group_options(arguments)
        family = self.rules(**{name: options[name] for name in self.rules.initial_states.values()})
        super().__init__(arguments["params"], options, family, arguments["release_gradients"], arguments["offload"])
        states = self._core.members.offload.state_format
        if states is not StateFormat.FP32 and not any(map(family.states_of, self.param_groups)):
            warnings.warn(
                f"{type(self).__name__} has no states with these options, so that states={states.value!r} changes "
                "nothing until a group has some (of SGD: a momentum)",
                stacklevel=4,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_group_words(type(self), param_group)
        super().add_param_group(param_group)
        known = {*self.defaults, *self.rules.options, *self.rules.absent, "params", "param_names", "initial_lr"}
        for name in self.param_groups[-1].keys() - known:
            alike = [each for each in known if abs(len(each) - len(str(name))) <= 1]  # no max_momentum of a schedule
            if close := difflib.get_close_matches(str(name), alike, 1, 0.75):
                warnings.warn(f"a group has {name!r}, which is no option; {close[0]!r} is one", stacklevel=4)
        self.rules.complete(self.param_groups, self.defaults)

    @classmethod
    def defaults_by_name(cls) -> dict[str, Any]:
        """Return the options of a group that a configuration may give, with their defaults in the signature."""
        parameters, fixed = parameters_of(cls), cls.rules.initial_states.values()
        return {name: parameters[name].default for name in cls.rules.options if name not in fixed}
