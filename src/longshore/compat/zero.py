"""``deepspeed.zero``: models that no rank has to keep whole, and modules that stage 3 gathers whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore import Config, Init, gather
from longshore.compat.distributed import init_distributed
from longshore.compat.stage3_names import show_status
from longshore.seam import kind_in, named_leaves, units_with_leaves


class _Reusable(AbstractContextManager[Any]):
    """A context that may be entered again, as DeepSpeed's may; ``make`` returns a new context for each entry."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        context = self._make()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class ZeroInit(_Reusable):
    """:class:`longshore.Init` with DeepSpeed's arguments: parameters are made on rank 0, and ``initialize()``
    gives each rank its shard. Nested uses do nothing more. Entering it joins the ranks, as ``init_distributed()`` does.

    Args:
        module: refused; build the model inside.
        data_parallel_group: all ranks, or None.
        mem_efficient_linear, pin_memory: accepted; they change no result.
        remote_device: None, ``"none"`` or ``"cpu"``.
        config_dict_or_path, config: accepted; ``initialize()`` reads the configuration.
        enabled: False does nothing.
        dtype: default dtype inside, as by ``torch.set_default_dtype``; ``initialize()`` casts to the configuration's.
        mpu, zero_param_parallel_group, sequence_data_parallel_group, param_swapper: refused.
        zero_quantized_weights, zero_quantized_nontrainable_weights: True is refused.

    Raises:
        ValueError: an argument that cannot be honoured, by name.
        RankError: another rank failed inside the context; raised at its end.
    """

    def __init__(
        self,
        module: Any = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        if not enabled:
            super().__init__(contextlib.nullcontext)
            return
        refused = {
            "module": module,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        for name, value in refused.items():
            if value is not None:
                what = "build the model inside the with" if name == "module" else "leave it out"
                raise ValueError(f"zero.Init(): longshore does not support {name}; {what}")
        if str(remote_device or "none") not in ("none", "cpu"):
            raise ValueError(
                f"zero.Init(): remote_device must be None or 'cpu', not {remote_device!r}; parameters are in the "
                "device's memory"
            )
        if data_parallel_group is not None and dist.is_initialized():
            members, world_size = dist.get_world_size(data_parallel_group), dist.get_world_size()
            if members != world_size:
                raise ValueError(
                    f"zero.Init(): data_parallel_group has {members} of {world_size} ranks; longshore shards over all "
                    "of them"
                )
        super().__init__(lambda: _creation(dtype))


_creations: list[object] = []
"""The ``zero.Init`` contexts that the program is in."""


@contextlib.contextmanager
def _creation(dtype: torch.dtype | None) -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        if not _creations:
            show_status()
            init_distributed()  # as in DeepSpeed: transformers asks for the rank while it loads weights inside
            stack.enter_context(Init())
        _creations.append(stack)
        stack.callback(_creations.pop)
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        yield


class GatheredParameters(_Reusable):
    """:func:`longshore.gather` with DeepSpeed's arguments, also for parameters made in ``zero.Init``.

    After ``initialize()`` the parameters in ``params`` are whole inside, whichever handle a script has of them.

    Before ``initialize()`` such parameters exist on rank 0 only, and inside all ranks have its values. Any rank may
    write, and its values are on rank 0 afterwards.

    Args:
        params: a parameter, or several; None among them is skipped, as a bias that a module does not have.
        modifier_rank: the rank whose writes are sent to all ranks afterwards; None: no rank writes, and at stage 3 on
            several ranks a write is an error at the end, on all ranks.
        fwd_module: refused; it registers external parameters.
        enabled: False does nothing.

    Raises:
        ValueError: an argument that cannot be honoured.
    """

    def __init__(
        self,
        params: Iterable[Tensor | None] | Tensor | None,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if not enabled:
            super().__init__(contextlib.nullcontext)
            return
        if fwd_module is not None:
            raise ValueError(
                "GatheredParameters(): longshore does not register external parameters; leave fwd_module out"
            )
        several = [params] if params is None or isinstance(params, Tensor) else params
        given = [each for each in several if each is not None]
        super().__init__(lambda: gather(given, modifier_rank))


# -- modules that stage 3 gathers whole -----------------------------------------------------------------------------

_LEAVES: WeakSet[nn.Module] = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have stage 3 gather each module of these classes whole; to be called before ``initialize()``.

    Args:
        model: its submodules are searched.
        leaf_module_classes: classes, or their names with or without the module's.
        raise_if_not_found: raise ValueError if there is none.

    Returns:
        The modules.
    """
    found = _of_classes(model.modules(), leaf_module_classes, raise_if_not_found, "set_z3_leaf_modules")
    _LEAVES.update(found)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Set modules as leaves by their names in ``model.named_modules()``; with ``flag=False``, unset them.

    Returns:
        The modules, and the names that the model does not have.

    Raises:
        ValueError: there are such names, and ``raise_if_not_found``.
    """
    return _set_named(model, list(module_names), str.__eq__, (flag, raise_if_not_found), "set_z3_leaf_modules_by_name")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same as :func:`set_z3_leaf_modules_by_name` for all modules whose names end so."""
    how = (flag, raise_if_not_found)
    return _set_named(model, list(module_name_suffixes), str.endswith, how, "set_z3_leaf_modules_by_suffix")


def _set_named(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], how: tuple[bool, bool], caller: str
) -> tuple[list[nn.Module], list[str]]:
    flag, check = how
    by_wanted = {each: [module for name, module in model.named_modules() if fits(name, each)] for each in wanted}
    missing = [each for each, modules in by_wanted.items() if not modules]
    if missing and check:
        raise ValueError(f"{caller}() found no module {', '.join(missing)} in the model")
    found = list(dict.fromkeys(module for modules in by_wanted.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    leaves = get_z3_leaf_modules(model)
    found = _of_classes(leaves, leaf_module_classes, raise_if_not_found, "unset_z3_leaf_modules")
    for module in found:
        _LEAVES.discard(module)
    return found


def _of_classes(
    modules: Iterable[nn.Module], classes: Iterable[type | str], check: bool, caller: str
) -> list[nn.Module]:
    wanted = list(classes)
    types = tuple(each for each in wanted if isinstance(each, type))

    def matches(module: nn.Module) -> bool:
        kind = type(module)
        return isinstance(module, types) or bool({kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & {*wanted})

    found = list(filter(matches, modules))
    if not found and check:
        raise ValueError(f"{caller}() found no module of {', '.join(map(str, wanted))} in the model")
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the model's modules that are set as leaves."""
    return [module for module in model.modules() if module in _LEAVES]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the module was set as a leaf."""
    return model in _LEAVES


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or unset one module as a leaf."""
    if flag:
        _LEAVES.add(model)
    else:
        _LEAVES.discard(model)


def note_leaves(model: nn.Module, config: Config) -> list[nn.Module]:
    """Set as leaves those that the configuration names, as DeepSpeed does; return all leaves of the model."""
    _LEAVES.update(named_leaves(model, config))
    return get_z3_leaf_modules(model)


def policy_for(model: Any, config: Any) -> Callable[[str, nn.Module], bool] | None:
    """Return the wrap policy for a model with leaves: the leaves, and the configuration's units that are not inside
    one. None if there are no leaves, or nothing is sharded."""
    leaves = get_z3_leaf_modules(model) if isinstance(model, nn.Module) else []
    stage, policy = _stage_and_policy(config)
    if not leaves or stage != 3:
        return None
    units = {id(unit) for unit in units_with_leaves(model, policy, leaves)}
    return lambda _, module: id(module) in units


def _stage_and_policy(config: Any) -> tuple[Any, Any]:
    if isinstance(config, Config):
        return config.stage, config.wrap_policy
    if not isinstance(config, Mapping):
        return None, None
    zero, own = config.get("zero_optimization"), config.get("longshore")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    policy = own.get("wrap_policy", "auto") if isinstance(own, Mapping) else "auto"
    return _as_read("stage", stage), _as_read("wrap_policy", policy)


def _as_read(field: str, value: Any) -> Any:
    """Return a file's value as the engine reads it; None if it is illegal, which initialize() reports."""
    kind = kind_in(Config.model_fields[field].metadata)
    return kind.converted(value) if (read := kind.read(value)) is None else read
