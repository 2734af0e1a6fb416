"""Mutants of the device path: each wait, mark and kept reference of it taken away. Their tests run on the simulated
accelerator."""

from __future__ import annotations

from mutants.mutant import SPLIT, Mutant

FILE = "transfer/device.py"
TRANSFER = "tests/transfer/test_device.py"
OPTIM = "tests/optim/test_device.py"
CHECKPOINT = "tests/checkpoint/test_device.py"
ENGINE = "tests/engine/test_on_device.py"
CAPTURE = "tests/simulated_device/test_capture.py"
TIMES = "tests/tracing/test_device_times.py"
COUNTED = "tests/simulated_device/test_counted.py"
RESIDENT = "tests/simulated_device/test_triton_kernels.py"
HOST_INPUTS = "tests/engine/test_host_inputs.py"
INPUTS = "engine/host_inputs.py"
STREAM = "tests/streaming/test_stream.py"
STREAMED = "streaming/parameters.py"
RESIDENCE = "streaming/blocks.py"
KILLED = f"{ENGINE}::test_a_rank_killed_while_a_collective_is_under_way_is_named_within_seconds"
TWO_RANKS = f"{ENGINE}::test_two_ranks"


def _mutant(name: str, original: str, changed: str, *tests: str, file: str = FILE) -> Mutant:
    return Mutant(name, file, original, changed, tests, on_device=True)


MUTANTS = [
    _mutant(
        "a copy to the host does not wait for its mark",
        "            for mark in ready:\n                self.stream.wait_event(mark)\n",
        "",
        TRANSFER,
    ),
    _mutant(
        "a copy to the host does not wait for what still reads its slot",
        "            if isinstance(after, DeviceCopy):\n                self.stream.wait_event(after.event)\n",
        "",
        TRANSFER,
    ),
    _mutant(
        "a copy does not keep its source",
        "        copy = DeviceCopy(source, target, event)\n",
        "        copy = DeviceCopy(copy_now, target, event)\n",
        TRANSFER,
    ),
    _mutant(
        "a copy is done before it has run",
        "if self._kept is not None and self.event.query():",
        "if self._kept is not None:",
        TRANSFER,
    ),
    _mutant("the host does not wait for a copy", "            wait_for(self.event)\n", "            pass\n", TRANSFER),
    _mutant(
        "a wait keeps a CPU busy",
        "            wait_for(self.event)\n",
        "            self.event.synchronize()\n",
        TRANSFER,
    ),
    _mutant(
        "copies are not timed",
        "            begun = timed_event(self.stream) if timed else None\n",
        "            begun = None\n",
        TIMES,
    ),
    _mutant(
        "the rest of the backward is exposed",
        "None if self._clock is None else self._clock.mark()\n\n    def step",
        "None\n\n    def step",
        TIMES,
        file="tracing/events.py",
    ),
    _mutant(
        "the rest of the backward is a part of the norm",
        "        if name == NORM and self._clock is not None:\n",
        "        if False:\n",
        TIMES,
        file="tracing/events.py",
    ),
    _mutant(
        "what the next forward waits for is not exposed",
        "        end_ns = max(event.end_ns, event.device_end_ns)\n",
        "        end_ns = event.end_ns\n",
        TIMES,
        file="tracing/events.py",
    ),
    _mutant(
        "a copy runs on the current stream",
        "current_stream_is(self.stream), torch.no_grad():\n            # Only",
        "torch.no_grad():\n            # Only",
        TRANSFER,
    ),
    _mutant(
        "a copy blocks the host",
        "if isinstance(source, Bundle) else source, non_blocking=True)",
        "if isinstance(source, Bundle) else source)",
        TRANSFER,
        file="transfer/base.py",
    ),
    _mutant(
        "a mark is one of another stream",
        "return self.stream().record_event()",
        "return self._beside.record_event()",
        TRANSFER,
    ),
    _mutant(
        "work aside does not wait for its mark",
        "            for each in ready:\n                self._beside.wait_event(each)\n",
        "",
        TRANSFER,
    ),
    _mutant(
        "work aside runs on the current stream",
        "        with current_stream_is(self._beside):\n            for each in ready:\n",
        "        with contextlib.nullcontext():\n            for each in ready:\n",
        TRANSFER,
    ),
    _mutant(
        "work aside is not done at the end of its block",
        "                wait_for(self._beside.record_event())\n",
        "                pass\n",
        TRANSFER,
    ),
    _mutant(
        "a bucket waits for the last hook's stream alone",
        "for each in {self.stream(), *streams}]",
        "for each in {self.stream()}]",
        f"{ENGINE}::test_gradients_of_one_bucket_that_are_computed_on_two_streams",
    ),
    _mutant(
        "a gradient that is read aside is freed at once",
        "        source.record_stream(self._beside)\n",
        "        pass\n",
        TWO_RANKS,
    ),
    _mutant(
        "publishing does not wait for what still reads the parameters",
        "        self.to_device.stream.wait_stream(self.stream())\n",
        "        pass\n",
        TRANSFER,
    ),
    _mutant(
        "later work does not wait for what is published",
        "        self.stream().wait_stream(self.to_device.stream)\n",
        "        pass\n",
        TRANSFER,
    ),
    _mutant(
        "a read does not block",
        "        return source.cpu()\n",
        '        return source.to("cpu", non_blocking=True)\n',
        TRANSFER,
    ),
    _mutant(
        "jobs of the host worker are on device 0",
        "        make_current(self.device)\n",
        "        pass\n",
        TRANSFER,
    ),
    _mutant(
        "a stream stays current",
        "        torch.accelerator.set_stream(before)\n",
        "        pass\n",
        TRANSFER,
        OPTIM,
        file="accelerator.py",
    ),
    _mutant(
        "collectives are called on device 0",
        "begin = functools.partial(make_current, device)",
        "begin = functools.partial(make_current, torch.device('cpu'))",
        f"{ENGINE}::test_collectives_are_called_on_the_device_of_their_rank",
        file="sharding/collective_thread.py",
    ),
    _mutant(
        "a stream does not wait for a collective",
        "            self._began(self._group, work, self.device).wait()  # the current stream waits, not the host\n",
        "            self._began(self._group, work, self.device)\n",
        TWO_RANKS,
        file="sharding/data_plane.py",
    ),
    _mutant(
        "a collective that waits for a rank that ended is not ended",
        "            _abort(group, each.device)\n",
        "",
        f"{KILLED}[2-False]",
        file="sharding/device_collectives.py",
    ),
    _mutant(
        "what a collective that was ended should have brought is taken",
        "            self.on_device.check()\n",
        "",
        f"{KILLED}[1-False]",
        file="sharding/collective_thread.py",
    ),
    _mutant(
        "a forward goes on with parameters that were not gathered",
        "                    _raise_in(each.thread, error)\n",
        "                    pass\n",
        f"{KILLED}[3-True]",
        file="sharding/device_collectives.py",
    ),
    _mutant(
        "the host waits for copies that are done",
        "        if not self.done():\n            wait_for(self.event)\n",
        "        if True:\n            wait_for(self.event)\n",
        COUNTED,
    ),
    _mutant(
        "the host waits for each copy of a tile",
        "key=lambda each: each.order, reverse=True)",
        "key=lambda each: each.order)",
        COUNTED,
        file="transfer/base.py",
    ),
    _mutant(
        "clipping takes memory in proportion to the largest parameter",
        "for part in values.split(_SUM_NUMEL)):",
        "for part in [values]):",
        COUNTED,
        file="kernels/reference.py",
    ),
    _mutant(
        "clipping waits for each parameter",
        "            sums.append(_sum_of_squares(part, scale))\n",
        "            sums.append(torch.tensor(_sum_of_squares(part, scale).item()))\n",
        COUNTED,
        file="kernels/reference.py",
    ),
    _mutant(
        "a backward is captured",
        "        refuse_capture(record.device)\n        thread",
        "        thread",
        CAPTURE,
        file="optim/released_gradients.py",
    ),
    _mutant(
        "a step is captured",
        "            refuse_capture(record.device)\n",
        "            pass\n",
        CAPTURE,
        file="optim/core.py",
    ),
    _mutant(
        "a step copies indices to the device each time",
        "if self._last_rows is None or self._last_rows[0] != indices or self._last_rows[1].device != device:",
        "if True:",
        COUNTED,
        file="optim/adoption.py",
    ),
    _mutant(
        "indices stay on the device although others are stepped",
        "if self._last_rows is None or self._last_rows[0] != indices or self._last_rows[1].device != device:",
        "if self._last_rows is None:",
        f"{OPTIM}::test_writes_that_torch_cannot_see",
        file="optim/adoption.py",
    ),
    _mutant(
        "a stream does not wait for gathered parameters",
        "        work.wait()\n        self._after",
        "        self._after",
        TWO_RANKS,
        file="sharding/device_collectives.py",
    ),
    _mutant(
        "an upload is from memory that is freed at once",
        'pinned = tensor if self.device.type == "cpu" else tensor.pin_memory()',
        "pinned = tensor",
        COUNTED,
        file="kernels/device.py",
    ),
    _mutant(
        "a table of segments stays in host memory",
        "return pinned.to(self.device, non_blocking=True)",
        "return pinned",
        RESIDENT,
        file="kernels/device.py",
    ),
    _mutant(
        "sums of squares do not wait for the device",
        "numpy.add.accumulate(sums.cpu().numpy(), axis=1)",
        "numpy.add.accumulate(sums.to('cpu', non_blocking=True).numpy(), axis=1)",
        RESIDENT,
        file="kernels/device.py",
    ),
    _mutant(
        "state that stays is stepped on a stream beside the current one",
        "        with self._current():\n            self._triton.step_tile",
        "        with torch.Stream(self.device):\n            self._triton.step_tile",
        RESIDENT,
        file="kernels/device.py",
    ),
    _mutant(
        "a snapshot does not wait for what is being computed",
        "            torch.accelerator.synchronize(self._device)  # the reader is on another stream\n",
        "",
        RESIDENT,
        file="tiles/snapshot.py",
    ),
    _mutant(
        "less state than asked for stays on the device and nobody says it",
        "    if share < (1.0 - ratio) / 4:\n",
        "    if False:\n",
        f"{SPLIT}::test_a_share_that_does_not_stay_on_the_device_is_said",
        file="tiles/backend.py",
    ),
    _mutant(
        "an input is fetched before it is on the host",
        "        if isinstance(after, DeviceCopy | DeviceFetch):\n            self.stream.wait_event(after.event)\n",
        "",
        HOST_INPUTS,
    ),
    _mutant(
        "an input is fetched into memory that is still in use",
        "        self.stream.wait_event(home.record_event())\n",
        "",
        HOST_INPUTS,
    ),
    _mutant(
        "an input is read before it is fetched",
        "        stream.wait_event(self.event)\n",
        "",
        HOST_INPUTS,
    ),
    _mutant(
        "an input is not known to be used on another stream",
        "            whole.record_stream(stream)\n",
        "            pass\n",
        HOST_INPUTS,
    ),
    _mutant(
        "a fetch that nobody takes keeps nothing",
        "            self._copies[:] = [self._fetch]\n",
        "",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "an input is copied to the host before it is computed",
        "to_host.enqueue(source, host, [to_host.mark_current()], None)",
        "to_host.enqueue(source, host, [], None)",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "inputs are fetched when they are asked for",
        "                    saved.fetch()\n",
        "                    pass\n",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "inputs of a call before are not known",
        "        _latest.call = weakref.ref(self)\n",
        "",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "memory of the host is given to the next input while a copy reads it",
        "        for copy in copies:\n            copy.wait()\n",
        "",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "memory of the host is not used again",
        "if num_bytes <= free[0].nbytes <= num_bytes + num_bytes // 8:",
        "if False:",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "memory of the host of other sizes is kept",
        "while self._free and self.allocated_bytes + num_bytes > self._most_bytes:",
        "while False:",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "an input takes a block that is too small",
        "if num_bytes <= free[0].nbytes <= num_bytes + num_bytes // 8:",
        "if free[0].nbytes <= num_bytes + num_bytes // 8:",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant(
        "what was copied to the host stays on the device",
        "            to_host.forget_finished()\n",
        "",
        HOST_INPUTS,
        file=INPUTS,
    ),
    _mutant("a gradient is used before it is on the host", "            copy.wait()\n", "", STREAM, file=STREAMED),
    _mutant(
        "a gradient leaves before it is computed",
        "enqueue(gradient, host, [self.to_host.mark_current()], None)",
        "enqueue(gradient, host, [], None)",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "gradients leave at the end of backward",
        "            made.grad_fn._set_sequence_nr(_FIRST)\n",
        "            pass\n",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "a parameter that was written is not fetched again",
        "return self._fetch is not None and self._fetched == self._now()",
        "return self._fetch is not None",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "backward takes a parameter that was written since forward",
        "if parameter.rest._version != self.saved.version:",
        "if False:",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "the memory of a block that is given up is kept",
        "            self.twin.data = nowhere(self.twin, self._lanes.device)\n",
        "            pass\n",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "autograd keeps the memory of a parameter",
        "        return SavedValues(self, self._now(), place, use)\n",
        "        return None\n",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "backward does not say which block it uses",
        "        self.use()\n        with torch.no_grad():\n",
        "        with torch.no_grad():\n",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "a parameter that is frozen later has a gradient",
        "        if rest.requires_grad != self.twin.requires_grad:\n",
        "        if False:\n",
        STREAM,
        file=STREAMED,
    ),
    _mutant(
        "what is written unseen between calls is not fetched",
        "            self._resident.begin()\n        self._calls += 1\n",
        "            pass\n        self._calls += 1\n",
        STREAM,
        file="streaming/stream.py",
    ),
    _mutant(
        "a forward that is computed again forgets all blocks",
        " and torch._C._current_graph_task_id() == -1:",
        ":",
        STREAM,
        file="streaming/stream.py",
    ),
    _mutant(
        "the next block is not fetched ahead",
        "            ahead = self._next.get((self._before, block))\n",
        "            ahead = None\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "a block is given up while it is used",
        "        in_use = [block for block in [*self._there, self.kept] if block is not None and block.users]\n",
        "        in_use: list[Block] = []\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "blocks stay on the device",
        "                if other is not block and other is not ahead:\n",
        "                if False:\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "a parameter of two blocks goes with the first",
        "                        if not self._shared(parameter, block, ahead):\n",
        "                        if True:\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "modules keep what was on the device",
        "                        module._parameters[name] = parameter.rest\n",
        "                        pass\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "hooks around a block see nothing",
        "            return tensor if around is None else _Packed(around[0](tensor), around[1])\n",
        "            return tensor\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "two threads share a block",
        "        if self.users and self._thread != threading.get_ident():\n",
        "        if False:\n",
        STREAM,
        file=RESIDENCE,
    ),
    _mutant(
        "what forward writes to a parameter is lost",
        "        if self.twin._version != self._placed:\n",
        "        if False:\n",
        STREAM,
        file=STREAMED,
    ),
]
