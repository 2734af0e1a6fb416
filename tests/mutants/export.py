"""Mutants of exports, of what is read of DeepSpeed's files, and of the boxes that checkpoints consist of."""

from __future__ import annotations

from mutants.mutant import DEEPSPEED, EXPORT, RESHARDING, Mutant

MUTANTS = [
    Mutant(
        "the end of a range is left out",
        "checkpoint/boxes.py",
        "    if tail:\n",
        "    if False:\n",
        (RESHARDING,),
    ),
    Mutant(
        "a box is read from the beginning of the one in the file",
        "checkpoint/boxes.py",
        "        starts = [start - first for start, first in zip(self.offsets, larger.offsets, strict=True)]\n",
        "        starts = [0 for _ in self.offsets]\n",
        (RESHARDING,),
    ),
    Mutant(
        "the metadata of a tensor has the boxes of one rank alone",
        "checkpoint/saving.py",
        '            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]\n',
        "            tensors.setdefault(name, entry)\n",
        (RESHARDING,),
    ),
    Mutant(
        "an export in float32 has rounded weights",
        "checkpoint/export.py",
        "if dtype is torch.float32 and MASTER in",
        "if False and MASTER in",
        (f"{EXPORT}::test_in_fp32_it_is_the_masters",),
    ),
    Mutant(
        "a master that is not the weight is exported",
        "checkpoint/export.py",
        "        values = adopted(found[weight.master], values)\n",
        "        values = found[weight.master]\n",
        (f"{EXPORT}::test_in_fp32_it_is_the_masters",),
    ),
    Mutant(
        "a cast overflows unseen",
        "checkpoint/export.py",
        "            if lost.numel() > 0:\n",
        "            if False:\n",
        (f"{EXPORT}::test_a_cast_that_overflows_is_refused",),
    ),
    Mutant(
        "a file is larger than allowed",
        "checkpoint/export.py",
        "num_bytes + weight.head.num_bytes > max_shard_bytes",
        "num_bytes > max_shard_bytes",
        (f"{EXPORT}::test_several_files",),
    ),
    Mutant(
        "an export overwrites what is there",
        "checkpoint/export.py",
        "    if names and not overwrite:\n",
        "    if False:\n",
        (f"{EXPORT}::test_a_folder_with_something_in_it_stays",),
    ),
    Mutant(
        "the next parameter begins in the padding",
        "checkpoint/deepspeed_layout.py",
        "start += numel + padding",
        "start += numel",
        (DEEPSPEED,),
    ),
    Mutant(
        "parameters at stage 3 are read without their last elements",
        "checkpoint/deepspeed_layout.py",
        "numel = -(-math.prod(shape) // len(shards))",
        "numel = math.prod(shape) // len(shards)",
        (DEEPSPEED,),
    ),
    Mutant(
        "files of subgroups of ranks are imported",
        "checkpoint/deepspeed_layout.py",
        "        if counts - {None, len(states)}:\n",
        "        if False:\n",
        (f"{DEEPSPEED}::test_what_does_not_fit_is_refused",),
    ),
]
