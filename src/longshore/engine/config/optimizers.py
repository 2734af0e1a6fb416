"""The optimizers that a configuration can name, and those that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model, model_validator

import longshore.optim.rules  # noqa: F401  registers every rule
from longshore.engine.config.base import NamedModel
from longshore.engine.config.values import (
    BETA,
    BOOLEAN,
    NOT_NEGATIVE,
    SPLITS,
    TEXT,
    Items,
    Number,
    OneOf,
    kind_in,
)
from longshore.optim.family import ELEMENTWISE, beta, betas, flag, not_negative, number
from longshore.optim.tiled_optimizer import OPTIMIZERS as CLASSES
from longshore.optim.tiled_optimizer import RuleOptimizer

_FIELDS: dict[Callable[[Any, str], Any], Any] = {
    not_negative: Annotated[float, NOT_NEGATIVE],
    number: Annotated[float, Number()],
    beta: Annotated[float, BETA],
    betas: Annotated[tuple[float, float], Items(BETA, 2)],
    flag: Annotated[bool, BOOLEAN],
}
"""Annotations of fields for options, by the function with which an optimizer reads the option."""

_COEFFICIENT = Number(-(2.0**128 - 2.0**104), maximum=2.0**128 - 2.0**104)
"""A float32: torch converts it to one."""
_LEAST_NORM = Number(-(2.0**128 - 2.0**120), maximum=2.0**128 - 2.0**120)
"""A bfloat16, as the norms that it is compared with."""


class OptimizerModel(NamedModel):
    """Base of the configurations of all optimizers."""

    type: str
    if TYPE_CHECKING:
        lr: float
        weight_decay: float

    @model_validator(mode="after")
    def _options_agree(self) -> OptimizerModel:
        CLASSES[self.type].rules.check_together(self.options())
        return self

    def options(self) -> dict[str, Any]:
        """Return the arguments for the optimizer's class, beside the parameters."""
        return self.arguments()


def _model(kind: type[RuleOptimizer]) -> type[OptimizerModel]:
    """Create the configuration of one optimizer, with the options and defaults of its signature."""
    fields: dict[str, Any] = {"type": (Literal[kind.__name__], kind.__name__)}
    for name, default in kind.defaults_by_name().items():
        if (reader := kind.rules.options[name]) not in _FIELDS:
            raise TypeError(
                f"{kind.__name__}: a configuration has no field for what {reader.__name__}() reads, as the option "
                f"{name} is read: use a function of longshore.optim.family, or add it to _FIELDS in {__name__}"
            )
        field = _FIELDS[reader]
        fields[name] = field, kind_in(field.__metadata__).check(default)
    summary = (kind.__doc__ or "").partition("\n\n")[0]
    module = __name__.rpartition(".")[0]  # where pickle finds it
    return create_model(f"{kind.__name__}Config", __base__=OptimizerModel, __module__=module, __doc__=summary, **fields)


class MuonConfig(OptimizerModel):
    """Muon for the matrices of a model, and AdamW for the rest, with DeepSpeed's names.

    The parameters are divided as by :func:`longshore.muon_groups`, unless groups or parameters have a mark
    ``use_muon``. ``lr`` and ``weight_decay`` are for both kinds, unless one has its own; ``betas`` and ``eps`` are
    AdamW's.
    """

    type: Literal["Muon"] = "Muon"  # pyright: ignore[reportIncompatibleVariableOverride]
    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    momentum: Annotated[float, NOT_NEGATIVE] = 0.95
    nesterov: Annotated[bool, BOOLEAN] = True
    ns_coefficients: Annotated[tuple[float, float, float], Items(_COEFFICIENT, 3)] = (3.4445, -4.7750, 2.0315)
    ns_eps: Annotated[float, _LEAST_NORM] = 1e-7
    ns_steps: Annotated[int, Number(0, maximum=99, whole=True)] = 5
    adjust_lr_fn: Annotated[str | None, OneOf(("original", "match_rms_adamw"))] = None
    muon_lr: Annotated[float | None, NOT_NEGATIVE] = None
    adam_lr: Annotated[float | None, NOT_NEGATIVE] = None
    betas: Annotated[tuple[float, float], Items(BETA, 2)] = (0.9, 0.999)
    eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    adam_weight_decay: Annotated[float | None, NOT_NEGATIVE] = None
    split: Annotated[Mapping[str, Any] | None, SPLITS] = None
    others: Annotated[tuple[str, ...], Items(TEXT)] = ()

    def options(self) -> dict[str, Any]:
        return {
            "lr": self.lr if self.muon_lr is None else self.muon_lr,
            "eps": self.ns_eps,
            **{name: getattr(self, name) for name in ("weight_decay", "momentum", "nesterov")},
            **{name: getattr(self, name) for name in ("ns_coefficients", "ns_steps", "adjust_lr_fn")},
        }

    def adamw_options(self) -> dict[str, Any]:
        """Return the options of the groups that AdamW steps."""
        decay = self.weight_decay if self.adam_weight_decay is None else self.adam_weight_decay
        lr = self.lr if self.adam_lr is None else self.adam_lr
        return {"lr": lr, "betas": self.betas, "eps": self.eps, "weight_decay": decay}


def _models() -> dict[str, type[OptimizerModel]]:
    """Create the configurations of all optimizers, by name."""
    written = {"Muon": MuonConfig}
    return {name: written.get(name) or _model(kind) for name, kind in CLASSES.items()}


OPTIMIZER_CONFIGS = _models()

if TYPE_CHECKING:
    OptimizerConfig = OptimizerModel
else:
    OptimizerConfig = Annotated[Union[tuple(OPTIMIZER_CONFIGS.values())], Field(discriminator="type")]  # noqa: UP007


def optimizers_with(option: str) -> tuple[str, ...]:
    """Return the names of the optimizers that have this option."""
    return tuple(name for name, model in OPTIMIZER_CONFIGS.items() if option in model.model_fields)


ENCODABLE = tuple(name for name, kind in CLASSES.items() if kind.rules.encodable)
"""Optimizers whose states may be in another format than float32."""


def check_states_seed(states: str, seed: int) -> None:
    """Raise ValueError for a seed of states that are not rounded; the message follows the name of the key."""
    if seed and states == "fp32":
        raise ValueError(
            "is the seed of the rounding that states bf16 and 8bit do, and states is fp32, which rounds nothing: give "
            "states, too, or leave it out"
        )


def check_encodable(optimizer: str, states: str) -> None:
    """Raise ValueError for an optimizer, by name, whose states cannot be in this format; the message follows the name
    of the setting."""
    if states != "fp32" and optimizer not in ENCODABLE:
        raise ValueError(
            f"is for {', '.join(ENCODABLE)}, and the states of {optimizer} are float32 always: leave it out, or use "
            "another optimizer"
        )


_COMPRESSED = "its compressed, stale gradients cannot give the weights of plain torch; use AdamW"
_SHAPES = "it looks at shapes or norms of whole parameters, which a tile does not show"
_MUP = "mup's groups carry their own learning rates: build Adam or SGD groups with mup, and pass longshore's optimizer"
_CLIENT = "construct it and pass it as initialize(optimizer=...); elementwise ones of torch run on host tiles"
REFUSED_OPTIMIZERS: dict[str | int, str] = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _COMPRESSED),
    "lamb": f"{_SHAPES}; use AdamW",
    "adafactor": f"{_SHAPES}; use AdamW, or Lion for less state",
    "lbfgs": "it calls the model several times a step; use torch.optim.LBFGS without longshore",
    "sparseadam": "sparse gradients are refused; make the embedding with sparse=False and use Adam",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
    "adam8bit": "use AdamW, with zero_optimization.offload_optimizer.states 8bit",
    **dict.fromkeys((name.lower() for name in ELEMENTWISE if name not in CLASSES), _CLIENT),
}
"""Names of refused optimizers in lower case, each with the reason and what to do."""

OPTIMIZER_TYPE = OneOf(
    tuple(OPTIMIZER_CONFIGS), REFUSED_OPTIMIZERS, f"for any other optimizer, {_CLIENT.partition(';')[0]}"
)
