"""Mutants of the simulated transfer, and of what all transfers share."""

from __future__ import annotations

from mutants.mutant import SIMULATED, Mutant

FILE = "transfer/simulated.py"

MUTANTS = [
    Mutant(
        "the host waits for each copy of a tile",
        "transfer/base.py",
        "key=lambda each: each.order, reverse=True)",
        "key=lambda each: each.order)",
        ("tests/transfer/test_base.py",),
    ),
    Mutant(
        "a copy does not wait for the one it comes after",
        FILE,
        "                after.wait()\n",
        "                pass\n",
        (SIMULATED,),
    ),
    Mutant("a copy is not waited for", FILE, "        self._finished.wait()\n", "", (SIMULATED,)),
    Mutant(
        "a copy that failed says nothing",
        FILE,
        "        self._failure = failure\n        self._source = None\n",
        "        self._source = None\n",
        (SIMULATED,),
    ),
    Mutant(
        "a copy that is done keeps its source",
        FILE,
        "        self._source = None\n        self._finished",
        "        self._finished",
        (SIMULATED,),
    ),
    Mutant(
        "a copy does not own its source",
        FILE,
        "self._source: Tensor | Bundle | None = source",
        "self._source: Tensor | Bundle | None = None",
        (SIMULATED,),
    ),
    Mutant(
        "a stream that reads freed memory says nothing",
        FILE,
        '        raise RuntimeError("the source of a copy was freed before the copy ran")\n',
        "        return\n",
        (SIMULATED,),
    ),
    Mutant("copies run at once", FILE, "                time.sleep(delay_s)\n", "                pass\n", (SIMULATED,)),
    Mutant(
        "any number of bytes is on its way",
        "transfer/base.py",
        " or self._bytes + source_bytes > self.limit_bytes",
        "",
        (SIMULATED,),
    ),
    Mutant("what is read is the device's own memory", FILE, "return source.clone()", "return source", (SIMULATED,)),
    Mutant(
        "publishing is not waited for",
        "transfer/base.py",
        "the host waits.\n        self.to_device.drain()\n",
        "the host waits.\n        return\n",
        ("tests/tiles/test_store.py",),
    ),
    Mutant(
        "delays do not come from the seed", FILE, 'random.Random(f"{name} {seed}")', "random.Random()", (SIMULATED,)
    ),
    Mutant("threads outlive the transfer", FILE, "        self._thread.join()\n", "", (SIMULATED,)),
    Mutant(
        "a stream at rest keeps its last copy alive",
        FILE,
        "        del job  # the job refers to the stream, which may become garbage before the next job comes\n",
        "",
        (SIMULATED,),
    ),
]
