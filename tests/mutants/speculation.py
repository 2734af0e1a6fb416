"""Mutants of stepping ahead of the verdict."""

from __future__ import annotations

from mutants.mutant import NORMS, SPECULATION, SPLIT, STEPPING, Mutant

MUTANTS = [
    Mutant(
        "what is measured for the verdict waits for passes",
        "host/speculation.py",
        "        elif self._paused:\n",
        "        elif False:\n",
        (SPECULATION,),
    ),
    Mutant(
        "passes that were put off are forgotten",
        "host/speculation.py",
        "            self._runner.submit(lambda bet=bet: self._run(bet), 0)\n",
        "",
        (SPECULATION,),
    ),
    Mutant(
        "a pass that was put off counts as run",
        "host/speculation.py",
        "if not bet.open or (bet.put_off and self._paused):",
        "if not bet.open:",
        (SPECULATION,),
    ),
    Mutant(
        "the device's part is stepped where the host's cannot be",
        "host/store.py",
        "        for backend in self.backends:\n            self._failure =",
        "        for backend in self.backends[:1]:\n            self._failure =",
        (SPLIT,),
    ),
    Mutant(
        "a parameter is split between two blocks of the norm",
        "host/backend.py",
        "left // NORM_BLOCK_NUMEL * NORM_BLOCK_NUMEL",
        "left",
        (SPLIT,),
    ),
    Mutant(
        "what comes first goes to the host",
        "host/store.py",
        "            self._add(self.backends[0], first)\n",
        "            first, rest = rest, first\n            self._add(self.backends[0], first)\n",
        (SPLIT,),
    ),
    Mutant(
        "the device's part keeps a discarded window",
        "host/store.py",
        "                    backend.end_window(backend.tiles, TileEvent.DISCARD)\n",
        "                    if backend is self.backend:\n"
        "                        backend.end_window(backend.tiles, TileEvent.DISCARD)\n",
        (SPLIT,),
    ),
    Mutant(
        "half a step is forgotten",
        "host/store.py",
        "        if begun or any(tile.state in stepping for tile in self.tiles):\n",
        "        if any(tile.state in stepping for tile in self.backend.tiles):\n",
        (SPLIT,),
    ),
    Mutant(
        "a tile that waits for gradients is stepped ahead",
        "host/speculation.py",
        "forecast is None or not tile.complete or tile.page is None",
        "forecast is None or tile.page is None",
        (SPECULATION,),
    ),
    Mutant(
        "a step is kept whatever the scale",
        "host/speculation.py",
        "        if bet.scale == scale and bet.rules ==",
        "        if bet.rules ==",
        (SPECULATION,),
    ),
    Mutant(
        "a step is kept whatever the options",
        "host/speculation.py",
        "bet.scale == scale and bet.rules == {segment.layout.parameter: step.rule for segment, step in active}",
        "bet.scale == scale",
        (SPECULATION,),
    ),
    Mutant(
        "outputs of a window are not free in the next",
        "host/speculation.py",
        "            self._slots[bet.tile.layout.page_numel, bet.tile.output_bytes].append(bet.slot)\n",
        "            pass\n",
        (SPECULATION,),
    ),
    Mutant(
        "an output is free at once",
        "host/speculation.py",
        "        slot = free.pop()\n",
        "        slot = free[-1]\n",
        (SPECULATION,),
    ),
    Mutant(
        "rules, and with them step counts, are those of an earlier window",
        "host/speculation.py",
        "        self._rules = None\n        self._norms",
        "        self._norms",
        (SPECULATION,),
    ),
    Mutant(
        "a step is kept although what it read was written",
        "host/speculation.py",
        "            tile.redo(self._pool)\n\n    def drop",
        "\n    def drop",
        (SPECULATION,),
    ),
    Mutant(
        "a norm is kept although the gradient was written",
        "host/speculation.py",
        "        self._norms.forget(tile.segments)\n",
        "",
        (SPECULATION,),
    ),
    Mutant(
        "a buffer that is dropped is lost",
        "host/speculation.py",
        "            tile.drop_spare(self._pool)\n",
        "            tile.spare = None\n",
        (SPECULATION,),
    ),
    Mutant(
        "a pass that failed is kept",
        "host/speculation.py",
        "            except Exception:\n                bet.failed = True\n",
        "            except Exception:\n                pass\n",
        (SPECULATION,),
    ),
    Mutant(
        "nothing is learnt from the verdict",
        "host/speculation.py",
        "            self._predictor.observe(scale == self.forecast.scale())\n",
        "            pass\n",
        (SPECULATION,),
    ),
    Mutant(
        "bets are made whatever was learnt",
        "host/speculation.py",
        "        if self._predictor.bets:\n",
        "        if True:\n",
        (SPECULATION,),
    ),
    Mutant(
        "the budget does not bind",
        "host/speculation.py",
        "            if budget < 0:\n                break\n",
        "",
        (SPECULATION,),
    ),
    Mutant(
        "a pass is harvested twice",
        "host/speculation.py",
        "            bet.open = False\n",
        "            pass\n",
        (SPECULATION,),
    ),
    Mutant(
        "passes are not harvested",
        "host/backend.py",
        "        self.speculator.harvest()\n",
        "",
        (SPECULATION,),
    ),
    Mutant(
        "an arrival leaves the step that it voids",
        "host/backend.py",
        "        self.speculator.drop(tile)\n        if segment.arrivals == 1:\n",
        "        if segment.arrivals == 1:\n",
        (SPECULATION,),
    ),
    Mutant(
        "adopted values do not void a step",
        "host/store.py",
        "        self._void(parameter)\n"
        "        for backend, tile, segment in self._placed(parameter):\n"
        "            tile.have_page(backend.pages)\n"
        "            master",
        "        for backend, tile, segment in self._placed(parameter):\n"
        "            tile.have_page(backend.pages)\n"
        "            master",
        (SPECULATION,),
    ),
    Mutant(
        "a gradient that is written does not void a step",
        "host/store.py",
        "        self._void(parameter)\n"
        "        for backend, tile, segment in self._placed(parameter):\n            if which",
        "        if which != GRADIENT:\n            self._void(parameter)\n"
        "        for backend, tile, segment in self._placed(parameter):\n            if which",
        (SPECULATION,),
    ),
    Mutant(
        "a state that is written does not void a step",
        "host/store.py",
        "        self._void(parameter)\n"
        "        for backend, tile, segment in self._placed(parameter):\n            if which",
        "        if which == GRADIENT:\n            self._void(parameter)\n"
        "        for backend, tile, segment in self._placed(parameter):\n            if which",
        (SPECULATION,),
    ),
    Mutant(
        "a pass reads the first gradient in place of the sum",
        "host/tile.py",
        "        if segment.arrivals > 1 and self.accumulator is not None:\n",
        "        if segment.summed and self.accumulator is not None:\n",
        (SPECULATION,),
    ),
    Mutant(
        "a discarded window says what the next one brings",
        "host/tile.py",
        "            if stepped:\n",
        "            if segment.layout.numel:\n",
        (SPECULATION,),
    ),
    Mutant(
        "a gradient that is taken out leaves the version",
        "host/tile.py",
        "            self.move(TileEvent.FORGET)\n            self.version += 1\n",
        "            self.move(TileEvent.FORGET)\n",
        (STEPPING,),
    ),
    Mutant(
        "a tile that was stepped ahead is not published",
        "host/backend.py",
        "            slot.last_publish = self._publish(tile, output, segment.part_of(step.target))\n",
        "            pass\n",
        (SPECULATION,),
    ),
    Mutant(
        "a failure after only kept tiles is forgotten",
        "host/backend.py",
        "        stepped.append(tile)  # its page is the new one: from here on there is no way back\n",
        "",
        (SPECULATION,),
    ),
    Mutant(
        "tiles that were stepped do not end their window",
        "host/backend.py",
        "self.end_window([tile for tile in self.tiles if tile.state is TileState.COMMITTED], TileEvent.PUBLISHED)",
        "pass",
        (SPECULATION,),
    ),
    Mutant(
        "a norm holds whatever arrived since",
        "host/early_norms.py",
        "if sums.scale == scale and sums.versions == [tile.version for tile, _ in self._parts_of(parameter)]",
        "if sums.scale == scale",
        (NORMS, SPECULATION),
    ),
    Mutant(
        "a norm holds at any scale",
        "host/early_norms.py",
        "if sums.scale == scale and sums.versions ==",
        "if sums.versions ==",
        (NORMS, SPECULATION),
    ),
    Mutant(
        "squares are added in another order",
        "host/store.py",
        "(sums[parameter] for parameter in gradients for sums in found if parameter in sums)",
        "(values for sums in found for values in sums.values())",
        (NORMS,),
    ),
    Mutant(
        "what is idle is measured",
        "host/early_norms.py",
        "if all(part.complete and segment.arrivals > 0 for part, segment in parts):",
        "if all(part.complete for part, _ in parts):",
        (NORMS,),
    ),
    Mutant(
        "a norm is measured before all of it is there",
        "host/early_norms.py",
        "if all(part.complete and segment.arrivals > 0 for part, segment in parts):",
        "if all(segment.arrivals > 0 for _, segment in parts):",
        (NORMS,),
    ),
]
