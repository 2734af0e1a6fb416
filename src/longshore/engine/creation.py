"""``longshore.Init``: models that are made without their weights on every rank but one."""

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

    On the other ranks parameters go to the meta device as soon as a module has them: shapes and dtypes without memory.
    Buffers are made everywhere. So a machine has one copy of the weights and not one for each of its ranks. With
    ``empty`` no rank has any; :func:`longshore.initialize` then takes ``weights``.

    Random initialization draws on rank 0 what it would have drawn without this context. If all ranks came with the same
    state of torch's CPU generator, they leave with the same, so that what they draw next is also unchanged.

    Args:
        empty: rank 0 too makes no weights.
        enabled: False: does nothing, for scripts that decide by a flag.

    Raises:
        ValueError, RendezvousError: as :func:`longshore.init_distributed`, which is called if it was not yet.
        RuntimeError: one inside another.
        RankError: at the end, where another rank failed inside.
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
                    # The same object: a module may keep it elsewhere too, or be given it again.
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
            self._adopt_generator(self._ranks, error)  # also after an exception: the other ranks come here too

    def _adopt_generator(self, ranks: Ranks, error: BaseException | None) -> None:
        """Take rank 0's generator if all ranks came with the same state, and none of them failed."""
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
    """Return the same parameter without memory, with its attributes."""
    made = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made


def put(other: nn.Parameter, into: Tensor) -> None:
    """Give ``into`` the shape, dtype and memory of ``other``, which is used up; ``into`` keeps its identity, class,
    attributes and hooks."""
    # torch.utils.swap_tensors refuses where there are weak references (nn.LSTM has some), which go on as well, and it
    # leaves hooks behind.
    torch._C._swap_tensor_impl(into, other)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(into, hooks) is not None:
            setattr(into, hooks, getattr(into, hooks))  # as they were, on what it has now
