"""Edits of what ``optimizer.state`` and ``state_dict()`` hand out: the weights are those of torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, loss_of, same_weights, simulated, small_model, twins
from torch import Tensor, nn

import longshore

TILE = 50  # smaller than the parameters of small_model(), which then span tiles


class Pair:
    """The same model twice, with the plain loop and with ours."""

    def __init__(self, kind: Kind, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        plain_model, model = twins(dtype)
        self.model: Any = model
        self.dtype = dtype
        self.plain = kind.loop(plain_model.parameters())
        self.plain_model = plain_model
        self.ours = kind.make(self.model.parameters(), offload=simulated(tile_numel=TILE), **options)
        self.released = options.get("release_gradients", False)

    def train(self, steps: range, between: Callable[[], None] = lambda: None) -> None:
        for step in steps:
            for each in (self.plain_model, self.model):
                loss_of(each, step, self.dtype).backward()
            between()
            self.plain.step_on_grads()
            self.ours.step()
            self.ours.zero_grad()
            assert same_weights(self.plain_model, self.model), step

    def both(self, place: int, name: str) -> tuple[Tensor, Tensor]:
        """One state of the ``place``-th parameter in the plain loop (in the shape of the parameter), and ours."""
        parameter = list(self.model.parameters())[place]
        theirs = self.plain.optimizer.state[self.plain.masters[place]][name]
        theirs = theirs if name == "step" else theirs[: parameter.numel()].view(parameter.shape)
        return theirs, self.ours.state[parameter][name]


WITH_STATES = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.states], ids=[name for name in KIND_NAMES if "without" not in name]
)


def names_of(kind: Kind) -> tuple[str, ...]:
    return kind.states if kind.name in ("SGD", "Lion") else ("step", *kind.states)


@pytest.mark.quick(0)
@pytest.mark.parametrize("options", [{}, {"release_gradients": True}], ids=["default", "released"])
@WITH_STATES
def test_edits_in_place_are_edits_of_the_state(kind: Kind, options: dict[str, Any]) -> None:
    """Of a tensor that nobody keeps, by ``.data``, by slices and views, and of the step count."""
    pair = Pair(kind, **options)
    pair.train(range(2))
    for name in names_of(kind):
        for tensor in pair.both(0, name):
            tensor.fill_(7.0) if name == "step" else tensor.zero_()
        for tensor in pair.both(2, name):
            tensor.data.mul_(2.0)
    for tensor in pair.both(4, kind.states[0]):
        tensor[1].fill_(0.25)
        tensor.view(-1)[-3:] = 0.5
    for tensor in pair.both(5, kind.states[0]):
        tensor.detach().numpy()[1] = 1.0  # torch counts no version
    pair.train(range(2, 5))
    for name in names_of(kind):
        assert torch.equal(*pair.both(0, name)), name


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4]], ids=["AdamW", "Adagrad", "SGD"])
def test_a_tensor_that_is_kept_follows_the_steps_and_edits_of_it_count(kind: Kind) -> None:
    pair = Pair(kind)
    pair.train(range(1))
    kept = {name: pair.both(0, name) for name in names_of(kind)}
    views = [tensor[:2] for tensor in pair.both(4, kind.states[0])]
    data = [tensor.data for tensor in pair.both(2, kind.states[0])]  # knows nothing of the tensor that it comes from
    pair.train(range(1, 3))
    assert torch.equal(*data)
    for name, (theirs, ours) in kept.items():
        assert torch.equal(theirs, ours) and pair.both(0, name)[1] is ours
    for theirs, ours in kept.values():
        for tensor in (theirs, ours):
            tensor.mul_(2)
    for view in (*views, *data):
        view.zero_()
    pair.train(range(3, 5))
    assert torch.equal(*views) and torch.equal(*data)


def test_each_step_may_be_followed_by_an_edit_and_edits_come_between_backward_and_step() -> None:
    kind = KINDS[0]
    for ahead in (0, "100%"):
        pair = Pair(kind)
        model: Any = small_model()
        model.load_state_dict(pair.plain_model.state_dict())
        pair.model = model
        transfer = longshore.SimulatedTransfer(seed=1)
        offload = longshore.Offload(tile_numel=TILE, transfer=transfer, speculation_memory=ahead)
        pair.ours = kind.make(model.parameters(), offload=offload, release_gradients=True)
        pair.train(range(2))
        kept = pair.both(0, "exp_avg_sq")

        def edit(pair: Pair = pair, kept: tuple[Tensor, ...] = kept) -> None:
            for tensor in (*kept, *pair.both(2, "exp_avg"), *pair.both(0, "step")):
                tensor.add_(1.0)

        pair.train(range(2, 6), edit)
        if ahead:
            assert pair.ours.speculation.begun > 0


def test_edits_of_everything_that_a_state_dict_and_values_hand_out() -> None:
    pair = Pair(KINDS[0])
    pair.train(range(2))
    for optimizer in (pair.plain.optimizer, pair.ours):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        for state in optimizer.state_dict()["state"].values():
            state["exp_avg_sq"].mul_(4.0)
    pair.train(range(2, 4))
    saved = pair.ours.state_dict()
    pair.both(0, "exp_avg")[1].zero_()
    assert saved["state"][0]["exp_avg"].eq(0).all()  # as in torch, it is the same tensor
    assert copy.deepcopy(pair.ours.state_dict())["state"][0]["exp_avg"].eq(0).all()


def test_saved_checkpoints_have_the_edits(tmp_path: Any) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.state[model[0].weight]["exp_avg"].fill_(0.125)
    optimizer.state[model[0].weight]["step"].fill_(9)
    longshore.save(tmp_path, model, optimizer)
    other = small_model(seed=1)
    loaded = longshore.AdamW(other.parameters())
    longshore.load(tmp_path, other, loaded)
    assert loaded.state[other[0].weight]["exp_avg"].eq(0.125).all()
    assert loaded.state[other[0].weight]["step"] == 9


def test_a_state_that_is_set_is_the_tensor_that_was_set() -> None:
    pair = Pair(KINDS[0])
    pair.train(range(2))
    weight = pair.model[0].weight
    mine = torch.zeros_like(weight)
    pair.ours.state[weight]["exp_avg"] = mine
    theirs, ours = pair.both(0, "exp_avg")
    theirs.zero_()
    assert ours is mine
    pair.train(range(2, 3))
    assert torch.equal(theirs, mine)
    for tensor in (theirs, mine):
        tensor.add_(0.5)
    pair.train(range(3, 5))


def test_an_edited_master_is_the_parameter_too() -> None:
    model = small_model(torch.bfloat16)
    optimizer = longshore.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for _ in range(2):
        loss_of(model, 0, torch.bfloat16).backward()
        optimizer.step()
    master = optimizer.state[model[0].weight]["master"]
    master.fill_(1.0009765625)  # no bfloat16
    optimizer.step()
    assert model[0].weight.eq(1.0).all()
    assert optimizer.state[model[0].weight]["master"].eq(1.0009765625).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("when", ["stepped", "loaded", "new"])
def test_an_assigned_master_is_the_parameter_too(dtype: torch.dtype, staged: bool, when: str) -> None:
    """Also of a float32 parameter, which is its own master, between loading and the next step, and before the first."""
    model = small_model(dtype)
    optimizer = longshore.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, offload=simulated() if staged else None)
    weight = model[0].weight
    for _ in range(0 if when == "new" else 2):
        loss_of(model, 0, dtype).backward()
        optimizer.step()
    if when == "loaded":
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[weight]["master"] = torch.full(weight.shape[::-1], 1.0009765625).t()  # no bfloat16
    loss_of(model, 0, dtype).backward()
    optimizer.step()
    assert weight.eq(torch.tensor(1.0009765625).to(dtype)).all()
    loss_of(model, 0, dtype).backward()
    optimizer.step()
    assert weight.eq(torch.tensor(1.0009765625).to(dtype)).all()
    if dtype == torch.bfloat16:
        assert optimizer.state[weight]["master"].eq(1.0009765625).all()
    optimizer.state[weight]["master"] = torch.ones(3)
    with pytest.raises(ValueError, match="master is"):
        optimizer.step()


def test_the_master_of_a_state_that_moves_does_not_change_the_new_parameter() -> None:
    """Scripts reset a parameter: they replace it, and move its state, in which our master is."""
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = longshore.AdamW([parameter], lr=0.0, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    new = nn.Parameter(torch.full((64,), 3.0, dtype=torch.bfloat16))
    state = optimizer.state.pop(parameter)
    optimizer.param_groups[0]["params"] = [new]
    optimizer.state[new] = state
    new.grad = torch.ones_like(new)
    optimizer.step()
    assert new.eq(3).all()


def test_an_edit_that_is_no_state_is_an_error_and_nothing_was_stepped() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.named_parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    optimizer.state[model[0].weight]["step"].fill_(0.5)
    with pytest.raises(ValueError, match=r"0\.weight: step is 0\.5, not a count"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.state[model[0].weight]["step"].fill_(1)
    optimizer.step()


def test_loading_ends_the_watch_as_in_torch() -> None:
    pair = Pair(KINDS[0])
    pair.train(range(2))
    saved = copy.deepcopy(pair.ours.state_dict())
    _, old = pair.both(0, "exp_avg")
    pair.ours.load_state_dict(saved)
    old.fill_(100.0)  # no longer part of the state
    pair.train(range(2, 4))
    assert old.eq(100.0).all()


def test_copies_that_nobody_has_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading every state in turn takes no more memory than a few of them."""
    monkeypatch.setattr("longshore.optim.user_state._LEAST_BYTES", 1 << 20)
    parameters = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(20)]
    optimizer = longshore.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    most = 0
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)
        copies = optimizer._core.members.user_state.copies
        most = max(most, sum(copy.values.nbytes for each in copies.values() for copy in each.values()))
    assert most <= 6 * parameters[0].numel() * 4
    assert all(state["momentum_buffer"].eq(0.5).all() for state in optimizer.state.values())
    optimizer.step()
    assert not optimizer._core.members.user_state.copies


def test_a_state_is_a_dictionary() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    assert isinstance(optimizer.state, dict)
    state = optimizer.state[model[0].weight]
    assert isinstance(state, dict) and state is optimizer.state[model[0].weight]
    assert (
        list(state) == list({**state}) == list(dict(state)) == list(state.copy()) == ["step", "exp_avg", "exp_avg_sq"]
    )
    assert list(state | {"more": 1})[-1] == "more"
    for other in (copy.deepcopy(state), copy.copy(state)):
        assert type(other) is dict and torch.equal(other["exp_avg"], state["exp_avg"])


def test_a_cleared_state_begins_anew_and_sgd_without_its_buffer_too() -> None:
    pair = Pair(KINDS[4])
    pair.train(range(2))
    pair.plain.optimizer.state[pair.plain.masters[0]].pop("momentum_buffer")
    pair.ours.state[pair.model[0].weight].pop("momentum_buffer")
    pair.plain.optimizer.state[pair.plain.masters[2]].pop("momentum_buffer")
    pair.ours.state[pair.model[2].weight]["momentum_buffer"] = None
    pair.train(range(2, 4))
    pair = Pair(KINDS[0])
    pair.train(range(2))
    pair.plain.optimizer.state[pair.plain.masters[0]].clear()
    pair.ours.state[pair.model[0].weight].clear()
    pair.train(range(2, 4))


def test_step_hooks_write_state() -> None:
    pair = Pair(KINDS[0])
    for optimizer, key in ((pair.plain.optimizer, pair.plain.masters[0]), (pair.ours, pair.model[0].weight)):

        def before(optimizer: Any, *_: Any, key: Any = key) -> None:
            if key in optimizer.state:
                optimizer.state[key]["exp_avg"].mul_(0.5)

        def after(optimizer: Any, *_: Any, key: Any = key) -> None:
            optimizer.state[key]["exp_avg_sq"].add_(0.5)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    pair.train(range(4))


def test_entries_of_the_users_own_are_kept_saved_and_loaded(tmp_path: Any) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    slow = optimizer.state[model[0].weight]["slow"] = torch.full((3,), 2.0)
    optimizer.state["global_step"] = 5
    optimizer.state["counts"]["resets"] = 1
    loss_of(model, 0).backward()
    optimizer.step()
    slow.add_(1.0)
    optimizer.state[model[0].weight]["flag"] = True
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["global_step"] == 5 and saved["state"][0]["flag"] is True

    def check(of: Any, weight: Any) -> None:
        assert of.state[weight]["slow"].tolist() == [3.0] * 3 and of.state[weight]["flag"] is True
        assert of.state["global_step"] == 5 and of.state["counts"] == {"resets": 1}
        assert of.state[weight]["step"] == 1

    check(optimizer, model[0].weight)
    other = small_model()
    loaded = longshore.AdamW(other.parameters())
    loaded.load_state_dict(saved)
    check(loaded, other[0].weight)
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(saved)
    check(theirs, other[0].weight)
    longshore.save(tmp_path, model, optimizer)
    again = longshore.AdamW(other.parameters())
    longshore.load(tmp_path, other, again)
    check(again, other[0].weight)


def test_a_state_that_was_asked_for_is_there_from_then_on_and_only_then_it_can_be_deleted() -> None:
    """As in the defaultdict of torch's optimizers."""
    pair = Pair(KINDS[0])
    plain, ours = torch.optim.AdamW(pair.plain_model.parameters()), pair.ours
    for each in (plain, ours):
        first, second, *_ = each.param_groups[0]["params"]
        with pytest.raises(KeyError):
            del each.state[first]
        assert first not in each.state and len(each.state[first]) == 0 and first in each.state
        assert dict(each.state_dict()["state"]) == {0: {}} and second not in each.state
        del each.state[first]
        assert first not in each.state and len(each.state) == 0
        assert len(each.state[second]) == 0
        for parameter in (first, second):
            parameter.grad = torch.ones_like(parameter)
        each.step()
        assert len(each.state) == 2


def test_a_state_set_before_the_first_step_leaves_the_others_as_they_begin() -> None:
    """Adagrad's sum begins at ``initial_accumulator_value``, also where only the step count was set."""
    parameters = [nn.Parameter(torch.ones(16)) for _ in range(2)]
    optimizers = [
        kind([parameter], lr=0.1, initial_accumulator_value=0.5, **options)
        for kind, parameter, options in zip(
            (longshore.Adagrad, torch.optim.Adagrad), parameters, ({}, {"fused": True}), strict=True
        )
    ]
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        optimizer.state[parameter]["step"] = torch.tensor(3.0)
        parameter.grad = torch.ones(16)
        optimizer.step()
        assert optimizer.state[parameter]["sum"].eq(1.5).all()
    assert torch.equal(*parameters)


def test_states_are_in_the_order_in_which_they_came() -> None:
    """As in torch's dictionary: one that was asked for before the first step comes first."""
    orders = []
    for kind in (longshore.AdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(torch.ones(4)) for _ in range(4)]
        optimizer = kind(parameters)
        assert "step" not in optimizer.state[parameters[2]]
        for given in (parameters[1:3], parameters):
            for each in given:
                each.grad = torch.ones(4)
            optimizer.step()
            optimizer.zero_grad()
            assert len(optimizer.state[parameters[1]]) > 0
        places = {id(each): place for place, each in enumerate(parameters)}
        orders.append([places[id(each)] for each in optimizer.state])
    assert orders[0] == orders[1] == [2, 1, 0, 3]


def test_empty_states_and_their_order_are_loaded() -> None:
    orders = []
    for kind in (longshore.AdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(torch.ones(4)) for _ in range(4)]
        optimizer = kind(parameters)
        assert "step" not in optimizer.state[parameters[2]]
        parameters[3].grad = torch.ones(4)
        optimizer.step()
        assert "step" not in optimizer.state[parameters[0]]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kind(parameters)
        optimizer.load_state_dict(saved)
        places = {id(each): place for place, each in enumerate(parameters)}
        orders.append([(places[id(each)], len(state)) for each, state in optimizer.state.items()])
    assert orders[0] == orders[1] == [(2, 0), (3, 3), (0, 0)]


def test_a_state_that_was_assigned_and_dropped_is_read_after_the_step() -> None:
    states = []
    for kind, options in ((longshore.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        parameter = nn.Parameter(torch.ones(16))
        optimizer = kind([parameter], lr=0.1, **options)
        for _ in range(2):
            parameter.grad = torch.ones(16)
            optimizer.step()
            optimizer.state[parameter]["exp_avg"] = torch.full((16,), 5.0)
        optimizer.step()
        states.append(optimizer.state[parameter]["exp_avg"])
    assert torch.equal(*states) and states[0][0] != 5.0
