"""Mutants of exports, of what is read of DeepSpeed's files, and of the boxes that checkpoints consist of."""

from __future__ import annotations

from mutants.mutant import DEEPSPEED, EXPORT, RESHARDING, Mutant

MUTANTS = [
    Mutant(
        "the end of a range is left out",
        "boxes_of_range",
        "if tail:",
        "if False:",
        (RESHARDING,),
    ),
    Mutant(
        "a box is read from the beginning of the one in the file",
        "Box.slices_in",
        "starts = [start - first for start, first in zip(self.offsets, larger.offsets, strict=True)]",
        "starts = [0 for _ in self.offsets]",
        (RESHARDING,),
    ),
    Mutant(
        "the metadata of a tensor has the boxes of one rank alone",
        "_commit",
        "tensors.setdefault(name, {**entry, 'chunks': []})['chunks'] += entry['chunks']",
        "tensors.setdefault(name, entry)",
        (RESHARDING,),
    ),
    Mutant(
        "an export in float32 has rounded weights",
        "weights_of",
        "dtype is torch.float32",
        "False",
        (f"{EXPORT}::test_in_fp32_it_is_the_masters",),
    ),
    Mutant(
        "a master that is not the weight is exported",
        "read_weight",
        "values = adopted(found[weight.master], values)",
        "values = found[weight.master]",
        (f"{EXPORT}::test_in_fp32_it_is_the_masters",),
    ),
    Mutant(
        "a cast overflows unseen",
        "_cast",
        "if lost.numel() > 0:",
        "if False:",
        (f"{EXPORT}::test_a_cast_that_overflows_is_refused",),
    ),
    Mutant(
        "a file is larger than allowed",
        "shards_of",
        "if groups[-1] and num_bytes + weight.head.num_bytes > max_shard_bytes:",
        "if groups[-1] and num_bytes > max_shard_bytes:",
        (f"{EXPORT}::test_several_files",),
    ),
    Mutant(
        "an export overwrites what is there",
        "_check_target",
        "if names and (not overwrite):",
        "if False:",
        (f"{EXPORT}::test_a_folder_with_something_in_it_stays",),
    ),
    Mutant(
        "the next parameter begins in the padding",
        "_FlatGroup._together",
        "start += numel + padding",
        "start += numel",
        (DEEPSPEED,),
    ),
    Mutant(
        "parameters at stage 3 are read without their last elements",
        "_FlatGroup._each",
        "numel = -(-math.prod(shape) // len(shards))",
        "numel = math.prod(shape) // len(shards)",
        (DEEPSPEED,),
    ),
    Mutant(
        "files of subgroups of ranks are imported",
        "_check_partitions",
        "if counts - {None, len(states)}:",
        "if False:",
        (f"{DEEPSPEED}::test_what_does_not_fit_is_refused",),
    ),
]
