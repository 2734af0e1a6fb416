"""Placeholders in ``.grad`` of gradients that are on the host, and the hooks that take gradients there."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from longshore.accelerator import is_capturing
from longshore.errors import GradientError, LongshoreError
from longshore.optim.dtensor import held_part, like
from longshore.optim.parameters import ParameterRecord

_WARN_OF_STREAMS = "set_warn_on_accumulate_grad_stream_mismatch"
"""A function that older torch does not have."""


class ReleaseHooks:
    """Two hooks of one parameter, called before and after autograd accumulates into ``.grad``.

    ``before`` removes the placeholder, so that autograd finds None and does not add to it. It is a hook of the
    accumulation node, and not of the tensor, because ``torch.autograd.grad`` runs tensor hooks without accumulating.
    """

    def __init__(self, leaf: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        # A weak reference to it would forbid torch.utils.swap_tensors, by which torch converts some models.
        self._leaf = leaf
        self._before = before
        self._after_handle = leaf.register_post_accumulate_grad_hook(lambda _leaf: after())
        self._node: Node | None = None
        self._before_handle: RemovableHandle | None = None
        self.follow()

    def follow(self) -> None:
        """Hook the leaf's present node: converting a model to another dtype and back makes a new node."""
        leaf, before = self._leaf, self._before
        if not leaf.requires_grad:
            return  # it was frozen, and has no node
        with torch.enable_grad():  # conversions run without
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        if node is self._node:
            return
        # After swap_tensors the tensor has the dictionary of its hooks, which torch does not call.
        leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
        # The tensor refers to its node weakly; the node must live as long as the hook. A node that is given no gradient
        # accumulates nothing.
        self._node = node
        if leaf.device.type != "cpu" and (warn := getattr(torch.autograd.graph, _WARN_OF_STREAMS, None)) is not None:
            warn(False)  # torch warns that the node of a forward on another stream was kept, and orders both itself
        self._before_handle = node.register_prehook(lambda gradients: before() if gradients[0] is not None else None)

    def remove(self) -> None:
        """Remove the hooks. A placeholder stays in ``.grad``: a use of the gradient raises an error."""
        self._after_handle.remove()
        if self._before_handle is not None:
            self._before_handle.remove()


def remove_all(hooks: Mapping[int, ReleaseHooks]) -> None:
    """Remove the hooks of all parameters."""
    for hook in hooks.values():
        hook.remove()


# These operations read no values, and torch calls them before operations that raise the error below.
_HARMLESS = frozenset(
    {"__get__", "__repr__", "__hash__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size",
     "is_floating_point", "is_complex", "is_contiguous", "is_inference", "requires_grad_",
     "_has_compatible_shallow_copy_type"}
)  # fmt: skip
# Module.to(), .float(), .share_memory() and others call these, for the parameter and then for its .grad.
_CONVERSIONS = frozenset({"to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "share_memory_"})
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


class ReleasedGradient(Tensor):
    """Placeholder in ``.grad`` for a gradient that is on the host."""

    parameter_name: str
    converted = False
    """Whether its dtype was another one: the gradient on the host was not rounded as torch would have done."""
    hooks: Callable[[], ReleaseHooks | None] = staticmethod(lambda: None)
    """Returns the hooks of the parameter, which a conversion may have to set again."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            result = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(result, ReleasedGradient) and isinstance(args[0], ReleasedGradient):
                result.parameter_name = args[0].parameter_name  # for example, after .data
            return result
        if name in _CONVERSIONS and isinstance(args[0], ReleasedGradient):
            if (hooks := args[0].hooks()) is not None:
                hooks.follow()
            return args[0].as_converted(lambda one: func(one, *args[1:], **(kwargs or {})))
        if func == _SET_DATA and isinstance(args[1], ReleasedGradient) and isinstance(args[0], ReleasedGradient):
            args[0].parameter_name, args[0].converted = args[1].parameter_name, args[1].converted
            return super().__torch_function__(func, types, args)
        if CompileContext.try_get() is not None:
            # torch.compile describes each parameter that it reads, its .grad too, and computes nothing with them.
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _moved(args, name)

    def as_converted(self, convert: Callable[[Tensor], Any]) -> Any:
        """Return the result of a conversion of the whole model: the placeholder, or one of another dtype or device.

        torch converts a parameter before its gradient, so an error here would leave a model that is half converted.
        """
        with torch._C.DisableTorchFunctionSubclass():
            one = convert(_one_nan(self.dtype, self.device))
            if not isinstance(one, Tensor) or (one.dtype, one.device) == (self.dtype, self.device):
                return self if isinstance(one, Tensor) else one
            other = one.expand(self.shape).as_subclass(type(self))
        other.parameter_name, other.hooks = self.parameter_name, self.hooks
        other.converted = self.converted or one.dtype != self.dtype
        return other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # A DTensor calls operations of its shard, and autograd adds to a placeholder that has lost its optimizer.
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device") or args[0].device
            return args[0].as_converted(lambda one: one.to(device, (kwargs or {}).get("dtype") or one.dtype))
        raise _moved(args, func.__name__.partition(".")[0])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<gradient of {self.parameter_name}, held on the host by longshore>"


@functools.cache
def _one_nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class ReleasedShard(ReleasedGradient):
    """This process's shard of a placeholder that is a ``DTensor``."""

    def __iadd__(self, other: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``other``: FSDP2 adds to the shard of a gradient, and a placeholder has no values to add."""
        return other


def _moved(args: Any, asking: str) -> LongshoreError:
    placeholders = (leaf for leaf in tree_leaves(args) if isinstance(leaf, ReleasedGradient))
    name = next((f"parameter {each.parameter_name}" for each in placeholders), "a parameter")
    if (stepping := _stepping()) is not None:
        kind = type(stepping)
        return LongshoreError(
            f"{name}: its gradient is on the host, where an engine, or an optimizer with release_gradients=True, steps "
            f"it, and {kind.__module__}.{kind.__qualname__}, which steps now, has the same parameter; {_KEEP_ONE}"
        )
    return LongshoreError(
        f"{name}: its gradient is on the host (as under every engine, and with release_gradients=True), and {asking} "
        "asked for it. With an engine, set gradient_clipping in its configuration, call engine.get_global_grad_norm(), "
        "and read or set gradients by longshore.utils.safe_get_full_grad() and safe_set_full_grad(). With an optimizer "
        "alone, call optimizer.clip_grad_norm_() and optimizer.grad_norm() (where Accelerate has prepared it: "
        "optimizer.optimizer.clip_grad_norm_(), if accelerator.sync_gradients), and use release_gradients=False where "
        ".grad itself is read or edited, and for a GradScaler. To discard gradients, set them to None "
        "(zero_grad(set_to_none=True))"
    )


_KEEP_ONE = (
    "one of the two has to step it: call step() of the other alone, or end the other (destroy() of an engine, close() "
    "of an optimizer), call zero_grad(), and go on with this one"
)


def _stepping() -> torch.optim.Optimizer | None:
    """Return the optimizer of torch, or of another library, whose ``step()`` asks for a gradient now."""
    if torch.compiler.is_compiling():  # which cannot trace a look at frames
        return None
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer) and frame.f_code.co_name == "step":
            return None if hasattr(owner, "_core") else owner
        frame = frame.f_back
    return None


def is_released(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a placeholder, or a ``DTensor`` whose shard in this process is one."""
    if gradient is None or type(gradient) is Tensor:
        return False
    return isinstance(gradient, ReleasedGradient) or isinstance(held_part(gradient), ReleasedGradient)


def in_compiled_autograd() -> bool:
    """Return whether the backward under way is one that ``torch.compile`` made (compiled autograd)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def refuse_compiled_autograd() -> None:
    """Raise GradientError if a backward that begins now, or the one under way, is compiled as a whole."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region):
        raise GradientError(
            "compiled autograd makes one program of a backward, in which ranks cannot reduce gradients as they come; "
            "set torch._dynamo.config.compiled_autograd = False for an engine on several ranks (torch.compile of the "
            "model, or of its parts, works)"
        )


def refuse_capture(device: torch.device) -> None:
    """Raise LongshoreError if a graph is being captured on ``device``: a replay calls neither hooks nor the host."""
    if is_capturing(device):
        raise LongshoreError(
            "a graph of the device is being captured, and longshore copies gradients to the host in hooks, and steps "
            "there: a replay of the graph would do neither; capture the forward alone, and call backward() and step() "
            "outside of the graph"
        )


def is_converted(placeholder: Tensor) -> bool:
    """Return whether a placeholder was converted to another dtype, if only for a while."""
    return getattr(held_part(placeholder), "converted", False)


def new_placeholder(record: ParameterRecord, hooks: ReleaseHooks | None) -> Tensor:
    """Return a placeholder of a parameter's shape and dtype; it takes no memory."""
    kind = ReleasedShard if record.keeps_shard else ReleasedGradient
    # One element of memory serves all placeholders of a dtype and device.
    placeholder = _one_nan(record.dtype, record.device).expand(record.kept.shape).as_subclass(kind)
    placeholder.parameter_name = record.name
    if hooks is not None:
        placeholder.hooks = weakref.ref(hooks)
    return like(record.parameter, placeholder) if record.keeps_shard else placeholder


def gradient_of(record: ParameterRecord) -> Tensor | None:
    """Return ``.grad`` of a parameter; None, and make it so, if it was discarded where a script has the parameter that
    a shard replaced."""
    former = record.former
    if former is not None and former.grad is not record.left:
        put_gradient(record, None)
    return record.parameter.grad


def put_gradient(record: ParameterRecord, placeholder: Tensor | None) -> None:
    """Set ``.grad`` of a parameter, and of the one that a shard replaced, which has no elements: code that clips or
    reads gradients there, or looks whether there are any, learns that they are on the host."""
    record.parameter.grad, record.left = placeholder, None
    if (former := record.former) is not None:
        if placeholder is not None:
            record.left = _one_nan(former.dtype, former.device).expand(former.shape).as_subclass(ReleasedGradient)
            record.left.parameter_name = record.name
        former.grad = record.left


def foreign(record: ParameterRecord) -> GradientError:
    """Return the error for a placeholder that stands for no gradient of this window."""
    return GradientError(
        f"the .grad of parameter {record.name} is a placeholder that does not stand for its gradient of this window: "
        "with release_gradients=True, .grad cannot be saved, converted to another dtype, moved or shared between "
        "optimizers, and it is lost with close() and where its parameter is out of its group at zero_grad() "
        "(zero_grad() discards this window, and training can go on)"
    )


def elsewhere(record: ParameterRecord) -> GradientError:
    """Return the error for a gradient that an optimizer in default mode asks for, and that is on the host."""
    return GradientError(
        f"parameter {record.name}: its gradient is on the host, to which another engine, or optimizer with "
        "release_gradients=True, of the same parameter took it, and this optimizer, in the default mode, steps those "
        f"in .grad; {_KEEP_ONE}"
    )


def concurrent(record: ParameterRecord) -> GradientError:
    """Return the error for a parameter into which two threads accumulate at the same time."""
    return GradientError(
        f"two threads accumulate the gradient of parameter {record.name} at the same time, and with "
        "release_gradients=True a part of it would be lost; run one backward after the other, or use "
        "release_gradients=False"
    )
