"""Breaking stage 3, and what ranks of one machine share."""

from __future__ import annotations

from mutants.mutant import FSDP, FULLY_SHARDED, GATHERING, Mutant

MUTANTS = [
    # -- segments.py ----------------------------------------------------------
    Mutant(
        "memory is lent again while it is read",
        "sharding/segments.py",
        "return self._lent_at < meeting and (self._user is None or self._user.expired())",
        "return True",
        (GATHERING,),
    ),
    Mutant(
        "memory is lent again while a tensor uses it",
        "sharding/segments.py",
        "(self._user is None or self._user.expired())",
        "True",
        (GATHERING,),
    ),
    Mutant(
        "one rank says what all are done with",
        "sharding/segments.py",
        "functools.reduce(operator.and_, (each[3] for each in said))",
        "functools.reduce(operator.or_, (each[3] for each in said))",
        (GATHERING,),
    ),
    Mutant(
        "what is lent for the next meeting is free",
        "sharding/segments.py",
        " and not each.lent_after(self._meetings)",
        "",
        (GATHERING,),
    ),
    Mutant(
        "files stay",
        "sharding/segments.py",
        "            self._segments[index].forget_name()  # no file needs to stay\n",
        "",
        (GATHERING,),
    ),
    Mutant(
        "memory is never lent again",
        "sharding/segments.py",
        "[each for each in self._segments if each.free and each.capacity >= num_bytes]",
        "[]",
        (GATHERING,),
    ),
    Mutant(
        "a rank that lent twice goes on",
        "sharding/segments.py",
        "        if self._lent_for == meeting:\n            self.stand_apart()",
        "        if False:\n            self.stand_apart()",
        (GATHERING,),
    ),
    Mutant(
        "ranks with other segments read each other's",
        "sharding/segments.py",
        "any(each[:3] != said[0][:3] for each in said)",
        "False",
        (GATHERING,),
    ),
    Mutant(
        "no room is not told",
        "sharding/segments.py",
        "_NO_ROOM if self._no_room else _APART if self._apart else _OTHER",
        "_APART if self._apart else _OTHER",
        (GATHERING,),
    ),
    # -- gathering.py ---------------------------------------------------------
    Mutant(
        "parameters are used before they are there",
        "sharding/gathering.py",
        "        if self._finish is not None:\n",
        "        if self._finish is not None and False:\n",
        (GATHERING,),
    ),
    Mutant(
        "a failed gather fails the next forward too",
        "sharding/gathering.py",
        "elif self._failure is not None and self._wanted():",
        "elif self._failure is not None:",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "a rank that begins anew is taken for one that goes on",
        "sharding/gathering.py",
        "        self._interruptions += 1\n",
        "",
        (GATHERING,),
    ),
    Mutant(
        "others are not told of a failed forward",
        "sharding/gathering.py",
        "        self._lane.give_up_window()\n",
        "",
        (GATHERING, FULLY_SHARDED),
    ),
    Mutant(
        "another module may be gathered",
        "sharding/gathering.py",
        "self._lane.begin(Action.GATHER, module, self._interruptions, said)",
        "self._lane.begin(Action.GATHER, 0, self._interruptions, said)",
        (FULLY_SHARDED,),
    ),
    # -- fully_sharded.py -----------------------------------------------------
    Mutant(
        "stale weights stay gathered after a step",
        "sharding/fully_sharded.py",
        "    def before_publishing(self) -> None:\n        self._sharded.reshard()",
        "    def before_publishing(self) -> None:\n        return",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "stale weights stay gathered after an evaluation",
        "sharding/fully_sharded.py",
        "        if not torch.is_grad_enabled():\n            self.reshard()",
        "        return",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "a rank holds the next one's rows",
        "sharding/rank_grid.py",
        "start, stop = _chunk(rows, self.shards, place.shard)",
        "start, stop = _chunk(rows, self.shards, (place.shard + 1) % self.shards)",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "rows are shared out evenly",
        "sharding/rank_grid.py",
        "step = -(-size // chunks)",
        "step = size // chunks",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "what is written to gathered parameters is lost",
        "sharding/fully_sharded.py",
        "        held.copy_(flat(whole)[offset : offset + numel].view(held.shape))\n",
        "",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "every replica counts",
        "sharding/fully_sharded.py",
        "return place.replica == 0 and (",
        "return (",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "hooks outlive the engine",
        "sharding/fully_sharded.py",
        "for hook in (self._hook, *self._hooks.values()):",
        "for hook in (self._hook,):",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "a forward that failed is not reset",
        "sharding/fully_sharded.py",
        "            root.reset_iter_state()\n",
        "            pass\n",
        (FULLY_SHARDED,),
    ),
    # -- gathered.py and optim/shards.py --------------------------------------
    Mutant(
        "every rank keeps what it wrote itself",
        "sharding/gathered.py",
        "                _broadcast(tensor, modifier_rank)\n",
        "                pass\n",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "what was written is not taken up",
        "sharding/gathered.py",
        "    torch.autograd.graph.increment_version(tensor)\n",
        "",
        (FULLY_SHARDED,),
    ),
    Mutant(
        "the norm has one rank's part of what is sharded",
        "optim/shards.py",
        "Replicate() if alike else Partial() for alike in replicated",
        "Replicate() for alike in replicated",
        (FSDP,),
    ),
    Mutant(
        "what is placed otherwise is taken for this rank's",
        "optim/shards.py",
        "return held_part(value) if _placing(value) == (mesh, placements) else None",
        "return held_part(value)",
        (FSDP,),
    ),
]
