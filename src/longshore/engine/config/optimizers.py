"""The optimizers that a configuration can name, and those that it names in vain."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longshore.engine.config.base import NamedModel
from longshore.engine.config.values import BETAS, NOT_NEGATIVE, Choice, Number, checked

DAMPENING = Number()

_Positive0 = Annotated[float, checked(NOT_NEGATIVE)]
_Betas = Annotated[tuple[float, float], checked(BETAS)]


class AdamConfig(NamedModel):
    """``longshore.Adam``; weight decay is a term in the gradient."""

    type: Literal["Adam"] = "Adam"
    lr: _Positive0 = 1e-3
    betas: _Betas = (0.9, 0.999)
    eps: _Positive0 = 1e-8
    weight_decay: _Positive0 = 0.0
    bias_correction: bool = True
    maximize: bool = False


class AdamWConfig(NamedModel):
    """``longshore.AdamW``; weight decay is decoupled."""

    type: Literal["AdamW"] = "AdamW"
    lr: _Positive0 = 1e-3
    betas: _Betas = (0.9, 0.999)
    eps: _Positive0 = 1e-8
    weight_decay: _Positive0 = 1e-2
    bias_correction: bool = True
    maximize: bool = False


class LionConfig(NamedModel):
    """Lion (Chen et al. 2023, arXiv:2302.06675), with the paper's defaults; weight decay is decoupled."""

    type: Literal["Lion"] = "Lion"
    lr: _Positive0 = 1e-4
    betas: _Betas = (0.9, 0.99)
    weight_decay: _Positive0 = 0.0
    maximize: bool = False


class AdagradConfig(NamedModel):
    """Adagrad, as ``torch.optim.Adagrad``."""

    type: Literal["Adagrad"] = "Adagrad"
    lr: _Positive0 = 1e-2
    lr_decay: _Positive0 = 0.0
    eps: _Positive0 = 1e-10
    weight_decay: _Positive0 = 0.0
    maximize: bool = False


class SGDConfig(NamedModel):
    """SGD with momentum, as ``torch.optim.SGD``."""

    type: Literal["SGD"] = "SGD"
    lr: _Positive0 = 1e-3
    momentum: _Positive0 = 0.0
    dampening: Annotated[float, checked(DAMPENING)] = 0.0
    weight_decay: _Positive0 = 0.0
    nesterov: bool = False
    maximize: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGDConfig:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and no dampening, and has momentum {self.momentum:g} and "
                f"dampening {self.dampening:g}; set momentum, and leave dampening out"
            )
        return self


OptimizerConfig = Annotated[
    AdamConfig | AdamWConfig | LionConfig | AdagradConfig | SGDConfig, Field(discriminator="type")
]

OPTIMIZERS: dict[str, type[NamedModel]] = {
    "Adam": AdamConfig,
    "AdamW": AdamWConfig,
    "Lion": LionConfig,
    "Adagrad": AdagradConfig,
    "SGD": SGDConfig,
}

DEEPSPEED_DEFAULTS: dict[str, dict[str, object]] = {
    "Adam": {"weight_decay": 0.0},
    "AdamW": {"weight_decay": 0.0},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "Adagrad": {},
    "SGD": {},
}
"""Where a DeepSpeed file that leaves a parameter out means something else than our models do."""

_COMPRESSED = "its compressed, stale gradients cannot give the weights of plain torch; use AdamW"
_SHAPES = "it looks at shapes or norms of whole parameters, which a tile does not show"
_MUP = "mup's groups carry their own learning rates: build Adam or SGD groups with mup, and pass longshore's optimizer"
_CLIENT = "construct it and pass it as initialize(optimizer=...); elementwise ones of torch run on host tiles"

REFUSED_OPTIMIZERS: dict[str | int, str] = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "lamb": f"{_SHAPES}; use AdamW",
    "muon": f"{_SHAPES}; use AdamW, or Muon in plain torch",
    "adafactor": f"{_SHAPES}; use AdamW, or Lion for less state",
    "lbfgs": "it calls the model several times a step; use torch.optim.LBFGS without longshore",
    "sparseadam": "sparse gradients are refused; make the embedding with sparse=False and use Adam",
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "adam8bit": "its quantized state is not what plain torch keeps; use AdamW, whose state is on the host",
    "adamax": _CLIENT,
    "nadam": _CLIENT,
    "radam": _CLIENT,
    "rmsprop": _CLIENT,
    "rprop": _CLIENT,
    "adadelta": _CLIENT,
    "asgd": _CLIENT,
}
"""By name in lower case: why, and what to do."""

OPTIMIZER_TYPE = Choice(tuple(OPTIMIZERS), REFUSED_OPTIMIZERS, f"for any other optimizer, {_CLIENT.partition(';')[0]}")
