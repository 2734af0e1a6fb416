"""The engine: forward, backward and step of one model, sharded and offloaded."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from longshore.accelerator import Stopwatch
from longshore.engine.accumulation import Accumulation, BatchSizes, check_loss
from longshore.engine.binding import Binding
from longshore.engine.checkpoints import Checkpoints, Saving
from longshore.engine.config.model import Config
from longshore.engine.explain import Explanation, explain
from longshore.engine.monitoring import StepFigures, reports_of
from longshore.engine.precision import DTYPES, cast, make_loss_scale
from longshore.engine.ranks import Ranks
from longshore.errors import GradientError, LongshoreError, ParameterError
from longshore.interrupts import deferred_interrupts
from longshore.optim.grad_placeholder import refuse_compiled_autograd
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.store import Store
from longshore.tiles import Ended

if TYPE_CHECKING:
    from longshore.streaming import Stream

P = ParamSpec("P")
R = TypeVar("R")

_FIXED = {
    "module": "the optimizer steps the parameters of the model that initialize() was given: wrap or replace the model "
    "before, and compile it with engine.compile()",
    "optimizer": "pass the optimizer to initialize()",
    "config": "settings do not change after initialize()",
    "ranks": "it belongs to the engine",
    "binding": "it belongs to the engine",
    "loss_scaling": "set fp16 in the configuration",
}
"""Parts of the engine that others of its parts have too: a new one would not be seen there."""

_INSTEAD_OF_ASSIGNING = {
    "train_batch_size": "call engine.set_train_batch_size()",
    "gradient_accumulation_steps": "call engine.set_gradient_accumulation_steps()",
    "is_gradient_accumulation_boundary": "call engine.set_gradient_accumulation_boundary()",
}


class MethodOf(Generic[P, R]):
    """A method of a part that refers to its object, as a method of the object.

    Args:
        part: name of the attribute of the object that makes the part.
        method: the function of the part's class.
    """

    def __init__(self, part: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._part = part
        self._method = method

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[P, R]:
        if instance is None:
            return self._method  # pyright: ignore[reportReturnType]  # as functions of a class are
        return types.MethodType(self._method, getattr(instance, self._part))


def weakly(method: Callable[..., None], **kwargs: Any) -> Callable[..., None]:
    """Return a function that calls a method of an object if the object is alive, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(**kwargs)

    return call


class Answer:
    """An attribute that is worked out when it is read. Unlike a property, it lets an object have another value in its
    place: scripts and tests wrap the engine's answers, and tensors of DeepSpeed's files have their own."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        # Of the class it is None: torch asks each attribute of a class that has __get__ for a __set__.
        return None if owner is None else self.read(owner)


class EngineAttributes(nn.Module):
    """Looks up names of the model, and sees every assignment or refuses it.

    Attributes:
        _where_else: the end of the error about a name that neither the engine nor the model has.
        built: whether the engine has all of its own attributes; later assignments are the user's.
    """

    _where_else: ClassVar[str] = "settings are in engine.config"
    built = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}; {self._where_else}"
                ) from None
        return getattr(module, name)  # generate(), save_pretrained(): scripts call the engine as if it were the model

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that only the model has is set there, where its forward reads it.

        Raises:
            AttributeError: the attribute is a part of the engine that stays, or a value is assigned to a method.
        """
        if not self.built:
            super().__setattr__(name, value)
            return
        if name in _FIXED and value is not getattr(self, name):
            instead = _FIXED[name]
            raise AttributeError(f"engine.{name} cannot be assigned; {instead}")
        of_class = inspect.getattr_static(type(self), name, None)
        is_method = callable(of_class) or isinstance(of_class, Answer)
        if is_method and not callable(value):  # a function may wrap the method: those who call it call the function
            instead = _INSTEAD_OF_ASSIGNING.get(name, "set it in the configuration, before initialize()")
            raise AttributeError(f"engine.{name} cannot be assigned, and what it says would stay; {instead}")
        own = name in self.__dict__ or name in self._modules or hasattr(type(self), name)
        on_model = not own and hasattr(self._modules["module"], name)
        place: Any = self._modules["module"] if on_model else super()
        place.__setattr__(name, value)


class Engine(EngineAttributes):
    """A model with its optimizer, as :func:`longshore.engine.setup.make` returns it.

    ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``: with several ranks, every rank makes the same calls
    in the same order. Other attributes are looked up in the model. Assigning one that the model has sets it there;
    parts of the engine and values of its configuration cannot be assigned.
    """

    def __init__(
        self, module: nn.Module, optimizer: TiledOptimizer, config: Config, ranks: Ranks, binding: Binding
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.config = config
        self.ranks = ranks
        self.loss_scaling = make_loss_scale(config.loss_scaling)
        self.binding = binding
        # Set by make().
        self._stream: Stream | None = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        # Change with every step.
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        window = core_of(optimizer).window
        self._accumulation = Accumulation(window, BatchSizes.of(config), config.managed_accumulation)
        self._applied = False
        self._norm: Tensor | None = None
        # Change with every call.
        self._synchronize = True
        self._stepping = False
        self._destroyed = False
        # Parts of the engine.
        self._reports = reports_of(config, ranks, module, optimizer)
        self._saving = Saving(self._accumulation)
        self.loss_scaling.hand_to(optimizer)
        optimizer.register_step_pre_hook(weakly(self._check_step))
        # With the optimizer's step() or zero_grad(), whether the engine or its user calls them.
        window.on_end(self._window_ended)
        self.built = True

    # -- checkpoints ----------------------------------------------------------

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self, self._saving)

    save_checkpoint = MethodOf("_checkpoints", Checkpoints.save)
    load_checkpoint = MethodOf("_checkpoints", Checkpoints.load)
    wait_for_checkpoint = MethodOf("_checkpoints", Checkpoints.wait)

    @property
    def _store(self) -> Store:
        return core_of(self.optimizer).members.store

    # -- forward and backward -------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward, under the configured autocast."""
        if torch.is_grad_enabled() and not self._store.alone:
            refuse_compiled_autograd()  # a loss.backward() would follow
        dtype, autocast = self.config.dtype, self.config.autocast
        context = contextlib.nullcontext() if autocast is None else torch.autocast(self.device.type, DTYPES[autocast])
        with self._timing("forward"), context:
            if dtype is not None and self.config.cast_inputs:
                inputs, kwargs = cast((inputs, kwargs), DTYPES[dtype])
            try:
                return self.module(*inputs, **kwargs)
            except BaseException:
                self._store.interrupted(torch.is_grad_enabled())
                raise

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss``, one element, times the loss scale, for a ``loss.backward()`` of your own."""
        check_loss(loss, "scale")
        self._accumulation.scaled = True
        return self._times_scale(loss)

    def _times_scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaling.value == 1.0 else loss.float() * self.loss_scaling.value

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run one backward of the window.

        Args:
            loss: one element; divided by the number of accumulation steps.
            retain_graph: as in torch.
            scale_wrt_gas: False leaves out the division.

        Returns:
            The loss as it was differentiated, without the loss scale.
        """
        check_loss(loss, "backward")
        self._check_alive()
        counted, window = self._accumulation, self._store.window
        steps = counted.sizes.accumulation_steps if scale_wrt_gas else 1
        divided = loss / steps if steps > 1 else loss
        counted.has_raw(window.gradients_arrived)  # from a loss.backward() before this call
        core_of(self.optimizer).members.source.hook_unfrozen()
        self._store.begin_backward(self._synchronize, counted.next_is_last())
        failure: GradientError | None = None
        try:
            if not self._store.alone:
                refuse_compiled_autograd()
            with self._timing("backward"):
                self._times_scale(divided).backward(retain_graph=retain_graph)
        except BaseException as error:
            failure = GradientError(
                f"a backward of this window failed ({type(error).__name__}: {error}); "
                "call engine.zero_grad() to discard the window and go on"
            )
            raise
        finally:
            self._store.end_backward(failure)
            counted.end_backward(loss, window.gradients_arrived, succeeded=failure is None)
        if self._reports is not None:
            self._reports.add_loss(loss)
        self.micro_steps += 1
        return divided

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the block's gradients on this rank; the next backward outside, or ``step()``, reduces them."""
        former, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = former

    coalesce_grad_reduction = no_sync

    # -- the step -------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Apply the window if it is due: clip, step, publish, advance the schedule. Otherwise do nothing.

        Args:
            lr_kwargs: arguments of the schedule's ``step()``.

        Raises:
            GradientError: a gradient, named in the message, cannot be counted; nothing was stepped.
            RankError: the ranks make different calls.
        """
        self._check_alive()
        self._applied = False
        counted, core, store = self._accumulation, core_of(self.optimizer), self._store
        try:
            self._check_kept()
            raw = counted.has_raw(core.window.gradients_arrived)
            others = store.ranks_with_raw(raw) if counted.alone else ()
            due = counted.due(raw, self.loss_scaling.value, others)
        except LongshoreError:
            store.window.refused = True
            raise
        if not due:
            counted.not_due()
            return
        watch = None if self._reports is None else self._reports.stopwatch()
        self._stepping = True
        with contextlib.ExitStack() as together:
            try:
                with self._timing("step"), core.cached_agreement() as gradients:
                    if counted.boundary is None and counted.backwards == 0 and not gradients:
                        counted.not_due()  # no rank had a backward, not even a loss.backward()
                        return
                    together.enter_context(deferred_interrupts())  # all ranks take this step, and count it
                    self._applied = self._apply_window()
            finally:
                self._stepping = False
            self.global_steps += 1
            self._report(watch)
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            counted.end_step()

    def _timing(self, part: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._reports is None else self._reports.timing(part, self.global_steps)

    def _report(self, watch: Stopwatch | None) -> None:
        """Report a step before the schedule changes the learning rates; ``watch`` runs since it began."""
        if self._reports is not None and watch is not None:
            counts = self.global_steps, self.skipped_steps, self.global_samples
            norm, scale = self.get_global_grad_norm(), self.loss_scaling.value
            self._reports.step(StepFigures(*counts, self.get_lr(), norm, scale, watch.seconds()))

    def _apply_window(self) -> bool:
        """Clip and step; return False if an overflow skipped the step."""
        scaling, clip = self.loss_scaling, self.config.gradient_clipping
        if clip is not None:
            self._norm = self.optimizer.clip_grad_norm_(clip)
        else:
            measures = self.config.compute_grad_norm or scaling.skips_overflow
            self._norm = self.optimizer.grad_norm() if measures else None
        if not scaling.skips_overflow:
            self.optimizer.step()
            return True
        # The norm is the same number on all ranks, so they decide alike (law 6).
        assert self._norm is not None
        overflow = not bool(torch.isfinite(self._norm))
        if overflow:
            core_of(self.optimizer).zero_grad(Ended.SKIPPED)
            self.skipped_steps += 1
        scaling.update(overflow)
        if not overflow:
            self.optimizer.step()
        scaling.hand_to(self.optimizer, overflow)
        return not overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients of the window, on the host too."""
        self.optimizer.zero_grad(set_to_none)

    def _check_kept(self) -> None:
        """Raise LongshoreError for changes to objects that a script kept, where training would not see them."""
        self._store.residence.check_handles()

    def _check_step(self) -> None:
        """Raise LongshoreError if the optimizer's own step() would leave out clipping or the overflow check, or if the
        script expects other settings."""
        if self._stepping:
            return
        self._check_kept()
        clips, skips = self.config.gradient_clipping is not None, self.loss_scaling.skips_overflow
        if clips or skips:
            raise LongshoreError(
                f"optimizer.step() would leave out the {'clipping' if clips else 'overflow check'} that the "
                "configuration asks for; call engine.step()"
            )

    def _window_ended(self, how: Ended) -> None:
        self._accumulation.end(how)
        if self._reports is not None and not self._stepping:  # otherwise step() reports the losses
            self._reports.discard()

    # -- the window -----------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the backward that is under way, or has just ended, is the last of its window."""
        return self._accumulation.at_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the next ``step()`` applies, until declared otherwise; None: count backwards again."""
        self._accumulation.declare(is_boundary)

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backwards per step, which decides when ``step()`` is due."""
        return self._accumulation.sizes.accumulation_steps

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set the backwards per step between two windows; the micro batch stays, the train batch changes."""
        self._accumulation.set_accumulation_steps(steps)  # may raise
        self.optimizer.expect_backwards(steps)

    def train_batch_size(self) -> int:
        """Return the number of samples per step, over all ranks."""
        return self._accumulation.sizes.train_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step by changing the accumulation steps; the micro batch size stays."""
        self.set_gradient_accumulation_steps(self._accumulation.sizes.steps_for(train_batch_size))

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per backward on one rank."""
        return self._accumulation.sizes.micro_batch_size

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` changed the weights: it was due, and there was no overflow."""
        return self._applied

    @property
    def in_window(self) -> bool:
        """Whether there is a gradient, or was a backward, since the last applied or discarded step."""
        return self._accumulation.open or core_of(self.optimizer).window.gradients_arrived > 0

    # -- looking --------------------------------------------------------------

    def explain(self, print_it: bool = True) -> Explanation:
        """Describe buckets, tiles, owners and bytes, and account for every gradient of the last window."""
        explanation = explain(self.config, self.ranks, self.optimizer, self.binding, self._stream)
        if print_it and self.ranks.rank == 0:
            explanation.print()
        return explanation

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before clipping of the last applied or skipped step; None if that step measured none."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @property
    def global_samples(self) -> int:
        """Number of samples for which all ranks together have run backward."""
        sizes = self._accumulation.sizes
        return self.micro_steps * sizes.micro_batch_size * sizes.world_size

    # -- the model ------------------------------------------------------------

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Compile the model's forward in place; ``compile_kwargs`` are more arguments of ``torch.compile``."""
        self.module.compile(backend=backend, **(compile_kwargs or {}), **more)

    @torch.no_grad()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        """Convert or move the model, as ``nn.Module.to()`` and the like do.

        Raises:
            ParameterError: the call would change a parameter that the optimizer steps; nothing was converted.
        """
        if self._destroyed:
            return super()._apply(fn, recurse)
        for record in core_of(self.optimizer).members.records:
            found = fn(record.parameter)
            if (found.dtype, found.device) != (record.dtype, record.device):
                raise ParameterError(
                    f"the engine steps {record.name} as {record.dtype} on {record.device}, and this would make it "
                    f"{found.dtype} on {found.device}; set fp16 or bf16 in the configuration, or convert and move the "
                    "model before initialize() (engine.destroy() ends this engine)"
                )
        # Even if nothing changes, torch would set .data of every parameter, and of the placeholders in .grad.
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return self if all(fn(tensor) is tensor for tensor in tensors) else super()._apply(fn, recurse)

    # -- the end --------------------------------------------------------------

    def destroy(self) -> None:
        """Discard gradients, wait for pending work, turn the parameters into ordinary ones, and release threads,
        process groups, and the memory of the optimizer's state.

        Raises the error of a checkpoint that was being written.
        """
        self._destroyed = True
        with contextlib.ExitStack() as ending:  # the last one is first, and each ends, whatever another one raises
            ending.callback(self.binding.release)
            ending.callback(self.ranks.close)
            if self._stream is not None:
                ending.callback(self._stream.close)
            ending.callback(lambda: self._store.tiles.release())
            ending.callback(self.optimizer.close)
            ending.callback(core_of(self.optimizer).window.end, Ended.CLOSED)  # with the parameters' .grad
            if self._reports is not None:
                ending.callback(self._reports.close)
            ending.callback(self._checkpoints.close)

    def _check_alive(self) -> None:
        if self._destroyed:
            raise LongshoreError("engine.destroy() was called, so nothing steps this model; call initialize() again")
