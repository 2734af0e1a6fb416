"""Mutants of the simulated transfer, and of what all transfers share."""

from __future__ import annotations

from mutants.mutant import SIMULATED, Mutant

MUTANTS = [
    Mutant(
        "the host waits for each copy of a tile",
        "wait_for_all",
        "for copy in sorted(set(copies), key=lambda each: each.order, reverse=True):",
        "for copy in sorted(set(copies), key=lambda each: each.order):",
        ("tests/transfer/test_copy_stream.py",),
    ),
    Mutant(
        "a copy does not wait for the one it comes after",
        "SimulatedCopyStream._start",
        "after.wait()",
        "pass",
        (SIMULATED,),
    ),
    Mutant("a copy is not waited for", "SimulatedCopy.wait", "self._finished.wait()", "", (SIMULATED,)),
    Mutant(
        "a copy that failed says nothing",
        "SimulatedCopy.finish",
        "self._failure = failure",
        "",
        (SIMULATED,),
    ),
    Mutant(
        "a copy that is done keeps its source",
        "SimulatedCopy.finish",
        "self._source = None",
        "",
        (SIMULATED,),
    ),
    Mutant(
        "a copy does not own its source",
        "SimulatedCopy.__init__",
        "self._source: Tensor | Bundle | None = source",
        "self._source: Tensor | Bundle | None = None",
        (SIMULATED,),
    ),
    Mutant(
        "a stream that reads freed memory says nothing",
        "_copy_from",
        "raise RuntimeError('the source of a copy was freed before the copy ran')",
        "return",
        (SIMULATED,),
    ),
    Mutant("copies run at once", "SimulatedCopyStream._start", "time.sleep(delay_s)", "pass", (SIMULATED,)),
    Mutant(
        "any number of bytes is on its way",
        "CopyStream.copy",
        "while self._copies and (self._copies[0][0].done() or self._bytes + num_bytes > self.limit_bytes):",
        "while self._copies and self._copies[0][0].done():",
        (SIMULATED,),
    ),
    Mutant(
        "what is read is the device's own memory",
        "CopyStreams.read",
        "return source.clone()",
        "return source",
        (SIMULATED,),
    ),
    Mutant(
        "publishing is not waited for",
        "SimulatedCopyStream.before_current",
        "self.drain()",
        "return",
        ("tests/tiles/test_tiles.py",),
    ),
    Mutant(
        "delays do not come from the seed",
        "SimulatedCopyStream.__init__",
        "self._random = random.Random(f'{name} {seed}')",
        "self._random = random.Random()",
        (SIMULATED,),
    ),
    Mutant("threads outlive the transfer", "SimulatedCopyStream.close", "self._thread.join()", "", (SIMULATED,)),
    Mutant(
        "a stream at rest keeps its last copy alive",
        "_run_jobs",
        "del job",
        "",
        (SIMULATED,),
    ),
]
