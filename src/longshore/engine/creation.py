"""``longshore.Init``: models whose weights are made on rank 0 only, and how other ranks have them for a while."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from longshore.accelerator import accelerator_type
from longshore.engine.ranks import Ranks, expected_world_size, join
from longshore.errors import RankError
from longshore.optim.dtensor import checksum
from longshore.ranks.waiting import finish, gather_from_all


class Unplaced:
    """A parameter of which rank 0 has the values, and other ranks none, until ``initialize()`` places it.

    Attributes:
        number: the same on all ranks, and no other parameter's.
        digests: for each block of ``gather()`` that has it, the checksum that it must have at the end; None: it may be
            written there.
    """

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(Unplaced.numbers)
        self.digests: dict[object, int | None] = {}


_UNPLACED = WeakIdKeyDictionary()
"""The records of these parameters, on all ranks."""


def unplaced(parameter: Tensor) -> Unplaced | None:
    """Return the record of a parameter that ``initialize()`` has not placed yet; None if every rank has its values."""
    return _UNPLACED.get(parameter)


def note_placed(parameter: Tensor) -> None:
    """Note that ``initialize()`` has given each rank its values, or its shard."""
    _UNPLACED.pop(parameter, None)


def _note_unplaced(parameter: Tensor) -> None:
    if parameter not in _UNPLACED:
        _UNPLACED[parameter] = Unplaced()


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
        without_memory = self._empty or (self._ranks is not None and self._ranks.rank > 0)
        if self._empty or self._ranks is not None:
            former = self._former = nn.Module.register_parameter

            def register_parameter(module: Any, name: str, param: nn.Parameter | None) -> None:
                if isinstance(param, nn.Parameter) and not is_lazy(param):
                    if self._ranks is not None:
                        _note_unplaced(param)
                    if without_memory and not param.is_meta:
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


class FirstBlock:
    """Parameters that :class:`Init` made, with their values on every rank inside one block of ``gather()``.

    All ranks have to make it, and to call its methods.

    Args:
        parameters: tensors that are no shards; those of which all ranks have the values stay as they are.
        writes: whether they are to be written.

    Raises:
        RankError: the ranks gather different parameters; nothing was changed.
    """

    def __init__(self, parameters: Sequence[Tensor], writes: bool) -> None:
        once = list({id(each): each for each in parameters}.values())
        lacking = [(each, place) for each, place in zip(once, _places(once), strict=True) if place is not None]
        self.parameters = [each for each, _ in lacking]
        self._memory: list[tuple[Tensor, Tensor]] = []
        """Each parameter, and its memory in the block."""
        self._without_memory: list[tuple[Tensor, Tensor]] = []
        """Those that have none on this rank outside, and what they are then."""
        try:
            for each, place in lacking:
                _note_unplaced(each)
                record = _UNPLACED[each]
                if not record.digests:
                    self._give_values(each, place)
                record.digests[self] = None if writes else checksum(each)
                self._memory.append((each, each.data))
        except BaseException:
            self.leave()
            raise

    def _give_values(self, parameter: Tensor, place: str) -> None:
        if parameter.is_meta:
            self._without_memory.append((parameter, parameter.detach()))
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=_device_of(place))
            put(nn.Parameter(values, parameter.requires_grad), into=parameter)
        send(parameter.data, source=0)

    def problems(self) -> list[str]:
        """Return this rank's changes in the block that cannot stay, by parameter."""
        found = []
        for each, memory in self._memory:
            what, digest = f"a parameter of shape {list(memory.shape)} from before initialize()", self._digest_of(each)
            if not _is_like(each, memory):
                found.append(f"{what} was made {list(each.shape)} {each.dtype} on {each.device} (p.data = x)")
            elif digest is not None and digest != checksum(each):
                found.append(f"{what} was written without modifier_rank")
        return found

    def _digest_of(self, parameter: Tensor) -> int | None:
        return _UNPLACED[parameter].digests[self]

    def write(self, source: int) -> None:
        """Take the values of the rank that writes."""
        for each in self.parameters:
            send(each.data, source)
            for block, digest in _UNPLACED[each].digests.items():
                if digest is not None:
                    _UNPLACED[each].digests[block] = checksum(each)  # another block around this one

    @torch.no_grad()
    def leave(self) -> None:
        for each, memory in self._memory:
            if _is_like(each, memory) and (each.data_ptr(), each.stride()) != (memory.data_ptr(), memory.stride()):
                memory.copy_(each.data)  # p.data = x
            each.data = memory
        for each in self.parameters:
            _UNPLACED[each].digests.pop(self, None)
        for each, values in self._without_memory:
            put(nn.Parameter(values, each.requires_grad), into=each)
        self._memory.clear()


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)


def _shape_of(parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    return parameter.shape, parameter.dtype


def _places(parameters: Sequence[Tensor]) -> list[str | None]:
    """Return the type of rank 0's device for each parameter of which not every rank has the values, and None for the
    others; all ranks have to call.

    Also for a parameter that a script made like one of these on each rank, on the meta device on ranks without memory.
    """
    records = [unplaced(each) for each in parameters]
    whole = [record is not None and bool(record.digests) for record in records]  # in a block around this one
    mine = [(each.is_meta, each.device.type, is_whole) for each, is_whole in zip(parameters, whole, strict=True)]
    said = gather_from_all("entering gather()", (mine, list(map(_shape_of, parameters))))
    for rank, (_, shapes) in enumerate(said):
        if shapes != said[0][1]:
            here, there = ([list(shape) for shape, _ in each][:3] for each in (shapes, said[0][1]))
            raise RankError(
                f"rank {rank} gathers parameters of shapes {here}, and rank 0 {there}; give gather() the same "
                "parameters on every rank"
            )
    found: list[str | None] = []
    for number, parameter in enumerate(parameters):
        on_meta, (first, place, is_whole) = any(flags[number][0] for flags, _ in said), said[0][0][number]
        if not is_whole and not on_meta:
            note_placed(parameter)
        found.append(place if is_whole or (on_meta and not first) else None)
    return found


def _device_of(kind: str) -> torch.device:
    """Return this rank's device of a type."""
    return (
        torch.device(kind, torch.accelerator.current_device_index())
        if kind == accelerator_type()
        else torch.device(kind)
    )


@torch.no_grad()
def send(tensor: Tensor, source: int) -> None:
    """Copy a rank's tensor to all ranks, by way of the device if the process group serves no other memory."""
    if tensor.numel() == 0:
        return
    values, kind = tensor.contiguous(), accelerator_type()
    if kind is not None and f"{tensor.device.type}:" not in str(dist.get_backend_config()):
        values = values.to(_device_of(kind))
    work = dist.broadcast(values.view(-1).view(torch.uint8), src=source, async_op=True)
    finish(work, dist.group.WORLD, values.device)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
