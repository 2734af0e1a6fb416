"""Mutants of Muon."""

from __future__ import annotations

from mutants.mutant import Mutant

MUON = "tests/optim/test_muon.py"
ENGINE = "tests/engine/test_muon.py"
AHEAD = "tests/optim/test_muon_ahead.py"

MUTANTS = [
    Mutant(
        "half a matrix is made orthogonal",
        "tiles/matrix_exchange.py",
        "            return self.rule.transform(shaped).view(-1)\n",
        "            half = shaped.shape[0] // 2\n"
        "            parts = [each for each in (shaped[:half], shaped[half:]) if each.numel()]\n"
        "            return torch.cat([self.rule.transform(each.contiguous()) for each in parts]).view(-1)\n",
        (MUON,),
    ),
    Mutant(
        "fused matrices are made orthogonal together",
        "tiles/matrix_exchange.py",
        "        if len(self.layout.blocks) == 1:\n",
        "        if len(self.layout.blocks) >= 1:\n",
        (MUON,),
    ),
    Mutant(
        "clipping comes after the momentum",
        "tiles/matrices.py",
        "[rule], scale, Outputs.WRITTEN)",
        "[rule], UNSCALED, Outputs.WRITTEN)",
        (MUON,),
    ),
    Mutant(
        "the momentum is bfloat16",
        "tiles/matrices.py",
        "        state = float32_arrays(tile.buffer)[-1:]\n",
        "        state = float32_arrays(tile.buffer)[-1:]\n        state.copy_(state.bfloat16())\n",
        (MUON,),
    ),
    Mutant(
        "weights decay twice",
        "optim/rules/muon.py",
        "decay=float(1 - lr * self.weight_decay))",
        "decay=float(1 - lr * self.weight_decay) ** 2)",
        (MUON,),
    ),
    Mutant(
        "weights decay by the adjusted learning rate",
        "optim/rules/muon.py",
        "decay=float(1 - lr * self.weight_decay))",
        "decay=float(1 - lr * ratio * self.weight_decay))",
        (MUON,),
    ),
    Mutant(
        "all blocks of a fused matrix have the learning rate of the first",
        "tiles/matrices.py",
        "output[here], layout.blocks.index(block))",
        "output[here], 0)",
        (MUON,),
    ),
    Mutant(
        "the update of a matrix in several tiles is that of its first one",
        "tiles/matrices.py",
        "update[part.in_piece]",
        "update[: segment.layout.numel]",
        (MUON,),
    ),
    Mutant(
        "a matrix is brought together from one rank's pieces",
        "sharding/matrices.py",
        "= received[rank][begins[rank] : begins[rank] + numel]\n",
        "= received[0][begins[rank] : begins[rank] + numel]\n",
        (ENGINE,),
    ),
    Mutant(
        "results are taken from a wrong owner",
        "sharding/matrices.py",
        "                piece = received[owner][begins[owner] : begins[owner] + numel]\n",
        "                piece = received[-1 - owner][begins[owner] : begins[owner] + numel]\n",
        (ENGINE,),
    ),
    Mutant(
        "each rank makes its own piece of a matrix orthogonal",
        "sharding/matrices.py",
        "        return all(numel == matrix.numel for _, numel in",
        "        return all(numel <= matrix.numel for _, numel in",
        (ENGINE,),
    ),
    Mutant(
        "a rank whose transformation failed goes away without a word",
        "sharding/store.py",
        "                    exchange.abandon()\n",
        "                    pass\n",
        (f"{ENGINE}::test_a_rank_on_which_a_transformation_fails",),
    ),
    Mutant(
        "a step under autocast is taken",
        "optim/membership.py",
        "    if layout is not None and (device := _autocast_device()):\n",
        "    if False and (device := _autocast_device()):\n",
        (MUON,),
    ),
    Mutant(
        "a loaded state divides parameters anew",
        "optim/state.py",
        "if name not in family.layout_options} | laid_out\n",
        "} | laid_out\n",
        (MUON,),
    ),
    Mutant(
        "a checkpoint of a matrix is loaded into AdamW's group",
        "checkpoint/optimizer_state.py",
        "                    if self._family.of(merged) is not self._family.of(group):\n",
        "                    if False:\n",
        (MUON,),
    ),
    Mutant(
        "the kind of device of a checkpoint is not told",
        "checkpoint/optimizer_state.py",
        "and device != own:\n",
        "and device == own:\n",
        (MUON,),
    ),
    Mutant(
        "a group's marks do not divide it",
        "engine/muon.py",
        "config.others, marks or None, where)\n",
        "config.others, None, where)\n",
        ("tests/engine/test_muon_config.py",),
    ),
    Mutant(
        "AdamW's groups of a configuration have Muon's learning rate",
        "engine/config/optimizers.py",
        "        lr = self.lr if self.adam_lr is None else self.adam_lr\n",
        '        lr = self.options()["lr"]\n',
        ("tests/engine/test_muon_config.py",),
    ),
    Mutant(
        "a rank steps although another has no memory for its matrices",
        "sharding/store.py",
        "            reserve(self.transfer.device, matrices)\n",
        "            pass\n",
        (ENGINE,),
    ),
    Mutant(
        "one rank transforms a large matrix while the others wait",
        "sharding/matrices.py",
        "    most = max(_BATCH_NUMEL, world_size * max((each.numel for each in matrices), default=0))\n",
        "    most = _BATCH_NUMEL\n",
        (ENGINE,),
    ),
    Mutant(
        "what a transformation has overwritten is transformed once more",
        "tiles/matrices.py",
        "                    self.speculator.spend(part.tile)  # the transformation writes it\n",
        "",
        (AHEAD,),
    ),
    Mutant(
        "a part of a matrix that was stepped ahead is not transformed",
        "tiles/matrices.py",
        "                    pieces[work.matrix.parameter][part.in_piece] = part.ahead\n",
        "                    pass\n",
        (AHEAD,),
    ),
    Mutant(
        "the last pass of a matrix that was stepped ahead is over the former momentum",
        "tiles/matrices.py",
        "                self.speculator.keep(tile)  # before the pass, which may fail half way\n"
        "                self._pass(tile, master, float32_arrays(tile.buffer)[:-1]",
        "                tile.move(TileEvent.REDO)\n"
        "                tile.move(TileEvent.COMMIT)\n"
        "                tile.move(TileEvent.COMMIT_DONE)\n"
        "                self._pass(tile, master, float32_arrays(tile.buffer)[:-1]",
        (AHEAD,),
    ),
    Mutant(
        "a matrix is kept after its last pass",
        "tiles/matrices.py",
        "                self.speculator.keep(tile)  # before the pass, which may fail half way\n"
        "                self._pass(tile, master, float32_arrays(tile.buffer)[:-1], rows, rules, UNSCALED, "
        "tile.outputs)\n",
        "                self._pass(tile, master, float32_arrays(tile.spare)[:-1], rows, rules, UNSCALED, "
        "tile.outputs)\n"
        "                self.speculator.keep(tile)\n",
        (AHEAD,),
    ),
    Mutant(
        "matrices and other tiles have the memory for spares twice",
        "tiles/speculation.py",
        "speculation_budget(self._memory, most, taken)",
        "speculation_budget(self._memory, most, 0 * taken)",
        (AHEAD,),
    ),
    Mutant(
        "all options of a matrix have to be those that its step ahead assumed",
        "tiles/speculation.py",
        "self.part_of(step.rule) for segment, step in active",
        "step.rule for segment, step in active",
        (AHEAD,),
    ),
]
