"""``longshore.Init``: models whose weights are made on rank 0 only."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from longshore.engine.ranks import Ranks, expected_world_size, join
from longshore.errors import RankError


class Init:
    """Context in which modules have parameters on rank 0 only; :func:`longshore.initialize` gives each rank its part.

    On the other ranks parameters move to the meta device as soon as a module registers them: they have shapes and
    dtypes, but no memory. Buffers are made everywhere. So a machine has one copy of the weights and not one for each of
    its ranks. With ``empty`` no rank has weights, and :func:`longshore.initialize` needs ``weights``.

    Random initialization draws the same numbers on rank 0 as without this context. If all ranks enter with the same
    state of torch's CPU generator, they also leave with the same state, so that later draws are unchanged too.

    Args:
        empty: rank 0 makes no weights either.
        enabled: False makes the context do nothing, for scripts that decide by a flag.

    Raises:
        ValueError, RendezvousError: as for :func:`longshore.init_distributed`, which is called if it was not yet.
        RuntimeError: the context is inside another one.
        RankError: another rank failed inside the context; raised at its end.
    """

    _active = False

    def __init__(self, empty: bool = False, enabled: bool = True) -> None:
        self._empty = empty
        self._enabled = enabled
        self._ranks: Ranks | None = None
        self._before: Tensor | None = None
        self._former: Any = None

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if Init._active:
            raise RuntimeError("longshore.Init is active already; use one around the whole model")
        if expected_world_size() > 1:
            self._ranks = join()
        Init._active = True
        self._before = torch.get_rng_state()
        if self._empty or (self._ranks is not None and self._ranks.rank > 0):
            former = self._former = nn.Module.register_parameter

            def register_parameter(module: Any, name: str, param: nn.Parameter | None) -> None:
                if isinstance(param, nn.Parameter) and not param.is_meta and not is_lazy(param):
                    # The object stays the same: a module may keep it elsewhere too, or register it again.
                    put(on_meta(param), into=param)
                former(module, name, param)

            nn.Module.register_parameter = register_parameter  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._enabled:
            return
        Init._active = False
        if self._former is not None:
            nn.Module.register_parameter, self._former = self._former, None
        if self._ranks is not None:
            self._adopt_generator(self._ranks, error)  # also after an exception, since the other ranks gather here

    def _adopt_generator(self, ranks: Ranks, error: BaseException | None) -> None:
        """Take the state of rank 0's generator if all ranks entered with the same state and none of them failed."""
        assert self._before is not None
        digest = hashlib.blake2b(bytes(self._before.tolist()), digest_size=16).hexdigest()
        drawn = torch.get_rng_state() if ranks.rank == 0 and not self._empty else None
        said = ranks.gather((digest, drawn, None if error is None else f"{type(error).__name__}: {error}"))
        digests, states, failures = zip(*said, strict=True)
        if any(failures) and error is None:
            rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
            raise RankError(f"rank {rank} failed inside longshore.Init ({failure}); no rank has a model")
        if not any(failures) and states[0] is not None and len(set(digests)) == 1:
            torch.set_rng_state(states[0])


def on_meta(param: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter on the meta device, with its attributes."""
    made = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made


def put(other: nn.Parameter, into: Tensor) -> None:
    """Give ``into`` the shape, dtype and memory of ``other``, which must not be used afterwards; ``into`` keeps its
    identity, class, attributes and hooks."""
    # torch.utils.swap_tensors refuses tensors with weak references (nn.LSTM has some), although these stay valid, and
    # it does not keep hooks.
    torch._C._swap_tensor_impl(into, other)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(into, hooks) is not None:
            setattr(into, hooks, getattr(into, hooks))  # registers the same hooks on the new memory
