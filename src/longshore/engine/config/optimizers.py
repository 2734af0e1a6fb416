"""The optimizers that a configuration can name, and those that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model, model_validator

import longshore.optim.rules  # noqa: F401  every rule is then known
from longshore.engine.config.base import NamedModel
from longshore.engine.config.values import BETA, BETAS, BOOLEAN, NOT_NEGATIVE, Choice, Kind, Number, checked
from longshore.optim.family import beta, betas, flag, not_negative, number
from longshore.optim.host_optimizer import OPTIMIZERS as CLASSES
from longshore.optim.host_optimizer import RuleOptimizer

_KINDS: dict[Callable[[Any, str], Any], tuple[Any, Kind]] = {
    not_negative: (float, NOT_NEGATIVE),
    number: (float, Number()),
    beta: (float, BETA),
    betas: (tuple[float, float], BETAS),
    flag: (bool, BOOLEAN),
}
"""How the optimizer reads an option: the type of the field, and how a configuration reads it."""


def kind_of_option(optimizer: str, name: str) -> Kind:
    """How a configuration reads an option of the optimizer."""
    return _KINDS[CLASSES[optimizer].rules.options[name]][1]


class OptimizerModel(NamedModel):
    """What the configurations of all optimizers have in common."""

    type: str
    if TYPE_CHECKING:
        lr: float
        weight_decay: float

    @model_validator(mode="after")
    def _options_agree(self) -> OptimizerModel:
        CLASSES[self.type].rules.check_together(self.arguments())
        return self


def _model(kind: type[RuleOptimizer]) -> type[OptimizerModel]:
    """The configuration of one optimizer, with the options and defaults of its signature."""
    fields: dict[str, Any] = {"type": (Literal[kind.__name__], kind.__name__)}
    for name, default in kind.defaults_by_name().items():
        annotation, value_kind = _KINDS[kind.rules.options[name]]
        fields[name] = Annotated[annotation, checked(value_kind)], value_kind.check(default)
    summary = (kind.__doc__ or "").partition("\n\n")[0]
    return create_model(
        f"{kind.__name__}Config", __base__=OptimizerModel, __module__=__name__, __doc__=summary, **fields
    )


OPTIMIZERS = {name: _model(kind) for name, kind in CLASSES.items()}

if TYPE_CHECKING:
    OptimizerConfig = OptimizerModel
else:
    OptimizerConfig = Annotated[Union[tuple(OPTIMIZERS.values())], Field(discriminator="type")]  # noqa: UP007

DEEPSPEED_DEFAULTS = {name: dict(kind.deepspeed_defaults) for name, kind in CLASSES.items()}
"""Where a DeepSpeed file that leaves a parameter out means something else than our models do."""


def optimizers_with(option: str) -> tuple[str, ...]:
    """The names of the optimizers that have this option."""
    return tuple(name for name, model in OPTIMIZERS.items() if option in model.model_fields)


def __getattr__(name: str) -> Any:
    """``AdamWConfig`` and so on: the model of the optimizer of that name."""
    if name.endswith("Config") and (kind := name.removesuffix("Config")) in OPTIMIZERS:
        return OPTIMIZERS[kind]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
