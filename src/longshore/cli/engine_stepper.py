"""The stepper that is an engine: ``longshore.initialize``, ``engine.backward``, ``engine.step``."""

from __future__ import annotations

from torch import Tensor, nn

import longshore
from longshore.cli.optimizers import Memory, Stepped, decay_groups, device_memory
from longshore.cli.settings import EngineSettings


class EngineStepper:
    """Every rank makes one; they broadcast the weights of rank 0.

    Args:
        model: stays the same object.
        settings: resolved for the ranks.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        config = settings.config
        assert config.optimizer is not None
        groups = decay_groups(model.named_parameters(), config.optimizer.weight_decay)
        self.engine: longshore.Engine = longshore.initialize(model=model, model_parameters=groups, config=config).engine
        self._model = model
        self._stops_at_overflow = settings.stops_at_overflow

    @property
    def lr(self) -> float:
        return self.engine.get_lr()[0]

    def set_lr(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, max_norm: float) -> Stepped:
        """Clips as the configuration says, which is where ``max_norm`` comes from."""
        assert max_norm == (self.engine.config.gradient_clipping or 0.0)
        self.engine.step()
        applied = self.engine.was_step_applied()
        return Stepped(self.engine.get_global_grad_norm(), applied, not applied and not self._stops_at_overflow)

    def zero_grad(self) -> None:
        """Nothing to do: gradients left during backward, and the window ended with the step."""

    def memory(self) -> Memory:
        """Of this rank."""
        return Memory(device_memory(self._model, 0), sum(self.engine.optimizer.host_bytes().values()))
