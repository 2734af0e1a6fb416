"""Methods of a streamed model's modules: each runs with its block in use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from longshore.activations import compute_again
from longshore.errors import LongshoreError
from longshore.streaming.blocks import Block, Unwritten, not_compiled
from longshore.streaming.checks import Checkpoint, cache_among
from longshore.streaming.parameters import StreamedParameter

NOT_ONE_GRAPH = (
    "parameters of a streamed model are fetched between its blocks, outside of what is compiled: leave out "
    "fullgraph=True, or compile the blocks; to export the model, call close() of its stream first"
)


class Caller(Protocol):
    """The stream of a model."""

    closed: bool
    checkpoint: Checkpoint

    def call(self, block: Block, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of a module of the model with its block in use."""

    def explain_error(self, error: RuntimeError, name: str, given: Any) -> LongshoreError | None:
        """Return a clearer error for one that a module of this name raised; None: there is none."""


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)


class StreamedMethod:
    """A method of a module that is streamed, which runs with the module's block in use.

    It takes the method's place as an attribute of the module, and looks it up at each call, since it may change.

    Args:
        stream: the model's.
        module: that has the method.
        block: that the module's parameters are in.
        name: of the module in the model.
        method: the method's name.
        watched: the parameters of the module, if it is computed again in backward, instead of keeping what it computes.
    """

    def __init__(
        self,
        stream: Caller,
        module: nn.Module,
        block: Block,
        name: str,
        method: str,
        watched: Sequence[StreamedParameter] | None = None,
    ) -> None:
        self._stream = stream
        self._module = module
        self._block = block
        self._name = name
        self._method = method
        self._watched = watched
        self._own: Any = module.__dict__.get(method)
        """What the module itself had for its class's method, if anything."""
        self._known = _function_of(self._former())
        """The function that it was when the model was called last."""
        functools.update_wrapper(self, self._former(), updated=())  # not what a wrapper has of another of these
        module.__dict__[method] = self
        # copy, deepcopy and pickle of the module all ask for it.
        module.__dict__["__getstate__"] = self._refuse

    @not_compiled
    def _former(self) -> Callable[..., Any]:
        """Return the method as it is without streaming, now."""
        if self._own is not None:
            return self._own
        kind: Any = type(self._module)
        for each in kind.__mro__:
            if (found := vars(each).get(self._method)) is not None:
                return found.__get__(self._module, kind) if hasattr(found, "__get__") else found
        return kind.__getattr__(self._module, self._method)  # of a module that has what another one has

    def follow(self) -> StreamedMethod:
        """Stream the function that took the place of this method since, which may call it; return the one that streams.

        Raises:
            LongshoreError: the method of its class has changed since the last call, too, and it cannot be told whether
                the function in its place has got hold of the method from before or after that.
        """
        found = self._module.__dict__.get(self._method)
        if isinstance(found, StreamedMethod):
            found._known = _function_of(found._former())
            return found
        if found is not None and self._own is None:
            now = self._former()
            if _function_of(now) != self._known:
                raise LongshoreError(
                    f"{self._method} of {self._name or 'the model'} was replaced after longshore.stream(...), and its "
                    "class got another one, too: call the model between the two changes, or make both before "
                    "longshore.stream(...)"
                )
            self._own = now  # as whoever kept it finds it, whatever its class has later
        return StreamedMethod(self._stream, self._module, self._block, self._name, self._method, self._watched)

    @torch.compiler.disable(recursive=False, reason=NOT_ONE_GRAPH)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._stream.closed:
            return self._former()(*args, **kwargs)
        # A method that calls the one that it took the place of is computed again as a whole.
        if self._watched is None or self._block.users or not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        return self._compute_again(self._watched, args, kwargs)

    @not_compiled
    def _compute_again(self, watched: Sequence[StreamedParameter], args: Any, kwargs: Any) -> Any:
        if (cache := cache_among(args, kwargs)) is not None:
            raise LongshoreError(
                f"{self._name} is computed again in backward (checkpoint={self._stream.checkpoint!r}), and would write "
                f"to {cache} again: call the model with use_cache=False while it trains"
            )
        unwritten = Unwritten(self._name, self._module, watched)

        def run(*args: Any, **kwargs: Any) -> Any:
            unwritten.check()
            return self._run(*args, **kwargs)

        result = compute_again(run, args, kwargs, inputs_on_host=self._stream.checkpoint == "cpu")
        unwritten.check_after_forward()
        return result

    @torch.compiler.disable(recursive=False, reason=NOT_ONE_GRAPH)
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._stream.call(self._block, self._former(), args, kwargs)
        except RuntimeError as error:
            if (clearer := self._stream.explain_error(error, self._name, (args, kwargs))) is None:
                raise
            raise clearer from error

    def unwrap(self) -> None:
        """Let the module have its method again, or its later replacement."""
        found = self._module.__dict__.get(self._method)
        if isinstance(found, StreamedMethod):
            del self._module.__dict__[self._method]
            if found._own is not None:
                self._module.__dict__[self._method] = found._own
        self._module.__dict__.pop("__getstate__", None)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"{self._name or 'the model'} is streamed, and a copy would stream the parameters of this one: copy it "
            "before longshore.stream(...), or save its state_dict()"
        )

    __deepcopy__ = __reduce__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._method} of {self._name or 'the model'} is streamed, and has no {name} as a function has: call "
            "close() of the stream before the model is exported or scripted (torch.export, torch.jit.script)"
        )
