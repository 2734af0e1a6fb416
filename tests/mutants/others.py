"""Mutants of the doors from elsewhere: DeepSpeed's names, transformers' Trainer and Lightning's."""

from __future__ import annotations

from mutants.mutant import COMPAT_NAMES, COMPAT_SURFACE, FABRIC, LIGHTNING, LIGHTNING_CHECKPOINTS, TRAINER, Mutant

MUTANTS = [
    Mutant(
        "Ctrl-C ends the loading of a state at once",
        "optim/interrupts.py",
        "        self._former = signal.signal(signal.SIGINT, self)\n",
        "",
        ("tests/optim/test_state_dict.py::test_ctrl_c_at_any_write_waits_until_the_state_is_whole",),
    ),
    Mutant(
        "Ctrl-C ends the commit of one rank at once",
        "sharding/store.py",
        "    @deferred_interrupts()  #",
        "    #",
        ("tests/engine/test_interrupts.py::test_ctrl_c_in_a_step_of_the_optimizer",),
    ),
    Mutant(
        "a rank that refused a step does not give up its window with the others",
        "sharding/collective_thread.py",
        "                    return True  # this rank refused",
        "                    self.differed = False\n                    return True  # this rank refused",
        ("tests/engine/test_interrupts.py::test_ctrl_c_before_the_commit_discards_the_window_on_all_ranks",),
    ),
    # -- DeepSpeed's names ----------------------------------------------------
    Mutant(
        "a module loses its own specification",
        "compat/finder.py",
        "        module.__spec__ = self._spec  #",
        "        pass  #",
        (COMPAT_NAMES,),
    ),
    Mutant(
        "what was imported already is replaced",
        "compat/finder.py",
        "    if already is not None and not already.__name__.startswith(HERE):\n",
        "    if False:\n",
        (COMPAT_NAMES,),
    ),
    Mutant(
        "modules stay when longshore stands aside",
        "compat/finder.py",
        "        del sys.modules[name]\n",
        "        pass\n",
        (COMPAT_NAMES,),
    ),
    Mutant(
        "an optimizer without an engine is not the fused one",
        "compat/optimizers.py",
        'group["fused"] = True',
        'group["fused"] = False',
        (f"{COMPAT_SURFACE}::test_optimizers",),
    ),
    Mutant(
        "what is inside a leaf is gathered by itself",
        "compat/zero.py",
        " - inside | {",
        " | {",
        (f"{COMPAT_SURFACE}::test_leaves_are_gathered_as_a_whole",),
    ),
    Mutant(
        "one zero.Init inside another begins anew",
        "compat/zero.py",
        "        if not _creations:\n",
        "        if True:\n",
        (f"{COMPAT_SURFACE}::test_zero_on_two_ranks",),
    ),
    # -- transformers ---------------------------------------------------------
    Mutant(
        "no backward of the Trainer ends the window",
        "integrations/transformers/accelerator.py",
        "set_gradient_accumulation_boundary(self.sync_gradients)",
        "set_gradient_accumulation_boundary(False)",
        (f"{TRAINER}::test_one_rank", f"{TRAINER}::test_two_ranks"),
    ),
    Mutant(
        "the Trainer's norm is not filled in",
        "integrations/transformers/accelerator.py",
        "            self._pending_norm.fill_(norm)\n",
        "            pass\n",
        (f"{TRAINER}::test_the_norm_is_the_step_before_clipping",),
    ),
    Mutant(
        "the Trainer's schedule goes on where the step was skipped",
        "integrations/transformers/accelerator.py",
        "self._is_overflow = not self._engine.was_step_applied()",
        "self._is_overflow = False",
        (f"{TRAINER}::test_overflow_skips_the_schedule_too",),
    ),
    Mutant(
        "a step clips without being asked to",
        "integrations/transformers/accelerator.py",
        "        if clip is not None and self._pending_norm is None:\n",
        "        if False:\n",
        (f"{TRAINER}::test_clipping_that_changes",),
    ),
    Mutant(
        "the Trainer's loss is divided twice",
        "integrations/transformers/accelerator.py",
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        (f"{TRAINER}::test_one_rank", f"{TRAINER}::test_two_ranks"),
    ),
    # -- Lightning ------------------------------------------------------------
    Mutant(
        "a state_dict counts as unchanged whatever hooks put into it",
        "integrations/lightning/models.py",
        "found.keys() == handed_out.keys()",
        "True",
        (f"{LIGHTNING_CHECKPOINTS}::test_a_state_dict_that_hooks_changed_is_seen",),
    ),
    Mutant(
        "a file that a folder was to replace is lost",
        "integrations/lightning/models.py",
        "            aside.rename(path)\n",
        "            pass\n",
        (f"{LIGHTNING_CHECKPOINTS}::test_a_folder_takes_the_place_of_a_file_when_it_is_whole",),
    ),
    Mutant(
        "Lightning's clipping does nothing",
        "integrations/lightning/settings.py",
        "        engine.optimizer.clip_grad_norm_(max_norm)\n",
        "        pass\n",
        (f"{LIGHTNING}::test_clipping_in_manual_optimization", f"{FABRIC}::test_clipping"),
    ),
    Mutant(
        "Lightning's loss is divided twice",
        "integrations/lightning/settings.py",
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        (f"{LIGHTNING}::test_the_weights_are_the_plain_trainers",),
    ),
    # -- optimizer.state ------------------------------------------------------
    Mutant(
        "edits of states that were handed out are not written back",
        "optim/handed_out.py",
        "                elif _differs(record, name, copy.values, core):\n",
        "                elif False:\n",
        ("tests/optim/test_edited_state.py",),
    ),
    Mutant(
        "copies that were handed out do not follow a step",
        "optim/core.py",
        "            self.handed_out.follow(self, steps.keys())\n",
        "            pass\n",
        ("tests/optim/test_edited_state.py",),
    ),
    Mutant(
        "views of a copy do not count as in use",
        "optim/state_copy.py",
        "        return torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata) > 2",
        "        return self.handed() is not None",
        ("tests/optim/test_edited_state.py",),
    ),
    Mutant(
        "a parameter takes the index of one that was replaced",
        "optim/core.py",
        "ParameterRecord(self._next_index + position, name",
        "ParameterRecord(1 + max((each.index for each in self.records), default=-1) + position, name",
        ("tests/optim/test_laid_out_anew.py",),
    ),
    Mutant(
        "states lie in another order than their parameters",
        "optim/state_copy.py",
        "    if is_sharded(parameter) or parameter.is_contiguous():\n        return shaped\n",
        "    return shaped\n",
        ("tests/optim/test_state_dict.py",),
    ),
    Mutant(
        "the memory of replaced parameters is kept",
        "tiles/backend.py",
        "                self.buffers.give_back(tile.buffer)\n            if tile.slot",
        "                pass\n            if tile.slot",
        ("tests/optim/test_laid_out_anew.py",),
    ),
    Mutant(
        "states that go to another parameter are lost",
        "optim/membership.py",
        "    core.handed_out.place(core)\n",
        "",
        ("tests/optim/test_laid_out_anew.py",),
    ),
]
