"""The engine: forward, backward and step of one model, sharded and offloaded, with DeepSpeed's calls."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longshore.engine.batch_sizes import BatchSizes
from longshore.engine.binding import Binding
from longshore.engine.checkpoints import Checkpoints, SavesCheckpoints
from longshore.engine.config import Config
from longshore.engine.conversion import leaves_as_is
from longshore.engine.deepspeed_calls import INSTEAD, DeepSpeedCalls
from longshore.engine.explain import Explanation, explain
from longshore.engine.loss_scale import LossScale
from longshore.engine.monitoring import monitor_for
from longshore.engine.precision import Precision
from longshore.engine.ranks import Ranks
from longshore.engine.readings import Readings
from longshore.engine.timers import StepLine
from longshore.engine.window import Window
from longshore.errors import GradientError, LongshoreError
from longshore.optim.host_optimizer import HostOptimizer

_DISCARDS_OF_A_LOOP = 3
"""A bad batch is discarded once; a loop that discards in every micro step never trains."""


class Engine(SavesCheckpoints, Readings, DeepSpeedCalls, nn.Module):
    """What ``longshore.initialize`` returns first.

    ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``: with several
    ranks, every rank makes the same calls in the same order.

    Args:
        module: the model, on its device and in its dtype.
        optimizer: steps its parameters.
        config: resolved for the number of ranks.
        ranks: of the run.
        precision: casts and autocast.
        loss_scale: policy.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: HostOptimizer,
        config: Config,
        ranks: Ranks,
        precision: Precision,
        loss_scale: LossScale,
        binding: Binding,
    ) -> None:
        super().__init__()
        # Fixed.
        self.module = module
        self.optimizer = optimizer
        self.config = config
        self.ranks = ranks
        self._precision = precision
        self.loss_scaling = loss_scale
        self.binding = binding
        self._clip = config.gradient_clipping
        # Set once, by initialize().
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        # Change with every step.
        self._sizes = BatchSizes.of(config)
        self._window = Window(self._sizes.accumulation_steps)
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._applied = False
        self._discards = 0
        """Of windows that were only partly filled, since the last step that was due."""
        self._norm: Tensor | None = None
        self._line = StepLine(config, ranks.rank)
        self._monitor = monitor_for(config, ranks.rank, optimizer._core.store.add_recorder)
        self._checkpoints = Checkpoints(self)
        # Of one window.
        self._synchronize = True
        self._announced = 0
        self._scaled = False
        self._failed = False
        """Whether a backward raised."""
        # Of one call.
        self._stepping = False
        # Changes once.
        self._destroyed = False
        optimizer.set_loss_scale(loss_scale.value)
        # Whoever calls the optimizer's step() or zero_grad(), the engine or its user: the window ends with it.
        me = weakref.ref(self)
        optimizer.register_step_pre_hook(lambda *_: _check_step_of(me()))
        optimizer.register_step_post_hook(lambda *_: _end_window_of(me()))
        optimizer._core.when_discarded = lambda: _discard_window_of(me())

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; {INSTEAD[name]}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
        return getattr(module, name)  # generate(), save_pretrained(): scripts call the engine as if it were the model

    # -- forward and backward -------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward, under the configured autocast."""
        with self._line.timing("forward"), self._precision.entered():
            inputs, kwargs = self._precision.cast((inputs, kwargs))
            try:
                return self.module(*inputs, **kwargs)
            except BaseException:
                self.optimizer._core.store.forward_failed()
                raise

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, for a ``loss.backward()`` of your own."""
        self._scaled = True
        return self._times_scale(loss)

    def _times_scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaling.value == 1.0 else loss.float() * self.loss_scaling.value

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """One backward of the window.

        Args:
            loss: one element; divided by the number of accumulation steps.
            retain_graph: as in torch.
            scale_wrt_gas: false leaves the division out.

        Returns:
            The loss as it was differentiated, without the loss scale.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward() takes a loss of one element, not {found}; reduce it, with mean() say")
        given = loss
        if scale_wrt_gas and self._window.accumulation_steps > 1:
            loss = loss / self._window.accumulation_steps
        self._check_alive()
        before = self.optimizer._core.gradients_arrived
        self.optimizer._core.begin_backward(self._synchronize, self._window.next_is_last())
        failure: GradientError | None = None
        try:
            with self._line.timing("backward"):
                self._times_scale(loss).backward(retain_graph=retain_graph)
        except BaseException as error:
            self._failed = True
            failure = GradientError(
                f"a backward of this window failed ({type(error).__name__}: {error}); "
                "call engine.zero_grad() to discard the window and go on"
            )
            failure.__cause__ = error
            raise
        finally:
            self.optimizer._core.store.end_backward(failure)
        self._monitor.backward(given)
        self._announced += self.optimizer._core.gradients_arrived - before
        self._window.backwards += 1
        self.micro_steps += 1
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up on this rank; they are reduced with the next one outside, or by ``step()``."""
        former, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = former

    coalesce_grad_reduction = no_sync

    # -- the step -------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Apply the window if it is due: clip, step, publish, advance the schedule. Otherwise nothing.

        Args:
            lr_kwargs: arguments of the schedule's ``step()``.

        Raises:
            GradientError: a gradient that cannot be counted, by name; nothing was stepped.
            RankError: the ranks do different things.
        """
        self._check_alive()
        self._applied = False
        raw = self.optimizer._core.gradients_arrived > self._announced
        # After a failed backward step() is due, so that this rank meets the others, and all of them raise.
        if not self._failed and not (self._window.due(raw) and self._anything()):
            self._window.calls += 1
            return
        if raw and self.loss_scaling.value != 1.0 and not self._scaled:
            raise GradientError(
                f"gradients came from loss.backward() without the loss scale ({self.loss_scaling.value:g}); "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._stepping = True
        try:
            with self._line.timing("step"), self._monitor.stepping():
                self._applied = self._apply_window()
        finally:
            self._stepping = False
        self.global_steps += 1
        self._discards = 0
        # With the rates of this step, not of the next.
        self._line.after_step(self)
        self._monitor.stepped(self)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _anything(self) -> bool:
        """Whether there was a backward. Raw ones may have been on other ranks, so that they have to agree."""
        return (
            self._window.boundary is not None
            or self._window.backwards > 0
            or bool(self.optimizer._core.window_gradients())
        )

    def _apply_window(self) -> bool:
        """Clip and step; false where an overflow skipped it."""
        self._norm = None
        if self._clip is not None:
            self._norm = self.optimizer.clip_grad_norm_(self._clip)
        elif self.loss_scaling.skips_overflow:
            self._norm = self.optimizer.grad_norm()
        # The norm is the same number on all ranks, and so is what follows from it (law 6).
        if self.loss_scaling.skips_overflow:
            assert self._norm is not None
            overflow = not bool(torch.isfinite(self._norm))
            if overflow:
                self.optimizer.zero_grad()
                self.skipped_steps += 1
            self.loss_scaling.update(overflow)
            if overflow:
                self.optimizer.set_loss_scale(self.loss_scaling.value)
                return False
        self.optimizer.step()
        self.optimizer.set_loss_scale(self.loss_scaling.value)
        return True

    def _end_window(self) -> None:
        self._window.close()
        self._announced = 0
        self._scaled = False
        self._failed = False
        if not self._stepping:  # otherwise the monitor is told when the step is over
            self._monitor.discarded()

    def _discard_window(self) -> None:
        """The user discarded the window; a loop that does so in every micro step would never train."""
        kept, steps = self._window.backwards, self._window.accumulation_steps
        partly = not self._failed and self._window.boundary is None and 0 < kept < steps
        self._discards += partly
        if partly and self._discards == _DISCARDS_OF_A_LOOP:
            warnings.warn(
                f"zero_grad() discarded {kept} of {steps} backwards of an accumulation window, and did so "
                f"{self._discards} times with no step() applied between; call it after a step() "
                "that was applied (engine.was_step_applied()), or leave it out: step() ends the window",
                stacklevel=4,
            )
        self._end_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard everything that the window holds, on the host too."""
        self.optimizer.zero_grad(set_to_none)

    # -- the window -----------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward that is under way, or has just ended, is the last of its window."""
        return self._window.at_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Declare whether the next ``step()`` applies, until declared otherwise; None: count backwards again."""
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise TypeError(f"a boundary is True, False or None, not {is_boundary!r}")
        self._window.boundary = is_boundary

    def gradient_accumulation_steps(self) -> int:
        """Backwards a step, from which ``step()`` knows when it is due."""
        return self._window.accumulation_steps

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Backwards a step from the next window on; the micro batch stays, the train batch changes."""
        sizes = self._sizes.with_accumulation_steps(steps)
        self._window.set_accumulation_steps(steps)  # may refuse
        self._sizes = sizes
        self.optimizer.expect_backwards(steps)

    def check_accumulation_steps(self, steps: int) -> None:
        """Raises what :meth:`set_gradient_accumulation_steps` would."""
        self._sizes.with_accumulation_steps(steps)

    def train_batch_size(self) -> int:
        """Samples a step, over all ranks."""
        return self._sizes.train_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that a step has this many samples; the micro batch stays."""
        self.set_gradient_accumulation_steps(self._sizes.steps_for(train_batch_size))

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a backward, on one rank."""
        return self._sizes.micro_batch_size

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the weights: it was due, and there was no overflow."""
        return self._applied

    @property
    def in_window(self) -> bool:
        """Whether there is a gradient, or was a backward, since the last applied or discarded step."""
        return self._failed or self._window.open or self.optimizer._core.gradients_arrived > 0

    # -- looking --------------------------------------------------------------

    def explain(self, print_it: bool = True) -> Explanation:
        """Buckets, tiles, owners, bytes, and what became of every gradient of the last window."""
        explanation = explain(self)
        if print_it and self.ranks.rank == 0:
            explanation.print()
        return explanation

    # -- the end --------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        # Where nothing changes torch would still put a new .data into every parameter, and into placeholders of .grad.
        if not self._destroyed and leaves_as_is(self.module, self.optimizer._core.records, fn):
            return self
        return super()._apply(fn, recurse)

    def destroy(self) -> None:
        """Wait for what is under way, leave the parameters as ordinary ones, and let go of threads and groups.

        Raises what a checkpoint on its way raised.
        """
        self._destroyed = True
        try:
            self._checkpoints.close()
        finally:
            self._monitor.close()
            self.optimizer.close()
            self.ranks.close()
            self.binding.release()

    def _check_alive(self) -> None:
        if self._destroyed:
            raise LongshoreError("engine.destroy() was called, so nothing steps this model; call initialize() again")


def _check_step_of(engine: Engine | None) -> None:
    """The optimizer's own step() must not silently leave out what only the engine does."""
    if engine is None or engine._stepping:
        return
    skipped = "clipping" if engine._clip is not None else "overflow check" if engine.loss_scaling.skips_overflow else ""
    if skipped:
        raise LongshoreError(
            f"optimizer.step() would leave out the {skipped} that the configuration asks for; call engine.step()"
        )


def _discard_window_of(engine: Engine | None) -> None:
    if engine is not None:
        engine._discard_window()


def _end_window_of(engine: Engine | None) -> None:
    if engine is not None:
        engine._end_window()
