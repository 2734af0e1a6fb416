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
        "kernels/formats.py",
        'f"{seed}:{name}"',
        'f"{name}"',
        (f"{FORMATS}::test_random_bits_are_others_with_another",),
    ),
    Mutant(
        "all parameters have the same random bits",
        "optim/offload.py",
        "stream_of(self.states_seed, unwrapped(name))",
        'stream_of(self.states_seed, "")',
        (f"{STATES}::test_equal_parameters_with_equal_gradients_are_rounded_apart",),
    ),
    Mutant(
        "a wrapper changes the random bits",
        "optim/offload.py",
        "stream_of(self.states_seed, unwrapped(name))",
        "stream_of(self.states_seed, name)",
        (f"{STATES}::test_bits_belong_to_the_name_and_the_seed",),
    ),
    Mutant(
        "all steps have the same random bits",
        "kernels/host.py",
        "        steps.append(rule.step)\n",
        "        steps.append(1)\n",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "all tiles of a parameter have the random bits of its first elements",
        "tiles/tile.py",
        "coding.behind(segment.parameter_offset)",
        "coding",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "all ranks have the random bits of the first elements",
        "sharding/store.py",
        "codings[index].behind(each.parameter_offset)",
        "codings[index]",
        (f"{TABLE}::test_every_cell_with_encoded_states",),
    ),
    Mutant(
        "shards of FSDP2 have the random bits of the first one",
        "optim/offload.py",
        "            return coding.behind(first)\n",
        "            return coding\n",
        (f"{KEPT}::test_shards_are_encoded_as_the_whole",),
    ),
    Mutant(
        "a repeated step has the random bits of the first elements",
        "tiles/repeated.py",
        "*tile.segments[each.parameter].coding[1:])",
        "tile.segments[each.parameter].coding.stream, 0)",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "the halves of the random bits are exchanged",
        "kernels/reference.py",
        "random & 0xFFFF if state == 0 else random >> 16",
        "random & 0xFFFF if state == 1 else random >> 16",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "steps are rounded to nearest",
        "kernels/reference.py",
        "name in NEVER_NEGATIVE, values, bits)",
        "name in NEVER_NEGATIVE, values)",
        (f"{ENCODED}::test_several_rules_of_a_tile_have_a_key_each",),
    ),
    Mutant(
        "a weight is updated by the encoded states",
        "kernels/reference.py",
        "    return stepped, master\n",
        "    again = [stepped.decoded(state, everything, name in NEVER_NEGATIVE) for state, name in enumerate(names)]\n"
        "    return stepped, rule_step([old, *again], gradient, rule, scale, compared)[0]\n",
        (f"{ENCODED}::test_a_table_of_addresses_steps_like_the_tile",),
    ),
    Mutant(
        "a second moment becomes zero",
        "kernels/formats.py",
        "        tiny = magnitude > 0\n",
        "        tiny = magnitude > least\n",
        (f"{FORMATS}::test_what_is_above_zero_and_never_negative_does_not_become_zero",),
    ),
    Mutant(
        "a block's scale is made for infinity",
        "kernels/formats.py",
        "torch.where(magnitude < _INFINITY, magnitude, 0)",
        "torch.where(magnitude <= _INFINITY, magnitude, 0)",
        (f"{FORMATS}::test_the_largest_finite_number_of_a_block_is_above_its_scale_and_at_most_twice_it",),
    ),
    Mutant(
        "the largest number becomes infinite",
        "kernels/formats.py",
        ".clamp(max=0x7F7F)",
        ".clamp(max=0x7F80)",
        (f"{FORMATS}::test_kinds_of_numbers_stay",),
    ),
    Mutant(
        "all blocks are read with the scale of the first",
        "kernels/buffers.py",
        "scales[_blocks(slice(begin, begin + part.numel()))], _code",
        "scales[:1].expand(part.numel() // BLOCK_NUMEL), _code",
        (f"{KEPT}::test_a_float32_state_is_rounded_to_nearest",),
    ),
    Mutant(
        "states are read with the code that has a sign",
        "tiles/memory.py",
        "elements, which in NEVER_NEGATIVE)",
        "elements, False)",
        (f"{STATES}::test_every_optimizer_equals_the_oracle",),
    ),
    Mutant(
        "a snapshot is read with the code that has a sign",
        "tiles/memory.py",
        "elements, which in NEVER_NEGATIVE)",
        "elements, False)",
        ("tests/checkpoint/test_async.py::test_training_goes_on",),
    ),
    Mutant(
        "the step count is no part of SGD's state",
        "optim/family.py",
        "        self.keeps_step = True\n",
        "        pass\n",
        (f"{KEPT}::test_going_on_from_a_state_dict_equals_not_stopping",),
    ),
    Mutant(
        "Muon's states are encoded",
        "optim/rules/muon.py",
        "    encodable = False\n",
        "",
        (f"{KEPT}::test_optimizers_whose_states_stay_float32_are_refused",),
    ),
    Mutant(
        "tiles may cut a block",
        "tiles/tile.py",
        "plan_tiles(members, tile_numel, first, format.unit)",
        "plan_tiles(members, tile_numel, first)",
        (f"{STATES}::test_how_it_is_done_changes_no_bit",),
    ),
    Mutant(
        "ranks may cut a block",
        "sharding/ownership.py",
        "*counts, units=units)",
        "*counts)",
        (f"{TABLE}::test_every_cell_with_encoded_states",),
    ),
    Mutant(
        "states that are rounded are float32 in a checkpoint",
        "checkpoint/state_formats.py",
        "    return torch.bfloat16 if encoded else torch.float32\n",
        "    return torch.float32\n",
        (f"{SAVED}::test_inspect_shows_dtypes_formats_and_the_seed",),
    ),
    Mutant(
        "an unknown format of states is loaded",
        "checkpoint/optimizer_state.py",
        "        check_format(about, at)\n",
        "",
        (f"{SAVED}::test_an_unknown_format_is_refused",),
    ),
    Mutant(
        "a conversion of states is not said",
        "checkpoint/state_formats.py",
        "in sorted(formats) if theirs != own]",
        "in sorted(formats) if theirs == own]",
        (f"{SAVED}::test_another_format_is_converted_and_said_once",),
    ),
    Mutant(
        "every rank says that states were converted",
        "checkpoint/training_state.py",
        "                if self._group.rank == 0:\n                    state.report",
        "                if True:\n                    state.report",
        (f"{SAVED}::test_another_format_is_converted_and_said_once",),
    ),
    Mutant(
        "other random bits are not said",
        "checkpoint/state_formats.py",
        "seed not in (None, theirs)",
        "seed in (None, theirs)",
        (f"{SAVED}::test_another_seed_is_said",),
    ),
]
