"""Make the engine's optimizer, as the configuration names it, or from a user's optimizer with its groups and state."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine.config.model import Config
from longshore.engine.config.optimizers import MuonConfig, check_encodable
from longshore.layout.formats import StateFormat
from longshore.optim.family import ELEMENTWISE, TorchFamily
from longshore.optim.offload import Offload
from longshore.optim.other_optimizers import IN_PLACE_OF, TAKEN_BY, check_no_own_step, parameters_of, stands_for
from longshore.optim.rules.adam import AdamFamily
from longshore.optim.rules.muon import MatrixFamily, matrix_options, show_groups
from longshore.optim.tiled_optimizer import OPTIMIZERS, TiledOptimizer, core_of

_KIND_ATTRIBUTE = "longshore_kind"
"""Class attribute that gives the longshore optimizer with the same step. It is not inherited, since a subclass may step
differently."""

_REFUSED = {
    "Adafactor": "it keeps sums over the rows and columns of a matrix",
    "LBFGS": "it takes products of whole gradients and evaluates the model several times a step",
    "SparseAdam": "it steps sparse gradients only",
}
"""torch's optimizers that cannot be stepped in tiles, with the reason. Most let an element depend on others, which may
be in another tile or on another rank."""

_MARK = "use_muon"
"""A group's option and, as in DeepSpeed, an attribute of a parameter: whether Muon steps it."""


def from_client(
    optimizer: torch.optim.Optimizer,
    *,
    release_gradients: bool = False,
    offload: Offload | None = None,
    names: Mapping[int, str] | None = None,
) -> TiledOptimizer:
    """Build a longshore optimizer that continues from ``optimizer``, with the same parameters, groups and state.

    torch's Adam, AdamW, Adagrad and SGD, and longshore's optimizers, become longshore's. torch's other elementwise
    optimizers are run by torch on host tiles, more slowly. If ``optimizer`` is one of longshore's, it is closed.

    ``optimizer`` then stands for the new one: its groups are the new optimizer's (the same list of the same
    dictionaries), and so are its state and its methods. A schedule that was built on it, a group that is added to it,
    or a hook that is registered with it acts on the new optimizer.

    Args:
        optimizer: the user's optimizer.
        release_gradients: see :class:`~longshore.AdamW`.
        offload: see :class:`~longshore.AdamW`.
        names: names of parameters, by ``id(parameter)``; None: those in the optimizer's groups, if there are any.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        ValueError: the optimizer cannot be stepped in tiles, or has an unsupported option; the message names it.
    """
    made = converted(optimizer, release_gradients=release_gradients, offload=offload, names=names)
    take_over(optimizer, made)
    return made


def converted(
    optimizer: torch.optim.Optimizer,
    *,
    release_gradients: bool,
    offload: Offload | None,
    names: Mapping[int, str] | None,
) -> TiledOptimizer:
    """Build the optimizer of :func:`from_client`, which calls :func:`take_over` then; until that, ``optimizer`` stays
    as it is, unless it is one of longshore's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    optimizer = stands_for(optimizer)
    check_no_own_step(optimizer)
    client = type(optimizer)
    native = (ours for ours in OPTIMIZERS.values() if client in (ours, ours.twin))
    kind = cast(Any, next(native, None) or vars(client).get(_KIND_ATTRIBUTE))
    _check_states(optimizer, kind, offload)
    groups, defaults = _groups_of(optimizer, names), _without_flags(optimizer.defaults)
    made: TiledOptimizer
    if kind is not None:
        taken = parameters_of(kind)
        options = {name: value for name, value in defaults.items() if name in taken}
        made = kind(groups, **options, release_gradients=release_gradients, offload=offload)
    else:
        name = _elementwise(optimizer)
        if offload is not None and offload.leaves_on_device:
            _check_on_host(optimizer, name)
        made = TiledOptimizer(groups, defaults, TorchFamily(name), release_gradients, offload)
        warnings.warn(
            f"torch.optim.{name} has no kernel in longshore and is run by torch on host tiles, which gives torch's "
            f"weights and takes longer; longshore has kernels for {', '.join(OPTIMIZERS)}",
            stacklevel=2,
        )
    named = any("param_names" in group for group in optimizer.param_groups)
    made._named_by_us = getattr(optimizer, "_named_by_us", False) or (names is not None and not named)
    saved, outside = _state_of(optimizer)
    if saved["state"]:
        own_groups = [
            {key: value for key, value in _without_flags(group).items() if key != "param_names"}
            for group in saved["param_groups"]
        ]
        made.load_state_dict({**saved, "param_groups": own_groups})
    for tensor, entries in outside.items():
        made.state[tensor] = entries
    if isinstance(optimizer, TiledOptimizer):
        optimizer.close()
    elif saved["state"]:
        members = core_of(made).members
        members.user_state.adopt(optimizer.state, members)
    return made


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the ``state_dict()`` of an optimizer, without the changes of its hooks, and the states of tensors that are
    in no group, which torch cannot save."""
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state = optimizer.state
    outside = {key: state[key] for key in [*state] if isinstance(key, torch.Tensor) and id(key) not in members}
    hooks = {name: vars(optimizer)[name] for name in _HOOKS}
    own = isinstance(optimizer, TiledOptimizer)  # which leaves them out
    everything = {} if own else dict(state)
    try:
        vars(optimizer).update((name, OrderedDict()) for name in _HOOKS)
        for key in () if own else outside:
            del state[key]
        return optimizer.state_dict(), outside
    finally:
        vars(optimizer).update(hooks)
        if outside and everything:
            state.clear()
            state.update(everything)  # in their order


_HOOKS = [
    f"_optimizer_{name}"
    for name in (
        *("step_pre_hooks", "step_post_hooks", "state_dict_pre_hooks", "state_dict_post_hooks"),
        *("load_state_dict_pre_hooks", "load_state_dict_post_hooks"),
    )
]


def take_over(client: torch.optim.Optimizer | None, made: TiledOptimizer) -> None:
    """Make ``client``, if there is one, another name of ``made``, which :func:`converted` made from it."""
    if client is None:
        return
    for mine, theirs in zip(made.param_groups, client.param_groups, strict=True):
        params, options = theirs["params"], {**mine}
        if isinstance(params, list):
            params[:] = mine["params"]
            options["params"] = params
        theirs.clear()
        theirs.update(options)
    made.param_groups = client.param_groups
    defaults = vars(client)["defaults"]
    defaults.update(vars(made)["defaults"])
    vars(made)["defaults"] = defaults
    for name in _HOOKS:  # handles of registered hooks refer to these dictionaries
        hooks = vars(client)[name]
        hooks.update(vars(made)[name])
        vars(made)[name] = hooks
    before = vars(client).pop(TAKEN_BY, None)
    for other in (before, vars(client).pop(IN_PLACE_OF, None)):
        take_over(other, made)  # who has that one has the new one, too
    vars(client).pop("state", {}).clear()  # somebody may have it, and would read or edit what is not the state any more
    vars(client).pop("step", None)  # a scheduler puts a function there, which would step
    vars(client)[TAKEN_BY] = made
    if before is None:
        client.__class__ = _other_name_of(type(client))
    remembered: Any = weakref.ref(client)  # it has the new optimizer already

    def stepped(*_: Any) -> None:
        if (found := remembered()) is not None:
            found._opt_called = True  # torch's schedulers warn unless their optimizer was stepped before

    made.register_step_post_hook(stepped)


@functools.cache
def _other_name_of(kind: type[Any]) -> type[Any]:
    """Return the class of an optimizer of class ``kind`` that stands for another: all that is public is the other's."""

    def step(self: Any, closure: Any = None) -> Any:
        return getattr(self, TAKEN_BY).step(closure)

    def passed_on(name: str) -> property:
        # Fabric's wrappers have this class without its attributes, which they look up in the optimizer.
        return property(
            lambda self: getattr(getattr(self, TAKEN_BY), name),
            lambda self, value: setattr(getattr(self, TAKEN_BY), name, value),
        )

    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    names = {name for name in dir(TiledOptimizer) if not name.startswith("_")}
    names |= {"param_groups", "defaults", "_core", "_step_supports_amp_scaling", *_HOOKS}
    shared = {name: passed_on(name) for name in names - {"step"}}
    refused = dict.fromkeys(("__copy__", "__deepcopy__", "__reduce_ex__"), _refuse_copies)
    return type(kind.__name__, (kind,), {**shared, **refused, "step": step, "__module__": kind.__module__})


def _refuse_copies(self: Any, *_: Any) -> Any:
    made = getattr(self, TAKEN_BY)
    raise TypeError(
        f"this {type(self).__name__} was given to longshore, and longshore.{type(made).__name__} took over from it: "
        "copy or pickle that one"
    )


def _elementwise(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    name = kind.__name__
    if kind is getattr(torch.optim, name, None):
        if name in ELEMENTWISE:
            return name
        if name in _REFUSED:
            raise ValueError(
                f"torch.optim.{name} cannot be stepped in tiles: {_REFUSED[name]}; use an elementwise optimizer "
                f"(longshore's {', '.join(OPTIMIZERS)}, or torch's {', '.join(ELEMENTWISE)})"
            )
    raise ValueError(
        f"longshore does not know the optimizer {kind.__module__}.{kind.__qualname__}, and cannot tell whether it may "
        f"be stepped in tiles; use longshore's {', '.join(OPTIMIZERS)}, torch's optimizers of these names, or torch's "
        f"{', '.join(ELEMENTWISE)}"
    )


def _check_states(optimizer: torch.optim.Optimizer, kind: Any, offload: Offload | None) -> None:
    """Check the format of the states: ``kind``, the longshore optimizer that will be made, has to have it, and states
    that are encoded already must not silently become others."""
    states = StateFormat.FP32 if offload is None else offload.state_format
    name = type(optimizer).__name__
    try:
        check_encodable(name if kind is None else kind.__name__, states.value)
    except ValueError as error:
        raise ValueError(f"states {states.value} {error}") from None
    if isinstance(optimizer, TiledOptimizer):
        theirs = core_of(optimizer).members.offload
        if theirs.state_format is StateFormat.FP32:
            return
        seed = 0 if offload is None else offload.states_seed
        if (theirs.state_format, theirs.states_seed) != (states, seed):
            wanted = f"states {theirs.state_format.value} and states_seed {theirs.states_seed}"
            raise ValueError(
                f"the states of optimizer= ({name}) are {theirs.state_format.value} with states_seed "
                f"{theirs.states_seed}, by its Offload, and those of the optimizer that takes over are "
                f"{states.value} with {seed}: give {wanted} here, too (in the configuration, or in offload=)"
            )


def _check_on_host(optimizer: torch.optim.Optimizer, name: str) -> None:
    elsewhere = {str(each.device) for group in optimizer.param_groups for each in group["params"] if not each.is_cpu}
    if elsewhere:
        raise ValueError(
            f"torch.optim.{name} runs on host tiles, and its state is to stay on {elsewhere.pop()} "
            "(Offload(device='none'), or a ratio below 1); use device='cpu' with all of it there, or one of "
            f"longshore's {', '.join(OPTIMIZERS)}"
        )


def _groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with the names of parameters if there are any."""
    has_names = names is not None or any("param_names" in group for group in optimizer.param_groups)
    groups = []
    for position, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = group["params"]
        if names is not None:
            members = [(names.get(id(p), f"{position}.{place}"), p) for place, p in enumerate(members)]
        elif "param_names" in group:
            members = list(zip(group["param_names"], members, strict=True))
        # torch takes names from the members, and an empty group has none to take them from.
        nameless = {"param_names": []} if has_names and not members else {}
        groups.append({**_without_flags(options), **nameless, "params": list(members)})
    return groups


def _without_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with ``foreach`` and ``fused``, which say how torch computes a step, set to None."""
    return {name: None if name in ("foreach", "fused") else value for name, value in options.items()}


def muon_groups_of(model: nn.Module, groups: Sequence[Mapping[str, Any]], config: MuonConfig) -> list[dict[str, Any]]:
    """Return groups for :class:`longshore.Muon` from ``groups`` of named parameters, which it divides.

    Groups that say ``use_muon`` stay as they are. Otherwise parameters that have an attribute of that name are divided
    by it, and if none has it, as by :func:`longshore.muon_groups`. A group's own options are those of its parts.

    Raises:
        ValueError: a parameter, which the message names, has no mark while others have one; it is not one of the
            model's; or it looks as if it held several matrices, and the configuration does not say how it is divided.
    """
    undecided = {name: each for group in groups if _MARK not in group for name, each in group["params"]}
    options_of = _divided(model, undecided, config) if undecided else {}
    divided: list[dict[str, Any]] = []
    for group in groups:
        if _MARK in group:
            divided.append({**(config.adamw_options() if not group[_MARK] else {}), **group})
            continue
        parts: dict[str, tuple[dict[str, Any] | None, list[tuple[str, Tensor]]]] = {}
        for name, parameter in group["params"]:
            parts.setdefault(repr(options_of[name]), (options_of[name], []))[1].append((name, parameter))
        own = {name: value for name, value in group.items() if name != "params"}
        for options, members in parts.values():
            more = {_MARK: False, **config.adamw_options()} if options is None else {_MARK: True, **options}
            divided.append({**more, **_applicable(own, options is not None), "params": members})
    return divided


def _divided(model: nn.Module, named: Mapping[str, Tensor], config: MuonConfig) -> Mapping[str, dict[str, Any] | None]:
    """Return by name the options of each parameter that Muon is to step, and None for the others."""
    own = dict(model.named_parameters())
    if strangers := [name for name in named if name not in own]:
        raise ValueError(f"{_listed(strangers)} of model_parameters: not in the model; give such groups a {_MARK}")
    marks = {name: getattr(each, _MARK) for name, each in named.items() if hasattr(each, _MARK)}
    if strange := [name for name, mark in marks.items() if not isinstance(mark, bool)]:
        raise ValueError(f"{_MARK} of parameter {strange[0]} is {marks[strange[0]]!r}; it is True or False")
    if marks and (unmarked := [name for name in named if name not in marks]):
        raise ValueError(
            f"parameters without an attribute {_MARK}, which others have: {_listed(unmarked)}; set it for all, or for "
            "none, and longshore divides them"
        )
    where = "in optimizer.params of the configuration"
    return matrix_options(model, named, config.split or {}, config.others, marks or None, where)


def _applicable(own: Mapping[str, Any], is_matrix: bool) -> dict[str, Any]:
    """Return those of a group's own options that are not only for the other kind. ``eps`` is AdamW's, as in a file."""
    adamw, matrix = AdamFamily.options.keys(), MatrixFamily.options.keys()
    foreign = {*(adamw - matrix), "eps"} if is_matrix else matrix - adamw
    return {name: value for name, value in own.items() if name not in foreign}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def client_optimizer(
    model: nn.Module,
    given: Optimizer | Callable[[list[Any]], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    config: Config,
    show: bool = False,
) -> tuple[Optimizer | None, list[dict[str, Any]]]:
    """Return the user's optimizer and no groups, or None and the groups for the optimizer that the configuration names.

    ``given`` is the optimizer, or a function that makes it. Groups have ``(FQN, parameter)``, so that errors can name
    parameters; without ``model_parameters`` they have all trainable ones. Muon's are printed if ``show``.

    Raises:
        ValueError: two optimizers are given, or one that was built with other parameters.
        TypeError: an argument has another type.
    """
    if isinstance(model_parameters, Tensor):
        raise TypeError("model_parameters is a list of parameters or groups, not one tensor; wrap it in a list")
    entries: list[Any] = (
        [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model_parameters is None
        else list(model_parameters.parameters() if isinstance(model_parameters, nn.Module) else model_parameters)
    )
    if given is None:
        groups = _named_groups(model, entries)
        if isinstance(config.optimizer, MuonConfig):
            groups = muon_groups_of(model, groups, config.optimizer)
            if show:
                show_groups(groups)
        return None, groups
    if config.optimizer is not None:
        raise ValueError("an optimizer is given twice: as optimizer= and in the configuration; keep one")
    if not isinstance(given, Optimizer):
        if not callable(given):
            raise TypeError(f"optimizer is a torch.optim.Optimizer or makes one, not {type(given).__name__}")
        made = given(entries)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer= returned a {type(made).__name__}, not a torch.optim.Optimizer")
        return made, []
    if model_parameters is not None:
        own = {id(parameter) for group in given.param_groups for parameter in group["params"]}
        if own != {id(each) for group in _named_groups(model, entries) for _, each in group["params"]}:
            raise ValueError(
                "optimizer= was built with other parameters than model_parameters=; with an optimizer of your own "
                "leave model_parameters out"
            )
    return given, []


def _named_groups(model: nn.Module, entries: list[Any]) -> list[dict[str, Any]]:
    """Turn parameters or groups into groups of ``(FQN, parameter)``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    named = []
    for position, group in enumerate(groups):
        params = group.get("params", [])
        members = []
        for place, entry in enumerate([params] if isinstance(params, Tensor) else params):
            name, parameter = entry if isinstance(entry, tuple) else (None, entry)
            members.append((names.get(id(parameter)) or name or f"{position}.{place}", parameter))
        options = {key: value for key, value in group.items() if key != "param_names"}
        # torch takes names from the members, of which an empty group has none.
        named.append({**options, "params": members, **({} if members else {"param_names": []})})
    return named


def make_optimizer(
    model: nn.Module,
    client: Optimizer | None,
    groups: list[dict[str, Any]],
    config: Config,
    offload: Offload,
) -> TiledOptimizer:
    """Make an optimizer with a store of ``offload``, which takes the gradients during backward.

    It continues from ``client``, the user's own, for which :func:`take_over` is to be called at the end. If there is
    none, the configuration names the optimizer, and it has the ``groups``.
    """
    if client is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return converted(client, release_gradients=True, offload=offload, names=names)
    assert config.optimizer is not None  # load_config() checks it
    kind: Any = OPTIMIZERS[config.optimizer.type]  # the signatures differ
    made = kind(groups, **config.optimizer.options(), release_gradients=True, offload=offload)
    made._named_by_us = True
    return made
