"""``simccl``: collectives of simulated devices, on streams of the group's own as nccl's are; gloo moves the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_device.registration import NAME, native

_c10d: Any = torch._C._distributed_c10d


_At = Callable[[Tensor], Tensor]


class Work:
    """Handle of a collective on a stream. As with nccl, waiting for it lets the current stream wait, not the host."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return True


class SimulatedCollectives(dist.ProcessGroup):
    """Process group of simulated devices."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Two groups, since a collective is known by how many came before it: those of streams run at other times.
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("streams", store), rank, size, timeout)
        self._on_the_host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}
        self._world_size = size
        self._aborted = threading.Event()
        self._names: dict[str, str] = {}

    def _on_stream(self, tensors: Sequence[Tensor], call: Callable[[Any, _At], Any], kind: str) -> Any:
        """Put a collective on its stream, after what is on the current one. ``call`` gets gloo's group, and a function
        that returns each tensor as gloo can use it."""
        device = tensors[0].device
        if device.type == "cpu":
            return call(self._on_the_host, lambda tensor: tensor)
        assert all(each.device == device and each.is_contiguous() for each in tensors)
        if (device, kind) not in self._streams:
            self._streams[device, kind] = torch.Stream(device)
        stream = self._streams[device, kind]
        stream.wait_stream(torch.accelerator.current_stream(device))
        memory = {id(each): native().for_kernels(each.detach()) for each in tensors}
        for each in tensors:
            each.record_stream(stream)

        def run() -> None:
            try:
                call(self._gloo, lambda tensor: memory[id(tensor)]).wait()
            except RuntimeError:
                self._aborted.wait()  # a rank has ended: as with nccl, the stream stands still

        native().call_on_stream(device.index, stream.stream_id, run)
        return Work(stream.record_event(), device)

    def _together(self, tensors: Sequence[Tensor], call: Callable[[Any, _At], Any]) -> Any:
        return self._on_stream(tensors, call, "collective")

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        options = opts or _c10d.AllreduceOptions()
        return self._together(tensors, lambda gloo, at: gloo.allreduce([at(each) for each in tensors], options))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._together(tensors, lambda gloo, at: gloo.broadcast([at(each) for each in tensors], opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def call(gloo: Any, at: _At) -> Any:
            received = [[at(each) for each in outputs[0]]]
            return gloo.allgather(received, [at(each) for each in inputs], _c10d.AllgatherOptions())

        return self._together([*inputs, *outputs[0]], call)

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> Any:
        def call(gloo: Any, at: _At) -> Any:
            received = list(at(output).view(-1).chunk(self._world_size))
            return gloo.allgather([received], [at(part).reshape(-1)], _c10d.AllgatherOptions())

        return self._together([output, part], call)

    _allgather_base = all_gather_single

    def all_to_all_single(self, output: Tensor, source: Tensor, received: Any, sent: Any, opts: Any = None) -> Any:
        def call(gloo: Any, at: _At) -> Any:
            return gloo.alltoall_base(at(output), at(source), received, sent, _c10d.AllToAllOptions())

        return self._together([output, source], call)

    alltoall_base = all_to_all_single

    # Messages to and from each rank have streams of their own: with one, two ranks that send first would wait for ever.

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._on_stream(
            tensors, lambda gloo, at: gloo.send([at(each) for each in tensors], to, tag), f"send to {to}"
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._on_stream(
            tensors, lambda gloo, at: gloo.recv([at(each) for each in tensors], source, tag), f"receive from {source}"
        )

    def abort(self) -> None:
        """Let streams that wait for a rank that has ended go on."""
        self._aborted.set()

    def barrier(self, opts: Any = None) -> Any:
        return self._on_the_host.barrier(_c10d.BarrierOptions())

    # torch asks a process group that Python defines for these.

    def getBackendName(self) -> str:
        return "simccl"

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, name: str) -> None:
        self._names["description"] = name

    @property
    def group_name(self) -> str:
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        return self._names["description"]


def _all_gather(part: Tensor, size: int, name: str) -> Tensor:
    output = part.new_empty((size * part.shape[0], *part.shape[1:]))
    dist.all_gather_single(output, part.contiguous(), dist.distributed_c10d._resolve_process_group(name))
    return output


def _all_reduce(tensor: Tensor, operation: str, name: str) -> Tensor:
    reduced = tensor.clone()
    operations = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
    dist.all_reduce(reduced, operations[operation], dist.distributed_c10d._resolve_process_group(name))
    return reduced


_functional = torch.library.Library("_c10d_functional", "IMPL")


def register() -> None:
    """Make ``simccl`` known to ``torch.distributed``, for simulated devices and the CPU."""
    dist.Backend.register_backend("simccl", SimulatedCollectives, devices=[NAME, "cpu"])
    # What DTensors call does not find a group that Python defines.
    for key in ("PrivateUse1", "CPU"):
        _functional.impl("all_gather_into_tensor", _all_gather, key)
        _functional.impl("all_reduce", _all_reduce, key)
