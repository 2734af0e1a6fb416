"""Whole parameters inside ``gather()`` at stage 3, through every handle that a script can have; run on every rank."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import whole
from torch import Tensor, nn

import longshore
from engine.fully_sharded_cases import Beside, beside, config_of, make_tower, raised_by, words_of
from engine.scenarios import HEADS, inputs, make_model
from longshore import utils
from longshore.compat import deepspeed

NAME = "blocks.1.up.weight"


class Handles:
    """A pair of engine and plain loop, and the tensors by which a script may know the engine's parameters."""

    def __init__(self, pair: Beside, former: Mapping[str, Tensor]) -> None:
        self.pair = pair
        self.former = former
        self.sharded = dict(pair.model.named_parameters())
        self.twins = dict(pair.twin.named_parameters())
        self.leaves = {}
        for module in pair.model.modules():
            if hasattr(module, "unshard"):
                module.unshard()  # pyright: ignore[reportCallIssue]
        self.leaves = dict(pair.model.named_parameters())
        for module in pair.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # pyright: ignore[reportCallIssue]

    def of(self, kind: str, name: str = NAME) -> Tensor:
        return {"sharded": self.sharded, "former": self.former, "leaf": self.leaves}[kind][name]

    def write(self, change: Callable[[Tensor], object], name: str = NAME) -> None:
        """Make the same change to the plain loop."""
        with torch.no_grad():
            change(self.twins[name])
        for index in range(len(self.pair.loop.parameters)):
            self.pair.loop.refresh(index)


@contextlib.contextmanager
def handles(dtype: torch.dtype = torch.float32) -> Any:
    model = make_tower(dtype)
    former = dict(model.named_parameters())
    with beside(dtype, model) as pair:
        pair.train(0)
        yield Handles(pair, former)


def read(kind: str, dtype: torch.dtype) -> None:
    """Everything that reads a parameter, inside the block and not outside."""
    with handles(dtype) as held:
        given, twin = held.of(kind), held.twins[NAME]
        with deepspeed.zero.GatheredParameters([given]):
            found = {"module": held.pair.model.blocks[1].up.weight, "sharded": held.sharded[NAME]}
            for where, each in {**found, "former": held.former[NAME], kind: given}.items():
                assert isinstance(each, nn.Parameter) and each.requires_grad and each.is_leaf, where
                assert type(each.shape) is torch.Size and each.shape == twin.shape and each.numel() == twin.numel()
                assert each.dtype == dtype and each.is_contiguous() and len(each) == 7, where
                assert torch.equal(each, twin) and bool((each == twin).all()), where
                assert torch.equal(each.data + torch.ones(5, dtype=dtype), twin.data + torch.ones(5, dtype=dtype))
                assert torch.equal(each.data.sum(), twin.data.sum()) and each.tolist() == twin.tolist()
                assert torch.equal(each[6], twin[6]) and torch.equal(torch.stack([each])[0], twin)
                assert (each.detach().float().cpu().numpy() == twin.detach().float().numpy()).all()
                assert repr(each) == repr(twin) and each.data_ptr() == given.data_ptr()
                memory = io.BytesIO()
                torch.save({"weight": each}, memory)
                memory.seek(0)
                loaded = torch.load(memory)["weight"]
                assert torch.equal(loaded, twin) and isinstance(loaded, nn.Parameter)
                assert type(copy.deepcopy(each)) is nn.Parameter and torch.equal(copy.deepcopy(each), twin)
            state = held.pair.model.state_dict()
            assert torch.equal(state[NAME], twin)
            kept = [given.data, held.pair.model.blocks[1].up.weight.detach(), state[NAME]]
            # The others are shards, as outside.
            assert hasattr(held.pair.model.blocks[1].down.weight, "full_tensor")
        assert all(torch.equal(each, twin) for each in kept), "what was kept is still there"
        assert held.pair.model.blocks[1].up.weight is held.sharded[NAME]
        assert hasattr(held.sharded[NAME], "full_tensor") and held.former[NAME].numel() == 0
        assert torch.equal(whole(held.sharded[NAME]), twin)
        held.pair.train(1)


def _set_rows(weight: Tensor) -> None:
    with torch.no_grad():
        weight[0] = 1.0
        weight[-1] = 2.0


def _replace(weight: Tensor) -> None:
    weight.data = torch.arange(35.0, dtype=weight.dtype).view(5, 7).t()


def _by_numpy(weight: Tensor) -> None:
    weight.data.view(torch.uint8).numpy()[-1, :] = 0


def _init(weight: Tensor) -> None:
    nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda weight: weight.data.zero_(),
    "rows": _set_rows,
    "other memory": _replace,
    "numpy": _by_numpy,
    "init": _init,
}


def written(kind: str, dtype: torch.dtype) -> None:
    """One rank writes; all have it, also the masters, and train on as the plain loop that was written."""
    with handles(dtype) as held:
        for step, (way, change) in enumerate(WRITES.items(), 1):
            writer = step % 2
            with deepspeed.zero.GatheredParameters([held.of(kind)], modifier_rank=writer):
                if dist.get_rank() == writer:
                    change(held.of(kind))
                    assert torch.equal(held.pair.model.blocks[1].up.weight, held.of(kind)) or way == "other memory"
            held.write(change)
            twin = held.twins[NAME]
            twin.data = twin.data.contiguous()  # with other strides torch rounds otherwise, and a shard has none
            held.pair.check(way)
            master, index = utils.safe_get_full_fp32_param(held.sharded[NAME]), list(held.twins).index(NAME)
            assert master is not None, way
            assert torch.equal(master.flatten(), held.pair.loop.masters[index][: twin.numel()]), way
            held.pair.train(step)


def written_without_a_writer(kind: str, way: str, rank: int | None) -> list[str]:
    """All ranks are told, and the values stay; ``rank``: the one that wrote, None: all."""
    with handles() as held:
        change = WRITES[way]

        def wrong() -> None:
            with deepspeed.zero.GatheredParameters([held.sharded["extra.weight"], held.of(kind)]):
                if rank is None or rank == dist.get_rank():
                    change(held.of(kind))

        said = raised_by(wrong)
        held.pair.check("nothing was written")
        held.pair.train(1)
        with longshore.gather(held.of(kind)) as (weight,):
            assert torch.equal(weight, held.twins[NAME])
        held.pair.train(2)
        return [said]


def differentiated(kind: str) -> list[str]:
    """A gradient that comes in a handle itself is the parameter's, or an error where no engine sees it."""
    with handles() as held:

        def differentiate() -> None:
            with longshore.gather(held.of(kind)):
                held.of(kind).square().sum().backward()

        said = raised_by(differentiate)
        if said:
            held.former[NAME].grad = None
            held.pair.train(1)
        else:
            held.pair.engine.step()
            held.pair.plain(lambda model, rank: [model.get_parameter(NAME).square().sum()])
            held.pair.check("stepped")
        return [said]


def reshaped(rank: int) -> str:
    with handles() as held:

        def wrong() -> None:
            with longshore.gather(held.sharded[NAME], modifier_rank=rank) as (weight,):
                if rank == dist.get_rank():
                    weight.data = torch.zeros(3)

        said = raised_by(wrong)
        held.pair.check("nothing was written")
        held.pair.train(1)
        return said


def nested() -> list[str]:
    """Blocks inside blocks, of the same and of other parameters, that write and that do not."""
    with handles() as held:
        gather, weight, said = longshore.gather, held.sharded[NAME], []
        twin, rank = held.twins[NAME], dist.get_rank()
        with gather(weight), gather(held.pair.model):
            with gather([weight, held.former[NAME]], modifier_rank=1):
                if rank == 1:
                    weight.data.fill_(0.5)
            held.write(lambda each: each.fill_(0.5))
            assert torch.equal(weight, twin), "it is whole after an inner block, and has what was written there"
        held.pair.check("written inside")
        held.pair.train(1)
        with gather(weight, modifier_rank=0):
            if rank == 0:
                weight.data.fill_(0.25)
            with gather(held.former[NAME]) as (same,):
                assert torch.equal(same, weight)
        held.write(lambda each: each.fill_(0.25))
        held.pair.check("written around")

        def in_the_inner() -> None:
            with gather(weight, modifier_rank=0), contextlib.suppress(longshore.ParameterError), gather(weight):
                weight.data.fill_(7.0)

        said.append(raised_by(in_the_inner))
        held.pair.check("refused")
        held.pair.train(2)
        entered_again = deepspeed.zero.GatheredParameters([weight])
        for _ in range(2):
            with entered_again, entered_again:
                assert torch.equal(weight, twin)
        held.pair.train(3)
        return said


def left_by_an_exception(ranks: tuple[int, ...], modifier_rank: int | None) -> str:
    with handles() as held:

        def wrong() -> None:
            with longshore.gather(held.pair.model, modifier_rank=modifier_rank):
                held.sharded[NAME].data.zero_()
                if dist.get_rank() in ranks:
                    raise ArithmeticError("on purpose")

        said = raised_by(wrong)
        held.pair.check("after")
        held.pair.train(1)
        return said


def trained_inside() -> list[str]:
    """Forwards and backwards inside the block are as outside; steps and checkpoints are not for there."""
    with handles() as held:
        pair = held.pair
        with longshore.gather(pair.model):
            with torch.no_grad():
                assert torch.equal(pair.model(words_of(5, 0)), pair.twin(words_of(5, 0)))
            assert torch.equal(held.sharded[NAME], held.twins[NAME]), "whole after a forward"
            hidden = torch.ones(2, 5)
            assert torch.equal(pair.model.blocks[1].up(hidden), pair.twin.blocks[1].up(hidden))
            pair.engine.backward(pair.engine(words_of(1, pair.rank), extra=True))
            assert torch.equal(held.sharded[NAME], held.twins[NAME]), "whole after a backward"
            said = [raised_by(pair.engine.step), raised_by(lambda: pair.engine.save_checkpoint("/dev/null/x"))]
        pair.engine.step()
        pair.plain(lambda model, rank: [model(words_of(1, rank), extra=True)])
        pair.check("after a backward inside")
        loss = pair.engine(words_of(2, pair.rank))
        with longshore.gather(pair.model):
            assert torch.equal(held.sharded["embedding.weight"], held.twins["embedding.weight"])
        pair.engine.backward(loss)
        pair.engine.step()
        pair.plain(lambda model, rank: [model(words_of(2, rank))])
        pair.check("after a look between forward and backward")
        return said


def gradients_inside() -> None:
    """Reduced gradients are read and replaced inside the block as outside of it, by every handle of a parameter."""
    with handles() as held:
        pair = held.pair
        pair.engine.backward(pair.engine(words_of(1, pair.rank)))
        with longshore.gather(pair.model):
            inside = [utils.safe_get_full_grad(each[NAME]) for each in (held.sharded, held.former, held.leaves)]
            assert raised_by(pair.engine.step).startswith("LongshoreError: this rank is in step() inside gather()")
        outside = utils.safe_get_full_grad(held.sharded[NAME])
        assert outside is not None and bool(outside.count_nonzero())
        assert all(each is not None and torch.equal(each, outside) for each in inside)
        pair.engine.step()
        pair.plain(lambda model, rank: [model(words_of(1, rank))])
        pair.check("after gradients were read inside")
        pair.engine.backward(pair.engine(words_of(2, pair.rank)))
        with longshore.gather(pair.model):
            utils.safe_set_full_grad(held.former[NAME], torch.full_like(outside, 0.25))
            found = utils.safe_get_full_grad(held.sharded[NAME])
        assert found is not None and torch.equal(found, torch.full_like(outside, 0.25))


def forward_after_a_write() -> None:
    """What a rank wrote is in its own forward at once, as in the tensors that it reads."""
    with handles() as held, longshore.gather(held.pair.model, modifier_rank=0):
        held.sharded[NAME].data.fill_(0.5)
        held.write(lambda each: each.fill_(0.5))
        with torch.no_grad():
            assert torch.equal(held.pair.model(words_of(5, 0)), held.pair.twin(words_of(5, 0)))


def loaded_inside() -> None:
    """As transformers loads weights into a sharded model: module by module, on rank 0."""
    with handles() as held:
        source = {name: torch.full_like(each, 0.125) for name, each in held.twins.items()}
        for name, module in held.pair.model.named_modules():
            own = list(module.parameters(recurse=False))
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                if dist.get_rank() == 0 and own:
                    errors: list[str] = []
                    with torch.no_grad():
                        module._load_from_state_dict(
                            {**source, "head.weight": source["embedding.weight"]}, f"{name}.", {}, True, [], [], errors
                        )
                    assert not errors
        for name in source:
            held.write(lambda each: each.fill_(0.125), name)
        held.pair.check("loaded")
        held.pair.train(1)


def frozen() -> None:
    """Frozen ones are read and written, and their masters are what they are; freezing inside a block stays."""
    model = make_tower()
    former = dict(model.named_parameters())
    model.extra.requires_grad_(False)
    with beside(model=model, model_parameters=list(model.parameters())) as pair:
        pair.twin.extra.requires_grad_(False)
        pair.train(0)
        weight, twin = model.extra.weight, pair.twin.extra.weight
        master = utils.safe_get_full_fp32_param(weight)
        assert master is not None and torch.equal(master, twin)
        with longshore.gather(weight, modifier_rank=1):
            assert not weight.requires_grad
            if pair.rank == 1:
                weight.fill_(0.75)
            master = utils.safe_get_full_fp32_param(weight)
            assert master is not None and torch.equal(master, twin), "written when the block ends"
        twin.fill_(0.75)
        for index in range(len(pair.loop.parameters)):
            pair.loop.refresh(index)
        pair.check("written")
        for trains in (False, True, False):
            with longshore.gather(model.blocks[1]):
                model.blocks[1].requires_grad_(trains)
                model.extra.requires_grad_(True)
            with longshore.gather(former["blocks.0.up.weight"]):
                assert former["blocks.0.up.weight"].requires_grad != trains
                former["blocks.0.up.weight"].requires_grad_(trains)
            pair.twin.blocks[1].requires_grad_(trains)
            pair.twin.get_parameter("blocks.0.up.weight").requires_grad_(trains)
            pair.twin.extra.requires_grad_(True)
            pair.train(1, lambda model, rank: [model(words_of(1, rank), extra=True)])


def tied() -> None:
    """A parameter in two modules is one."""
    with handles() as held:
        with longshore.gather(held.pair.model.head.weight, modifier_rank=1):
            if held.pair.rank == 1:
                held.former["embedding.weight"].data.fill_(0.5)
            assert held.pair.model.head.weight is held.pair.model.embedding.weight
        held.write(lambda each: each.fill_(0.5), "embedding.weight")
        held.pair.check("written")
        held.pair.train(1)


def masters_of_former_ones() -> None:
    """``longshore.utils`` knows the parameters from before, too."""
    with handles() as held:
        master = utils.safe_get_full_fp32_param(held.former[NAME])
        assert master is not None and torch.equal(master, held.twins[NAME])
        utils.safe_set_full_fp32_param(held.former[NAME], torch.full((7, 5), 0.5))
        held.write(lambda each: each.fill_(0.5))
        held.pair.check("set")
        held.pair.train(1)


def gradients_of_former_ones() -> str:
    """Where a script has a parameter from before, it finds the gradient on the host, and may discard it."""
    model = make_tower()
    former = dict(model.named_parameters())
    former[NAME].grad = torch.ones_like(former[NAME])
    with pytest.warns(UserWarning, match=f"the gradients that 1 parameters still had .{NAME}"):
        pair = Beside(model=model)

    def backward(step: int) -> None:
        pair.engine.backward(pair.engine(words_of(step, pair.rank)))

    def none_left() -> bool:
        return all(each.grad is None for each in former.values())

    pair.train(0)
    backward(1)
    said = raised_by(lambda: nn.utils.clip_grad_norm_(former.values(), 1.0))
    without = {name.split(".")[-2 if "extra" in name else -1] for name, each in former.items() if each.grad is None}
    assert without == {"extra", "nothing"}, "what was not used, and what has no elements"
    pair.engine.step()
    pair.plain(lambda model, rank: [model(words_of(1, rank))])
    pair.check("stepped after an error")
    assert none_left()
    for clear in (pair.engine.zero_grad, pair.engine.optimizer.zero_grad):
        backward(2)
        clear()
        assert none_left()
        pair.train(3)
    backward(4)
    for each in former.values():
        each.grad = None
    assert "a gradient was taken out of .grad (set to None" in raised_by(pair.engine.step)
    pair.engine.zero_grad()
    backward(5)
    model.zero_grad()
    assert none_left()
    pair.engine.zero_grad()
    with longshore.gather(former[NAME]):
        backward(6)
        assert former[NAME].grad is not None
    pair.engine.step()
    pair.plain(lambda model, rank: [model(words_of(6, rank))])
    pair.check("a backward inside a block")
    pair.engine.destroy()
    return said


def groups_of_former_ones() -> str:
    """A group may be added of parameters from before, and none of what is not in the model."""
    model = make_tower()
    former = dict(model.named_parameters())
    at_first = [each for name, each in former.items() if not name.startswith("extra")]
    with beside(model=model, model_parameters=at_first) as pair:
        pair.train(0)
        optimizer = pair.engine.optimizer
        said = raised_by(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))
        optimizer.add_param_group({"params": [former["extra.weight"], former["extra.bias"]]})
        assert len(optimizer.param_groups) == 2
        pair.train(1, lambda model, rank: [model(words_of(1, rank), extra=True)])
        assert not torch.equal(whole(model.extra.weight), make_tower().extra.weight), "it is stepped"
        again = raised_by(lambda: optimizer.add_param_group({"params": [former["extra.weight"]]}))
        assert "is in the parameter groups twice" in again and len(optimizer.param_groups) == 2
        pair.train(2)
        return said


def loaded_as_a_whole(dtype: torch.dtype) -> str:
    """The state of an unsharded model is loaded into the sharded one, or into a part of it."""
    torch.manual_seed(11)
    given = {name: torch.randn(each.shape) for name, each in make_tower().state_dict().items()}
    with handles(dtype) as held:
        model, twin = held.pair.model, held.pair.twin
        model.load_state_dict(given)
        twin.load_state_dict(given)
        held.write(lambda _: None)
        held.pair.check("loaded")
        held.pair.train(1)
        part = {name.removeprefix("blocks.2."): each for name, each in given.items() if name.startswith("blocks.2.")}
        model.blocks[0].load_state_dict(part)
        twin.blocks[0].load_state_dict(part)
        held.write(lambda _: None)
        held.pair.train(2)
        said = raised_by(lambda: model.load_state_dict(given, assign=True))
        wrong = raised_by(lambda: model.load_state_dict({NAME: torch.zeros(3)}, strict=False))
        assert "size mismatch for " + NAME in wrong, wrong
        held.pair.train(3)
        model.load_state_dict(model.state_dict())
        held.pair.check("its own")
        held.pair.train(4)
        return said


def master_set_inside() -> str:
    with handles() as held, longshore.gather(held.sharded[NAME], modifier_rank=0):
        return raised_by(lambda: utils.safe_set_full_fp32_param(held.sharded[NAME], torch.zeros(7, 5)))


def of_no_engine() -> list[str]:
    """Of an engine that is gone; nothing can gather for it."""
    model = make_tower()
    former = list(model.parameters())
    longshore.initialize(model=model, config=config_of()).engine.destroy()
    both = former[0], next(model.parameters())
    said = [raised_by(lambda each=each: longshore.gather(each).__enter__()) for each in both]
    with beside(model=model), longshore.gather(former[0]):  # the next engine of the same model
        assert torch.equal(former[0], make_tower().embedding.weight)
    return said


def written_where_writes_are_not_looked_for() -> None:
    """At stage 1, where parameters are whole: what one rank writes in the block counts on all, whatever torch sees."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    models = [make_model(torch.bfloat16) for _ in range(2)]
    offload = longshore.Offload(detect_writes=False)
    config = longshore.Config(stage=1, optimizer={"type": "AdamW", "lr": 0.1})
    engines = [longshore.initialize(model=model, config=config, offload=offload).engine for model in models]
    for step in range(3):
        for engine in engines:
            engine.backward(engine(inputs(step, 0, rank, torch.bfloat16), HEADS))
            engine.step()
        if step == 1:
            written, same = (model.first.weight for model in models)
            with longshore.gather(written, modifier_rank=1):
                if rank == 1:
                    written.data.fill_(0.5)
            with torch.no_grad():
                same.fill_(0.5)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    for engine in engines:
        engine.optimizer.close()


OUTSIDE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "written": (lambda former: former.detach().fill_(1.0), lambda former: None),
    "given other memory": (
        lambda former: setattr(former, "data", torch.ones(7, 5)),
        lambda former: setattr(former, "data", torch.empty(0)),
    ),
    "given a gradient": (
        lambda former: setattr(former, "grad", torch.zeros_like(former)),
        lambda former: setattr(former, "grad", None),
    ),
    "given a hook": (
        lambda former: former.register_hook(lambda gradient: gradient * 2),
        lambda former: former._backward_hooks.clear(),
    ),
}
"""What scripts do to a parameter that they hold from before ``initialize()``, where it is empty, and what undoes it."""


def changed_outside(what: str, ranks: tuple[int, ...]) -> str:
    """It is an error at the next forward, on all ranks at the latest in its backward; then training goes on."""
    change, undo = OUTSIDE[what]
    with handles() as held:
        if dist.get_rank() in ranks:
            change(held.former[NAME])
        said = raised_by(lambda: held.pair.train(1))
        held.pair.engine.zero_grad()
        held.pair.check("nothing was changed")
        if dist.get_rank() in ranks:
            undo(held.former[NAME])
        held.pair.train(2)
        return said


def changed_before_the_step(what: str, ranks: tuple[int, ...]) -> str:
    """Between a backward and its step it is an error of the step, which steps nothing; then training goes on."""
    change, undo = OUTSIDE[what]
    with handles() as held:
        engine = held.pair.engine
        engine.backward(engine(words_of(1, held.pair.rank)))
        if dist.get_rank() in ranks:
            change(held.former[NAME])
        said = raised_by(engine.step)
        engine.zero_grad()
        held.pair.check("nothing was stepped")
        if dist.get_rank() in ranks:
            undo(held.former[NAME])
        held.pair.train(2)
        return said
