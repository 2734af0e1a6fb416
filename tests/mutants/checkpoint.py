"""Mutants of checkpoints and of the snapshots that they are written from."""

from __future__ import annotations

from mutants.mutant import ASYNC, FOLDER, MEMORY, ONE_LINE, RESHARDING, RESUME, SNAPSHOT, Mutant

MUTANTS = [
    # -- snapshots ------------------------------------------------------------
    Mutant(
        "a buffer is stepped in place while it is written",
        "tiles/snapshot.py",
        "            if buffer not in self._pending_reads:\n",
        "            if buffer is buffer:\n",
        (f"{ASYNC}::test_training_goes_on",),
    ),
    Mutant(
        "a buffer that is still to be written is handed out again",
        "tiles/memory.py",
        "        if self._pending_reads is not None and buffer in self._pending_reads:\n",
        "        if buffer is None:\n",
        (f"{ASYNC}::test_training_goes_on",),
    ),
    Mutant(
        "what has no gradient is not copied to the other buffer",
        "tiles/backend.py",
        "                into[:, part] = buffer[:, part]\n",
        "                pass\n",
        (f"{ASYNC}::test_training_goes_on",),
    ),
    Mutant(
        "state is written into a buffer that a snapshot reads",
        "tiles/store.py",
        "            backend.snapshots.make_writable(tile)\n",
        "",
        (f"{ASYNC}::test_writes_to_state",),
    ),
    Mutant(
        "a buffer is released after its first read",
        "tiles/snapshot.py",
        "            if self._missing[address] == 0:\n",
        "            if address in self._buffers:\n",
        (SNAPSHOT,),
    ),
    Mutant(
        "more memory than granted",
        "tiles/snapshot.py",
        "self._buffers.allocated_bytes + memory_bytes\n",
        "self._buffers.allocated_bytes + 8 * memory_bytes + 100_000\n",
        (f"{ASYNC}::test_no_more_memory_than_granted",),
    ),
    Mutant(
        "buffers that were written are not released",
        "tiles/snapshot.py",
        "            self._buffers.clear()\n",
        "            pass\n",
        (f"{ASYNC}::test_training_goes_on",),
    ),
    Mutant(
        "a failed write keeps its buffers",
        "checkpoint/saving.py",
        "    finally:\n        content.close()\n",
        "    finally:\n        pass\n",
        (f"{ASYNC}::test_what_fails_is_raised_by_the_next_call",),
    ),
    Mutant(
        "weights are not copied",
        "checkpoint/training_state.py",
        "            boxes = [each.copied() for each in boxes]\n",
        "            pass\n",
        (f"{ASYNC}::test_training_goes_on",),
    ),
    Mutant(
        "a failed write is not raised",
        "checkpoint/saving.py",
        "            raise failure\n",
        "            pass\n",
        (f"{ASYNC}::test_what_fails_is_raised_by_the_next_call",),
    ),
    Mutant(
        "a free buffer counts against the limit",
        "tiles/memory.py",
        "        if free := self._idle.get(buffer_numel) or self._free.get(buffer_numel):\n",
        "        free = self._idle.get(buffer_numel) or self._free.get(buffer_numel)\n"
        "        if free and self.allocated_bytes + self.buffer_bytes(buffer_numel) <= most_bytes:\n",
        (MEMORY,),
    ),
    # -- folders --------------------------------------------------------------
    Mutant(
        "a checksum is not compared",
        "checkpoint/folder.py",
        "            if digest_of(self.path / name) != written.sha256:\n",
        "            if digest_of(self.path / name) == '':\n",
        (f"{FOLDER}::test_a_damaged_one",),
    ),
    Mutant(
        "the pointer is written before the folder has its name",
        "checkpoint/folder.py",
        "        asides = take_name(self.path, ",
        "        write_latest(self.root, self.tag)\n        asides = take_name(self.path, ",
        (FOLDER,),
    ),
    Mutant(
        "what the pointer names is pruned",
        "checkpoint/folder.py",
        " if whole.tag != latest]\n",
        "]\n",
        (FOLDER,),
    ),
    Mutant(
        "checkpoints of other runs are pruned",
        "checkpoint/folder.py",
        "            if whole.run == run and not kept:\n",
        "            if not kept:\n",
        (FOLDER,),
    ),
    Mutant(
        "a draft stays where writing failed",
        "checkpoint/saving.py",
        "            each.discard()\n",
        "            pass\n",
        (f"{FOLDER}::test_a_full_disk",),
    ),
    Mutant(
        "files that the manifest does not list are read",
        "checkpoint/training_state.py",
        "    if missing:\n",
        "    if False:\n",
        (f"{FOLDER}::test_files_that_the_manifest_does_not_list",),
    ),
    # -- what is saved and loaded ---------------------------------------------
    Mutant(
        "random numbers are not restored",
        "engine/checkpoints.py",
        '            restore_random_states(own["random"], engine.ranks.device)\n',
        "            pass\n",
        (RESUME,),
    ),
    Mutant(
        "step counts are those of the optimizer before",
        "checkpoint/optimizer_state.py",
        'History(entry["step"], ',
        "History(record.history.step, ",
        (RESUME,),
    ),
    Mutant(
        "a half-loaded engine trains on",
        "checkpoint/training_state.py",
        "                state.abandon(failure)\n",
        "                pass\n",
        (f"{RESUME}::test_half_of_a_checkpoint_is_not_trained_on",),
    ),
    Mutant(
        "a half-loaded engine is saved",
        "checkpoint/optimizer_state.py",
        "        store.check_usable()\n",
        "        pass\n",
        (f"{RESUME}::test_half_of_a_checkpoint_is_not_trained_on",),
    ),
    Mutant(
        "a window that a failed load left cannot be left",
        "engine/checkpoints.py",
        "        gone = engine.optimizer._core.store.broken is not None and not module_only\n",
        "        gone = False\n",
        (f"{RESUME}::test_half_of_a_checkpoint_is_not_trained_on",),
    ),
    Mutant(
        "every rank writes all of a tensor that all have",
        "checkpoint/model_state.py",
        "        first, last = (numel * rank // self._world_size for rank in (self._rank, self._rank + 1))\n",
        "        first, last = 0, numel\n",
        (f"{RESHARDING}::test_large_tensors_are_shared_out", RESHARDING),
    ),
    Mutant(
        "gradients on the host are lost",
        "checkpoint/one_line.py",
        "if optimizer is not None and optimizer._core.store.broken is None and optimizer._core.gradients_arrived:",
        "if False:",
        (ONE_LINE,),
    ),
]
