"""Settings of where an optimizer keeps its state, and how it uses the host's memory and threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from longshore.accelerator import is_accelerator
from longshore.byte_sizes import parse_memory_budget
from longshore.kernels import MOST_HOST_THREADS, DeviceKernels, HostKernels, Kernels
from longshore.layout.formats import Coding, StateFormat, is_seed, parse_state_format, stream_of
from longshore.layout.tiles import Home, default_tile_numel
from longshore.optim.dtensor import first_element, flat, held_part, is_sharded, unwrapped
from longshore.store import Store
from longshore.tiles import Accumulate, SpeculationMemory, TierSettings, Tiles, Window
from longshore.transfer import CopyStreams, DeviceStreams, SimulatedTransfer, streams_for


@dataclass(frozen=True)
class Offload:
    """Settings of where masters and moments are, and of the work on the host. Except for ``states``, none changes a bit
    of the result.

    There is one more exception: where gradients that are clipped stay in ``.grad`` on an accelerator without Triton,
    their squares are added in an order of torch's, which may change the last bit of the norm.

    Attributes:
        device: ``"cpu"``: in host memory, stepped there; ``"none"``: where the parameters are, stepped there, and
            nothing is copied. On CUDA the latter needs Triton. For CPU parameters the two are the same.
        tile_numel: elements a tile: the unit that is copied, stepped and copied back. Default: 4 Mi, which is 8 MiB of
            bfloat16 and some 300 microseconds of a PCIe 4 link; 16 Mi where nothing is copied, since a call for each
            tile is then all that smaller ones bring. With more than 16 threads, 256 Ki for each, at most 32 Mi
            (``longshore report`` says it).
        threads: host threads that step; default: what ``longshore launch`` granted, or else one for each CPU that the
            process may use, whatever ``OMP_NUM_THREADS`` says. Optimizers with equal ``threads`` and ``cpu_set`` share
            them.
        cpu_set: logical CPUs that those threads may run on; default: any.
        transfer: how bytes move; default: by the parameters' device. Tests pass a
            :class:`~longshore.transfer.SimulatedTransfer`. With ``device="none"`` nothing moves: a simulated device
            keeps the state.
        speculation_memory: host memory for stepping tiles while backward still runs (with ``release_gradients=True``
            and in engines): a percentage (``"100%"`` is a spare for every tile, nearly as much memory as the
            optimizer's state itself), a size (``"8GiB"``), an integer number of bytes, or ``"auto"``: as much as helps,
            at most a quarter of what is free when it is made, after the first step. 0: none.
        ratio: the share of the elements whose state is on the host, with ``device="cpu"``. The others, whose gradients
            come last, keep theirs on the device and are stepped there, while the host steps its own. For CPU parameters
            both are the same memory.
        states: format of the optimizer's states: ``"fp32"``; ``"bf16"``, rounded stochastically, for 10 bytes of host
            memory a parameter instead of 14; or ``"8bit"``, for 8.1. For Adam, AdamW, Lion, Adagrad and SGD with
            momentum. Masters are float32 in each, and the bits are those of ``docs/states.md``: they do not depend on
            tiles, threads, ranks, stages or resuming.
        states_seed: a number on which, with the parameter's name, the random bits of that rounding depend: from 0 to
            2**63 - 1.
        detect_writes: each step finds what was written to parameters where torch cannot see it (``p.data.copy_``,
            NumPy, another process). Where nothing is copied this takes next to no time; for parameters on a device, it
            takes two passes over them there, for checksums. With False, ``refresh_master()`` has to be called after
            such writes. A float32 parameter in host memory is its own master, and a write to it one to the master.
        accumulate: where several gradients of one window are added, in float32 and in the order of arrival: ``"host"``;
            ``"device"``, where they are, for 4 bytes of its memory a parameter, so that only the sum is copied, in the
            last backward; or ``"auto"``: parameter by parameter on the device while its memory has room, by what the
            windows before took, and a sixteenth of it stays free. It is for gradients that are taken in backward
            (``release_gradients=True``, engines); for CPU parameters both are the same memory.
    """

    tile_numel: int | None = None
    threads: int | None = None
    cpu_set: Sequence[int] | None = None
    transfer: CopyStreams | None = None
    device: str = "cpu"
    speculation_memory: SpeculationMemory = 0
    ratio: float = 1.0
    detect_writes: bool = True
    states: str = StateFormat.FP32.value
    states_seed: int = 0
    accumulate: Accumulate = "auto"
    alone: ClassVar[bool] = True
    """Whether the store is this process's own: no other ranks have a part of its state, or have to act with it."""

    def __post_init__(self) -> None:
        most = (("tile_numel", "elements", 2**63 - 1), ("threads", "host threads", MOST_HOST_THREADS))
        for name, of, limit in most:
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= limit):
                raise ValueError(f"{name} is a number of {of}, at least 1 and at most {limit}, not {count!r}")
        cpus = self.cpu_set
        if isinstance(cpus, (str, bytes)) or (
            cpus is not None and (not cpus or any(type(cpu) is not int or cpu < 0 for cpu in cpus))
        ):
            raise ValueError(f"cpu_set is a sequence of numbers of CPUs, such as [0, 1], or None, not {cpus!r}")
        try:
            parse_memory_budget(self.speculation_memory)
        except ValueError as error:
            raise ValueError(f"speculation_memory {error}, and is {self.speculation_memory!r}") from None
        parse_state_format(self.states)
        if not is_seed(self.states_seed):
            long = isinstance(self.states_seed, int) and self.states_seed.bit_length() > 64
            found = f"one of {self.states_seed.bit_length()} bits" if long else repr(self.states_seed)
            raise ValueError(f"states_seed is an integer from 0 to 2**63 - 1, not {found}")
        if self.states_seed and self.state_format is StateFormat.FP32:
            raise ValueError(
                f"states_seed {self.states_seed} is the seed of the rounding that states='bf16' and '8bit' do, and "
                "states is 'fp32', which rounds nothing: give states, too, or leave states_seed out"
            )
        if self.accumulate not in ("auto", "device", "host"):
            raise ValueError(
                "accumulate is where several gradients of one window are added: 'device', 'host', or 'auto' (on the "
                f"device while it has room), not {self.accumulate!r}"
            )
        if not isinstance(self.detect_writes, bool):
            raise ValueError(f"detect_writes is True or False, not {self.detect_writes!r}")
        if self.device not in ("cpu", "none"):
            raise ValueError(
                f"device is where the optimizer's state is: 'cpu' (host memory) or 'none' (no offload: where the "
                f"parameters are), not {self.device!r}"
            )
        ratio = self.ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
            raise ValueError(f"ratio is the share of the state that is on the host, from 0.0 to 1.0, not {ratio!r}")
        if self.device == "none" and ratio != 1.0:
            raise ValueError(
                f"ratio says how much of the state is on the host, and device='none' leaves none there: leave ratio "
                f"{ratio:g} out, or use device='cpu'"
            )
        if self.device == "none" and self.accumulate != "auto":
            raise ValueError(
                f"accumulate={self.accumulate!r} is for gradients on their way to the host, and device='none' copies "
                "none: leave accumulate out, or use device='cpu'"
            )
        copies_nothing = self.transfer is None or type(self.transfer) is CopyStreams
        if self.device == "none" and not copies_nothing and not isinstance(self.transfer, SimulatedTransfer):
            raise ValueError(
                f"device='none' copies nothing, and a {type(self.transfer).__name__} was given to copy with; "
                "leave transfer out, or use device='cpu'"
            )

    @property
    def takes_shards(self) -> bool:
        """Whether parameters may be DTensors, of which this process has a shard."""
        return True

    @property
    def leaf_of(self) -> Callable[[Tensor], Tensor | None] | None:
        """Function that returns the tensor into which autograd accumulates a parameter's gradient; None: the parameter
        itself. See :meth:`ParameterRecord.leaf`."""
        return None

    def check_member(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError for a parameter that the store could not take."""
        return

    @property
    def leaves_on_device(self) -> bool:
        """Whether any of the state stays where the parameters are."""
        return self.device == "none" or self.ratio < 1.0

    @property
    def state_format(self) -> StateFormat:
        """Format of the states, as far as a parameter's shape allows it."""
        return parse_state_format(self.states)

    def coding_of(self, name: str, parameter: Tensor) -> Coding:
        """Return how the states of a parameter, or of this process's shard of it, are encoded.

        Raises:
            ValueError: the place of the shard in the parameter cannot be told.
        """
        coding = self.coding_in_whole(name, parameter.shape)
        if coding.format is not StateFormat.FP32 and is_sharded(parameter):
            first = first_element(parameter)
            if first is None:
                raise ValueError(
                    f"parameter {name} is sharded in a way for which states={self.states!r} does not know the places "
                    "of its elements: it is for shards along the first dimension; leave states out, or let "
                    "longshore.initialize() shard the model"
                )
            return coding.behind(first)
        return coding

    def coding_in_whole(self, name: str, shape: Sequence[int]) -> Coding:
        """Return how the states of a whole parameter of this name and shape are encoded."""
        return self.state_format.coding_of(shape, stream_of(self.states_seed, unwrapped(name)))

    def streams_to(self, device: torch.device) -> CopyStreams:
        """Return the copy streams between the state and parameters on ``device``."""
        if self.device == "none":
            return DeviceStreams(device) if is_accelerator(device) else CopyStreams()
        return self.transfer or streams_for(device)

    def kernels_for(self, device: torch.device) -> Kernels:
        """Make the kernels that step parameters on ``device``; they run where the state is.

        Raises:
            ValueError: a setting of host steps was given, and the host makes none.
            ModuleNotFoundError: the state is on a CUDA device, and Triton is not installed.
        """
        if self.device == "cpu" or device.type == "cpu":
            return HostKernels(self.threads, self.cpu_set)
        ahead = self.speculation_memory or None
        for name, value in (("threads", self.threads), ("cpu_set", self.cpu_set), ("speculation_memory", ahead)):
            if value is not None:
                raise ValueError(f"device='none' steps on {device}, and no host thread does: leave {name} out")
        return DeviceKernels(device)

    def make_store(
        self, device: torch.device, hold_gradients: bool, parameters: Mapping[int, Tensor], window: Window
    ) -> Store:
        """Make the store of parameters on ``device``.

        Args:
            hold_gradients: whether gradients arrive during backward.
            parameters: a dictionary by index, to which later parameters will be added.
            window: the accumulation window.

        Raises:
            ValueError: ``speculation_memory`` or ``accumulate`` is set, and gradients do not arrive before the step.
        """
        return Store(self.make_tiles(device, hold_gradients, lambda index: flat(held_part(parameters[index])), window))

    def make_tiles(
        self,
        device: torch.device,
        hold_gradients: bool,
        values_of: Callable[[int], Tensor],
        window: Window,
        gradient_dtype: torch.dtype | None = None,
    ) -> Tiles:
        """Make the tiles of a store. Arguments as of :meth:`make_store` and :class:`Tiles`; raises the errors of the
        former."""
        if self.speculation_memory and not hold_gradients:
            raise ValueError(
                "speculation_memory is for stepping while backward brings gradients to the host, and without "
                "release_gradients=True they are .grad until step(): add it, or leave speculation_memory out"
            )
        if self.accumulate != "auto" and not hold_gradients:
            raise ValueError(
                f"accumulate={self.accumulate!r} is for gradients that are taken in backward, and without "
                "release_gradients=True they are added in .grad, in its dtype: add it, or leave accumulate out"
            )
        streams, offloads = self.streams_to(device), self.device == "cpu"
        *others, last = Home.of(offloads, self.ratio, streams.staged if offloads else device.type != "cpu")
        tiers: list[TierSettings] = []
        for home in others:
            host = {"threads": None, "cpu_set": None, "speculation_memory": 0, "ratio": 1.0, "accumulate": "auto"}
            there = replace(self, device="none", **host)
            tiers.append(there._tier(home, device, there.streams_to(device), hold_gradients))
        tiers.append(self._tier(last, device, streams, hold_gradients))
        return Tiles(tiers, gradient_dtype, self.ratio, values_of, window)

    def _tier(self, home: Home, device: torch.device, streams: CopyStreams, hold_gradients: bool) -> TierSettings:
        kernels = self.kernels_for(device)
        tile_numel = self.tile_numel or default_tile_numel(streams.staged, kernels.threads)
        ahead, accumulate = self.speculation_memory, self.accumulate
        return TierSettings(streams, kernels, tile_numel, hold_gradients, ahead, self.detect_writes, accumulate, home)
