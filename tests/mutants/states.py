"""Mutants of states that are not float32."""

from __future__ import annotations

from mutants.mutant import TABLE, Mutant

FORMATS = "tests/kernels/test_formats.py"
ENCODED = "tests/kernels/test_encoded.py"
STATES = "tests/optim/test_states.py"
KEPT = "tests/optim/test_states_kept.py"
SAVED = "tests/checkpoint/test_states.py"

MUTANTS = [
    Mutant(
        "random bits do not depend on the seed",
        "stream_of",
        "return int.from_bytes(hashlib.blake2b(f'{seed}:{name}'.encode(), digest_size=8).digest(), 'little')",
        "return int.from_bytes(hashlib.blake2b(f'{name}'.encode(), digest_size=8).digest(), 'little')",
        (f"{FORMATS}::test_random_bits_are_others_with_another",),
    ),
    Mutant(
        "all parameters have the same random bits",
        "Offload.coding_in_whole",
        "stream_of(self.states_seed, unwrapped(name))",
        "stream_of(self.states_seed, '')",
        (f"{STATES}::test_equal_parameters_with_equal_gradients_are_rounded_apart",),
    ),
    Mutant(
        "a wrapper changes the random bits",
        "Offload.coding_in_whole",
        "stream_of(self.states_seed, unwrapped(name))",
        "stream_of(self.states_seed, name)",
        (f"{STATES}::test_bits_belong_to_the_name_and_the_seed",),
    ),
    Mutant(
        "all steps have the same random bits",
        "_rows_of",
        "steps.append(rule.step)",
        "steps.append(1)",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "all tiles of a parameter have the random bits of its first elements",
        "Tile.__init__",
        "coding.behind(segment.parameter_offset)",
        "coding",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "all ranks have the random bits of the first elements",
        "Spec.keyed",
        "self.coding.behind(offset)",
        "self.coding",
        (f"{TABLE}::test_every_cell_with_encoded_states",),
    ),
    Mutant(
        "shards of FSDP2 have the random bits of the first one",
        "Offload.coding_of",
        "return coding.behind(first)",
        "return coding",
        (f"{KEPT}::test_shards_are_encoded_as_the_whole",),
    ),
    Mutant(
        "a repeated step has the random bits of the first elements",
        "RepeatedCommit.__init__",
        "*tile.segments[each.parameter].coding[1:]",
        "tile.segments[each.parameter].coding.stream, 0",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "the halves of the random bits are exchanged",
        "encoded_step",
        "bits = random & 65535 if state == 0 else random >> 16",
        "bits = random & 65535 if state == 1 else random >> 16",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "steps are rounded to nearest",
        "encoded_step",
        "stepped.encode(state, everything, name in NEVER_NEGATIVE, values, bits)",
        "stepped.encode(state, everything, name in NEVER_NEGATIVE, values)",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "a weight is updated by the encoded states",
        "encoded_step",
        "return (stepped, master)",
        "again = [stepped.decoded(state, everything, name in NEVER_NEGATIVE) for state, name in "
        "enumerate(names)]\n"
        "return (stepped, rule_step([old, *again], gradient, rule, scale, compared)[0])",
        (f"{ENCODED}::test_a_table_of_addresses_steps_like_the_tile",),
    ),
    Mutant(
        "a second moment becomes zero",
        "encode_bytes",
        "if code.signed:\n"
        "    share = 0.5 if random is None else random.float() * 2.0 ** (-16)\n"
        "    tiny = magnitude.to(torch.int32).view(torch.float32) > "
        "least.to(torch.int32).view(torch.float32) * share\n"
        "else:\n"
        "    tiny = magnitude > 0",
        "if code.signed:\n"
        "    share = 0.5 if random is None else random.float() * 2.0 ** (-16)\n"
        "    tiny = magnitude.to(torch.int32).view(torch.float32) > "
        "least.to(torch.int32).view(torch.float32) * share\n"
        "else:\n"
        "    tiny = magnitude > least",
        (f"{FORMATS}::test_what_is_above_zero_and_never_negative_does_not_become_zero",),
    ),
    Mutant(
        "a block's scale is made for infinity",
        "encode_bytes",
        "finite = torch.where(magnitude < _INFINITY, magnitude, 0).view(-1, BLOCK_NUMEL)",
        "finite = torch.where(magnitude <= _INFINITY, magnitude, 0).view(-1, BLOCK_NUMEL)",
        (f"{FORMATS}::test_the_largest_finite_number_of_a_block_is_above_its_scale_and_at_most_twice_it",),
    ),
    Mutant(
        "the largest number becomes infinite",
        "encode_bfloat16",
        "rounded = (magnitude + added >> 16).clamp(max=32639)",
        "rounded = (magnitude + added >> 16).clamp(max=32640)",
        (f"{FORMATS}::test_kinds_of_numbers_stay",),
    ),
    Mutant(
        "all blocks are read with the scale of the first",
        "EncodedBuffer.decoded",
        "scales[_blocks(slice(begin, begin + part.numel()))], _code",
        "scales[:1].expand(part.numel() // BLOCK_NUMEL), _code",
        (f"{KEPT}::test_a_float32_state_is_rounded_to_nearest",),
    ),
    Mutant(
        "states are read with the code that has a sign",
        "read_array",
        "return read_state(buffer, len(arrays) - arrays.index(which), elements, which in NEVER_NEGATIVE)",
        "return read_state(buffer, len(arrays) - arrays.index(which), elements, False)",
        (f"{STATES}::test_every_optimizer_equals_the_oracle",),
    ),
    Mutant(
        "a snapshot is read with the code that has a sign",
        "read_array",
        "return read_state(buffer, len(arrays) - arrays.index(which), elements, which in NEVER_NEGATIVE)",
        "return read_state(buffer, len(arrays) - arrays.index(which), elements, False)",
        ("tests/checkpoint/test_async.py::test_training_goes_on",),
    ),
    Mutant(
        "the step count is no part of SGD's state",
        "RuleFamily.encode_states",
        "self.keeps_step = True",
        "pass",
        (f"{KEPT}::test_going_on_from_a_state_dict_equals_not_stopping",),
    ),
    Mutant(
        "Muon's states are encoded",
        "MuonFamily",
        "encodable = False",
        "pass",
        (f"{KEPT}::test_optimizers_whose_states_stay_float32_are_refused",),
    ),
    Mutant(
        "tiles mix formats of states",
        "tile_runs",
        "alike.setdefault((spec.dtype, spec.coding.format), []).append(spec)",
        "alike.setdefault(next(iter(alike), (spec.dtype, spec.coding.format)), []).append(spec)",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "tiles may cut a block",
        "tile_runs",
        "numel = max(tile_numel // format.unit, 1) * format.unit",
        "numel = tile_numel",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "ranks may cut a block",
        "Shards._shard_numel",
        "return align(-(-numel // self.ranks), unit)",
        "return align(-(-numel // self.ranks))",
        ("tests/layout/test_layout.py::test_parameters_that_are_divided_at_blocks_have_buckets_of_their_own",),
    ),
    Mutant(
        "states that are rounded are float32 in a checkpoint",
        "dtype_in_files",
        "return torch.bfloat16 if encoded else torch.float32",
        "return torch.float32",
        (f"{SAVED}::test_inspect_shows_dtypes_formats_and_the_seed",),
    ),
    Mutant(
        "an unknown format of states is loaded",
        "checked_about",
        "check_format(about, at)",
        "",
        (f"{SAVED}::test_an_unknown_format_is_refused",),
    ),
    Mutant(
        "a conversion of states is not said",
        "report_conversion",
        "if (changed := [f'{theirs} to {own}' for theirs, own in sorted(formats) if theirs != own]):",
        "if (changed := [f'{theirs} to {own}' for theirs, own in sorted(formats) if theirs == own]):",
        (f"{SAVED}::test_another_format_is_converted_and_said_once",),
    ),
    Mutant(
        "every rank says that states were converted",
        "TrainingState.load",
        "if self._group.rank == 0:",
        "if True:",
        (f"{SAVED}::test_another_format_is_converted_and_said_once",),
    ),
    Mutant(
        "other random bits are not said",
        "report_conversion",
        "if theirs is not None and seed not in (None, theirs):",
        "if theirs is not None and seed in (None, theirs):",
        (f"{SAVED}::test_another_seed_is_said",),
    ),
]
