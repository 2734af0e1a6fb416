"""From a module, which may be on the meta device, to what a plan needs of it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from longshore.engine import Init
from longshore.engine.model_sharding import units_of
from longshore.plan.model import ALL_EXPERTS, PlannedModel, PlannedParameter, Use


def plan_of_module(module: nn.Module, name: str, head: Tensor | None = None) -> PlannedModel:
    """Read a module; its weights are not looked at.

    Args:
        module: on any device.
        name: for titles.
        head: the parameter that makes numbers for each entry of the vocabulary; None: a tied or last Linear of a model
            that has an embedding of as many rows.
    """
    unit_of: dict[int, int] = {}
    units = units_of(module, "auto")
    order = {id(each): place for place, each in enumerate(module.modules())}
    for number, unit in enumerate(sorted(units, key=lambda each: order[id(each)])):
        for parameter in unit.parameters():
            unit_of.setdefault(id(parameter), number)
    kinds = _kinds(module)
    looked_up = {key for key, classes in kinds.items() if nn.Embedding in classes}
    rows = {each.shape[0] for each in module.parameters() if id(each) in looked_up}
    config = _Configuration(getattr(module, "config", None))
    active = config.active_share
    head = _head(module, kinds, rows) if head is None else head
    found = []
    for parameter_name, parameter in module.named_parameters():
        use = Use.MULTIPLIED
        if parameter is head:
            use = Use.HEAD
        elif id(parameter) in looked_up and kinds[id(parameter)] == {nn.Embedding}:
            use = Use.LOOKED_UP
        elif parameter.ndim < 2:
            use = Use.ELEMENTWISE
        experts = _of_experts(parameter_name) and use is Use.MULTIPLIED
        found.append(
            PlannedParameter(
                parameter_name,
                tuple(parameter.shape),
                parameter.dtype,
                use,
                unit_of.get(id(parameter)),
                active if experts else 1.0,
                parameter.requires_grad,
            )
        )
    buffers = sum(each.numel() * each.element_size() for each in module.buffers())
    notes = []
    if active != 1.0:
        notes.append(f"each token uses {active:.3g} of the experts")
    elif any(_of_experts(each.name) for each in found):
        notes.append(ALL_EXPERTS)
    hidden = config.number("hidden_size")
    return PlannedModel(name, tuple(found), hidden, config.attention_width, buffers, tuple(notes))


def module_of_function(reference: str) -> nn.Module:
    """Call ``package.module:function`` and take the module that it makes, on the meta device.

    Raises:
        ValueError: there is no such function, or it does not return a module; says what there is.
    """
    path, _, attribute = reference.partition(":")
    if not all(path.split(".")):
        raise ValueError(f"{reference!r}: a module is named by its whole name, as package.module:function")
    try:
        found: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not (path == error.name or path.startswith(f"{error.name}.")):
            raise  # the module is there, and imports what is not
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r} here; module:function names what makes the model, from "
            "the current folder, a folder on PYTHONPATH or an installed package"
        ) from error
    make: Any = found
    for name in attribute.split("."):
        if not hasattr(make, name):
            known = sorted(each for each in vars(found) if callable(vars(found)[each]) and not each.startswith("_"))
            raise ValueError(f"{reference!r}: {path} has no {attribute!r}; {_near(attribute, known)}")
        make = getattr(make, name)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ValueError(f"{reference!r} is a {type(make).__name__}, and not a function that returns a torch module")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{reference} is called without arguments, and: {error}; give a function of yours") from error
    except ValueError:
        pass  # of a class that does not tell
    module = _made(make)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{reference!r} returned a {type(module).__name__}, and not a torch.nn.Module")
    return module


def _made(make: Callable[[], Any]) -> Any:
    with Init(empty=True):
        return make()


def _near(name: str, known: Iterable[str]) -> str:
    from longshore.engine.wording import did_you_mean

    return did_you_mean(name, known)


def _kinds(module: nn.Module) -> dict[int, set[type]]:
    """Of each parameter, by ``id``, the kinds of module that have it."""
    kinds: dict[int, set[type]] = {}
    for each in module.modules():
        kind = next((known for known in (nn.Embedding, nn.Linear) if isinstance(each, known)), nn.Module)
        for parameter in each.parameters(recurse=False):
            kinds.setdefault(id(parameter), set()).add(kind)
    return kinds


def _head(module: nn.Module, kinds: dict[int, set[type]], rows: set[int]) -> Tensor | None:
    linear = [
        each
        for each in module.parameters()
        if nn.Linear in kinds[id(each)] and each.ndim == 2 and each.shape[0] in rows
    ]
    return linear[-1] if linear else None


def _of_experts(name: str) -> bool:
    return ".experts." in f".{name}."


class _Configuration:
    """Numbers of a configuration of transformers, or of the text model's inside it; None: there is none."""

    def __init__(self, config: Any) -> None:
        nested = getattr(config, "get_text_config", None)
        self._places = [config, *([nested()] if callable(nested) else [])]

    def number(self, *names: str) -> int:
        """The first of these that is there; 0: none is."""
        found = (getattr(place, name, 0) for place in self._places for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    @property
    def active_share(self) -> float:
        """Of the experts, the part that one token uses; 1.0 also where that is not told."""
        experts = self.number("num_local_experts", "num_experts", "n_routed_experts")
        used = self.number("num_experts_per_tok")
        return min(1.0, used / experts) if experts and used else 1.0

    @property
    def attention_width(self) -> int:
        """Heads times their size, over all layers."""
        layers, heads = self.number("num_hidden_layers"), self.number("num_attention_heads")
        if not heads:
            return 0
        return layers * heads * (self.number("head_dim") or self.number("hidden_size") // heads)
