"""Records what enters and leaves the native kernels, and which collectives leave in which order.

Addresses are no part of a record, the bytes behind them are: before a call those that it reads, behind it those that it
wrote. Calls of one window are a multiset, since tiles may be stepped in any order; collectives are a list for each
process group, since all ranks have to agree on their order.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.kernels import _native

_ITEM_BYTES = {0: 0, 1: 4, 2: 2, 3: 2}
_FP32, _BF16 = 0, 1
_BLOCK_NUMEL = 64
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)


class Window(NamedTuple):
    """What was recorded from one mark to the next."""

    calls: dict[str, int]
    """Native calls by name."""
    bytes: str
    """Digest of the multiset of what they read and wrote."""
    collectives: dict[str, str]
    """By process group, in the order of their first collective; equal ones in a row as "3 broadcast 8xint64"."""
    tensors: str
    """Digest of weights and states at the mark."""


class Recorder:
    """Records from :meth:`recording` on; thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._digests: list[str] = []
        self._collectives: dict[str, list[str]] = {}
        self._groups: list[Any] = []
        self._tables: dict[int, tuple[Any, Sequence[Sequence[int]]]] = {}
        self._inside = threading.local()

    def mark(self, tensors: Iterable[tuple[str, Tensor]]) -> Window:
        """End a window, at whose end these tensors are looked at."""
        held = hashlib.sha256()
        for name, tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
            held.update(f"{name} {local.dtype} {[*local.shape]}".encode())
            held.update(local.view(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b"")
        with self._lock:
            digest = hashlib.sha256("".join(sorted(self._digests)).encode()).hexdigest()
            collectives = {group: _in_short(said) for group, said in self._collectives.items()}
            window = Window(dict(sorted(self._calls.items())), digest[:16], collectives, held.hexdigest()[:16])
            self._calls, self._digests, self._collectives = Counter(), [], {}
        return window

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Stand between longshore and both modules, in whichever modules their functions are by now."""
        replaced = {
            getattr(_native, name): getattr(self, f"_{name}")
            for name in ("step", "step_table", "accumulate", "sum_of_two", "reconcile", "block_sums")
        }
        replaced[_native.SegmentTable] = self._segment_table
        for name in _COLLECTIVES:
            if (function := getattr(dist, name, None)) is not None:
                replaced[function] = self._collective(name, function)
        self._native = {each.__name__: each for each in replaced if each.__module__ == _native.__name__}
        _replace(replaced)
        try:
            yield
        finally:
            # Also in modules that were imported meanwhile.
            _replace({wrapper: original for original, wrapper in replaced.items()})

    def _note(self, name: str, parts: Iterable[object]) -> None:
        digest = hashlib.sha256(name.encode())
        for part in parts:
            digest.update(part if isinstance(part, bytes) else f"|{part!r}|".encode())
        with self._lock:
            self._calls[name] += 1
            self._digests.append(digest.hexdigest())

    # -- native calls ----------------------------------------------------------

    def _step(self, pool: Any, rule: int, buffer: Any, rows: Any, rules: Any, outputs: Any, isa: Any) -> None:
        self._stepped("step", (rule, buffer, rules, outputs), rows, lambda: self._native["step"](
            pool, rule, buffer, rows, rules, outputs, isa))  # fmt: skip

    def _segment_table(self, rows: Sequence[Sequence[int]]) -> Any:
        table = self._native["SegmentTable"](rows)
        self._tables[id(table)] = table, rows
        return table

    def _step_table(self, pool: Any, rule: int, buffer: Any, table: Any, places: Any, rules: Any, outputs: Any,
                    isa: Any) -> None:  # fmt: skip
        rows = [
            (offset, numel, gradient + to, output + there, number, *rest)
            for (offset, numel, to, there, *rest), gradient, output, number in zip(
                self._tables[id(table)][1], *places, strict=True
            )
            if gradient
        ]
        self._stepped("step_table", (rule, buffer, rules, outputs), rows, lambda: self._native["step_table"](
            pool, rule, buffer, table, places, rules, outputs, isa))  # fmt: skip

    def _stepped(self, name: str, tile: Any, rows: Sequence[Sequence[int]], call: Callable[[], None]) -> None:
        rule, (source, target, arrays, numel, form), (scalars, steps), outputs = tile
        masters = outputs is _native.Outputs.MASTERS
        read = []
        for offset, count, gradient, output, number, of_gradient, of_output, stream, place in rows:
            outputs_read = outputs is not _native.Outputs.WRITTEN
            read += [
                (count, of_gradient, of_output, [*scalars[number]], (stream, place, steps[number]) if form else ()),
                *_of_buffer(source, arrays, numel, form, masters, offset, count),
                _bytes(gradient, count * _ITEM_BYTES[of_gradient]),
                _bytes(output, count * _ITEM_BYTES[of_output] if outputs_read else 0),
            ]
        call()
        for offset, count, _, output, _, _, of_output, *_ in rows:
            read += [
                *_of_buffer(target, arrays, numel, form, masters, offset, count),
                _bytes(output, count * _ITEM_BYTES[of_output]),
            ]
        self._note(name, [rule, arrays, form, outputs.name, *read])

    def _accumulate(self, pool: Any, target: int, source: int, dtype: int, numel: int, add: bool, isa: Any) -> None:
        before = _bytes(target, 4 * numel if add else 0), _bytes(source, numel * _ITEM_BYTES[dtype])
        self._native["accumulate"](pool, target, source, dtype, numel, add, isa)
        self._note("accumulate", [dtype, add, *before, _bytes(target, 4 * numel)])

    def _sum_of_two(self, pool: Any, target: int, first: int, second: int, dtype: int, numel: int, isa: Any) -> None:
        before = [_bytes(each, numel * _ITEM_BYTES[dtype]) for each in (first, second)]
        self._native["sum_of_two"](pool, target, first, second, dtype, numel, isa)
        self._note("sum_of_two", [dtype, *before, _bytes(target, 4 * numel)])

    def _reconcile(self, pool: Any, master: int, parameter: int, dtype: int, numel: int, adopt: bool, isa: Any) -> int:
        before = _bytes(master, 4 * numel), _bytes(parameter, numel * _ITEM_BYTES[dtype])
        found = self._native["reconcile"](pool, master, parameter, dtype, numel, adopt, isa)
        self._note("reconcile", [dtype, adopt, *before, found, _bytes(master, 4 * numel)])
        return found

    def _block_sums(self, pool: Any, parameters: Any, scale: Any, isa: Any) -> Any:
        # How many calls measure the parameters, and where their ranges are cut, changes no bit.
        found = self._native["block_sums"](pool, parameters, scale, isa)
        for ranges, sums in zip(parameters, found, strict=True):
            read = b"".join(_bytes(address, numel * _ITEM_BYTES[dtype]) for address, dtype, numel in ranges)
            self._note("block_sums", [[*scale], read, [*sums]])
        return found

    # -- collectives -----------------------------------------------------------

    def _collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "collective", False):  # one that is made of others
                return function(*args, **kwargs)
            self._inside.collective = True
            try:
                given = (*args, *kwargs.values())
                group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
                sizes = [_said(each) for each in given if isinstance(each, (Tensor, list))]
                with self._lock:
                    # Kept, so that no later group has its number.
                    if not any(group is each for each in self._groups):
                        self._groups.append(group)
                    number = next(at for at, each in enumerate(self._groups) if group is each)
                    ranks = "all" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))
                    self._collectives.setdefault(f"{number} of {ranks}", []).append(" ".join([name, *sizes]))
                return function(*args, **kwargs)
            finally:
                self._inside.collective = False

        return called


def _replace(instead: Mapping[Any, Any]) -> None:
    """Replace values wherever longshore's or torch's modules for several processes have them."""
    for module in [*sys.modules.values()]:
        if module.__name__.startswith(("longshore", "torch.distributed")):
            for name, value in [*vars(module).items()]:
                if callable(value) and _hashable(value) and value in instead:
                    setattr(module, name, instead[value])


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True


def _in_short(said: Sequence[str]) -> str:
    return "; ".join(f"{len([*same])} {each}" for each, same in itertools.groupby(said))


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.numel()}x{str(value.dtype).removeprefix('torch.')}"
    return f"[{' '.join(_said(each) for each in value if isinstance(each, Tensor))}]"


def _bytes(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes) if num_bytes else b""


def _of_buffer(
    address: int, arrays: int, numel: int, form: int, own_master: bool, offset: int, count: int
) -> Iterator[bytes]:
    """A segment's elements of each array of a buffer (docs/states.md), and the scales of their blocks."""
    states = arrays
    if not own_master:
        states -= 1
        yield _bytes(address + 4 * offset, 4 * count)
        address += 4 * numel
    width = 4 if form == _FP32 else 2 if form == _BF16 else 1
    stride = -(-numel * width // 4) * 4
    for state in range(states):
        yield _bytes(address + state * stride + width * offset, width * count)
    if width == 1:
        first, last = offset // _BLOCK_NUMEL, -(-(offset + count) // _BLOCK_NUMEL)
        scales = address + states * stride
        for state in range(states):
            yield _bytes(scales + 4 * (state * -(-numel // _BLOCK_NUMEL) + first), 4 * (last - first))
