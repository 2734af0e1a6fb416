"""Mutants of Muon."""

from __future__ import annotations

from mutants.mutant import Mutant

MUON = "tests/optim/test_muon.py"
ENGINE = "tests/engine/test_muon.py"
AHEAD = "tests/optim/test_muon_ahead.py"

MUTANTS = [
    Mutant(
        "half a matrix is made orthogonal",
        "Matrix._transformed",
        "return self.rule.transform(shaped).view(-1)",
        "half = shaped.shape[0] // 2\n"
        "parts = [each for each in (shaped[:half], shaped[half:]) if each.numel()]\n"
        "return torch.cat([self.rule.transform(each.contiguous()) for each in parts]).view(-1)",
        (MUON,),
    ),
    Mutant(
        "fused matrices are made orthogonal together",
        "Matrix._transformed",
        "if len(self.layout.blocks) == 1:",
        "if len(self.layout.blocks) >= 1:",
        (MUON,),
    ),
    Mutant(
        "clipping comes after the momentum",
        "MatrixSteps._first_pass",
        "self._tier.kernels.step_tile(state, state, [row], [rule], self._scale, Outputs.WRITTEN)",
        "self._tier.kernels.step_tile(state, state, [row], [rule], UNSCALED, Outputs.WRITTEN)",
        (MUON,),
    ),
    Mutant(
        "the momentum is bfloat16",
        "MatrixSteps._first_pass",
        "state = float32_arrays(tile.buffer)[MATRIX_STATE]",
        "state = float32_arrays(tile.buffer)[MATRIX_STATE]\nstate.copy_(state.bfloat16())",
        (MUON,),
    ),
    Mutant(
        "weights decay twice",
        "MuonRule.last",
        "return UpdateRule(lr=float(lr * ratio), decay=float(1 - lr * self.weight_decay))",
        "return UpdateRule(lr=float(lr * ratio), decay=float(1 - lr * self.weight_decay) ** 2)",
        (MUON,),
    ),
    Mutant(
        "weights decay by the adjusted learning rate",
        "MuonRule.last",
        "return UpdateRule(lr=float(lr * ratio), decay=float(1 - lr * self.weight_decay))",
        "return UpdateRule(lr=float(lr * ratio), decay=float(1 - lr * ratio * self.weight_decay))",
        (MUON,),
    ),
    Mutant(
        "all blocks of a fused matrix have the learning rate of the first",
        "MatrixSteps._last_passes",
        "rows.append(TileSegment(at, gradient[here], output[here], layout.blocks.index(block)))",
        "rows.append(TileSegment(at, gradient[here], output[here], 0))",
        (MUON,),
    ),
    Mutant(
        "the update of a matrix in several tiles is that of its first one",
        "MatrixSteps._last_passes",
        "output, gradient = (tier.streams.output_for(target, staged), update[part.in_piece])",
        "output, gradient = (tier.streams.output_for(target, staged), update[:segment.layout.numel])",
        (MUON,),
    ),
    Mutant(
        "a matrix is brought together from one rank's pieces",
        "RankExchange.begin",
        "whole[offset:offset + numel] = received[rank][begins[rank]:begins[rank] + numel]",
        "whole[offset:offset + numel] = received[0][begins[rank]:begins[rank] + numel]",
        (ENGINE,),
    ),
    Mutant(
        "results are taken from a wrong owner",
        "RankExchange.finish",
        "piece = received[owner][begins[owner]:begins[owner] + numel]",
        "piece = received[-1 - owner][begins[owner]:begins[owner] + numel]",
        (ENGINE,),
    ),
    Mutant(
        "each rank makes its own piece of a matrix orthogonal",
        "RankExchange._is_whole",
        "return all((numel == matrix.numel for _, numel in self._ownership.layout.owners(matrix.parameter)))",
        "return all((numel <= matrix.numel for _, numel in self._ownership.layout.owners(matrix.parameter)))",
        (ENGINE,),
    ),
    Mutant(
        "a rank whose transformation failed goes away without a word",
        "ShardedStore.commit",
        "exchange.abandon()",
        "pass",
        (f"{ENGINE}::test_a_rank_on_which_a_transformation_fails",),
    ),
    Mutant(
        "a step under autocast is taken",
        "ParameterRecord.check_kind",
        "if layout is not None and (device := _autocast_device()):",
        "if False and (device := _autocast_device()):",
        (MUON,),
    ),
    Mutant(
        "a loaded state divides parameters anew",
        "merged_group",
        "return {name: value for name, value in merged.items() if name not in family.layout_options} | laid_out",
        "return {name: value for name, value in merged.items()} | laid_out",
        (MUON,),
    ),
    Mutant(
        "a checkpoint of a matrix is loaded into AdamW's group",
        "OptimizerState.differences",
        "if self._family.of(merged) is not self._family.of(group):",
        "if False:",
        (MUON,),
    ),
    Mutant(
        "the kind of device of a checkpoint is not told",
        "OptimizerState.restore_histories",
        "if (device := about.get(_MATRICES_ON)) and (own := self._matrices_on()) and (device != own):",
        "if (device := about.get(_MATRICES_ON)) and (own := self._matrices_on()) and (device == own):",
        (MUON,),
    ),
    Mutant(
        "a group's marks do not divide it",
        "_divided",
        "return matrix_options(model, named, config.split or {}, config.others, marks or None, where)",
        "return matrix_options(model, named, config.split or {}, config.others, None, where)",
        ("tests/engine/test_muon_config.py",),
    ),
    Mutant(
        "AdamW's groups of a configuration have Muon's learning rate",
        "MuonConfig.adamw_options",
        "lr = self.lr if self.adam_lr is None else self.adam_lr",
        "lr = self.options()['lr']",
        ("tests/engine/test_muon_config.py",),
    ),
    Mutant(
        "a rank steps although another has no memory for its matrices",
        "ShardedStore._exchange_of",
        "reserve(self.tiles.streams.device, matrices)",
        "pass",
        (ENGINE,),
    ),
    Mutant(
        "one rank transforms a large matrix while the others wait",
        "batched",
        "most = max(_BATCH_NUMEL, world_size * max((each.numel for each in matrices), default=0))",
        "most = _BATCH_NUMEL",
        (ENGINE,),
    ),
    Mutant(
        "what a transformation has overwritten is transformed once more",
        "MatrixSteps._first_passes",
        "self._tier.speculator.spend(part.tile)",
        "pass",
        (AHEAD,),
    ),
    Mutant(
        "a part of a matrix that was stepped ahead is not transformed",
        "MatrixSteps._first_passes",
        "pieces[work.matrix.parameter][part.in_piece] = part.ahead",
        "pass",
        (AHEAD,),
    ),
    Mutant(
        "the last pass of a matrix that was stepped ahead is over the former momentum",
        "MatrixSteps._last_passes",
        "tier.speculator.keep(tile)",
        "tile.move(TileEvent.REDO)\ntile.move(TileEvent.COMMIT)",
        (AHEAD,),
    ),
    Mutant(
        "a matrix is kept after its last pass",
        "MatrixSteps._last_passes",
        "if part.ahead is not None:\n    tier.speculator.keep(tile)\n"
        "after = float32_arrays(tile.buffer)[MATRIX_MASTER]\nwith tile.stepping(after, rows):\n"
        "    tier.kernels.step_tile(before, after, rows, rules, UNSCALED, tile.outputs)",
        "after = float32_arrays(tile.buffer if part.ahead is None else tile.spare)[MATRIX_MASTER]\n"
        "with tile.stepping(after, rows):\n"
        "    tier.kernels.step_tile(before, after, rows, rules, UNSCALED, tile.outputs)\n"
        "if part.ahead is not None:\n    tier.speculator.keep(tile)",
        (AHEAD,),
    ),
    Mutant(
        "matrices and other tiles have the memory for spares twice",
        "Speculator._reserve_alike",
        "speculation_budget(self._memory, sum((kind.asked_bytes for kind in kinds)), others) - mine",
        "speculation_budget(self._memory, sum((kind.asked_bytes for kind in kinds)), 0) - mine",
        (AHEAD,),
    ),
    Mutant(
        "all options of a matrix have to be those that its step ahead assumed",
        "Speculator.verdict",
        "rules = {segment.layout.parameter: pass_ahead(step.rule).rule for segment, step in active}",
        "rules = {segment.layout.parameter: step.rule for segment, step in active}",
        (AHEAD,),
    ),
]
