from __future__ import annotations

import pytest

import longshore
from longshore.errors import GradientError, HostMemoryError
from longshore.tiles import Ended, FailedThere, Window


def raised() -> ValueError:
    try:
        raise ValueError("no room")
    except ValueError as error:
        return error


def test_the_first_failure_is_told_each_time() -> None:
    window = Window()
    window.check()
    window.fail(longshore.ParameterError("moved"))
    window.fail(ValueError("later"))
    for _ in range(2):
        with pytest.raises(longshore.ParameterError, match=r"^moved$"):
            window.check()
    window.end(Ended.DISCARDED)
    window.check()


@pytest.mark.parametrize("failure", [raised(), HostMemoryError("no room"), KeyboardInterrupt("no room")], ids=repr)
def test_the_failure_of_an_addition_says_what_failed_and_what_to_do(failure: BaseException) -> None:
    """An error of ours, too: what it says holds where it was raised."""
    window = Window()
    window.fail(failure, "it was not added")
    with pytest.raises(GradientError, match=r"it was not added .*no room.*zero_grad\(\) discards this window") as told:
        window.check()
    assert isinstance(told.value.__cause__, FailedThere)


def test_a_failure_keeps_no_frames() -> None:
    window, failure = Window(), raised()
    error = GradientError("a gradient is lost")
    error.__cause__ = failure
    window.fail(error)
    with pytest.raises(GradientError, match="a gradient is lost") as told:
        window.check()
    assert told.value is not error and "in raised" in str(told.value.__cause__)
    assert window._failure is not None and window._failure.__traceback__ is None


def test_everybody_is_told_how_it_ended_before_it_forgets() -> None:
    class Listener:
        def __init__(self) -> None:
            self.told: list[tuple[Ended, bool]] = []

        def ended(self, how: Ended) -> None:
            self.told.append((how, window.refused))

    window, listeners = Window(), [Listener(), Listener()]
    for each in listeners:
        window.on_end(each.ended)
    window.refused = True
    window.end(Ended.SKIPPED)
    window.end(Ended.STEPPED)
    assert [each.told for each in listeners] == [[(Ended.SKIPPED, True), (Ended.STEPPED, False)]] * 2
    del each
    told = listeners.pop().told  # nobody else has the listener
    window.end(Ended.DISCARDED)
    assert len(told) == 2 and len(listeners[0].told) == 3


def test_a_listener_that_raises_does_not_keep_the_window_open_for_others() -> None:
    told: list[Ended] = []

    class Raising:
        def ended(self, how: Ended) -> None:
            raise UserWarning(how.name)

        def ended_later(self, how: Ended) -> None:
            told.append(how)

    window, listener = Window(), Raising()
    window.on_end(listener.ended)
    window.on_end(listener.ended_later)
    window.arrived[0] = 1
    window.fail(ValueError("lost"))
    with pytest.raises(UserWarning, match="DISCARDED"):
        window.end(Ended.DISCARDED)
    assert window.arrived == {} and not window.failed and told == [Ended.DISCARDED]


def test_replaced_parameters_take_their_failures_with_them_but_no_failed_backward() -> None:
    window = Window()
    window.arrived[0] = 1
    window.fail(ValueError("a hook"))
    window.lose_gradients()
    window.check()
    window.fail(GradientError("a backward"))
    window.gave_up = True
    window.lose_gradients()
    assert window.arrived == {}
    with pytest.raises(GradientError, match="a backward"):
        window.check()


def test_a_gradient_that_would_not_be_applied_is_named() -> None:
    window = Window()
    window.arrived.update({0: 2, 1: 1})
    assert window.balance([(0, "a", 6, 1, 1), (1, "empty", 0, 0, 1), (2, "frozen", 6, 0, 0)])[0] == (2, 1, 1)
    assert window.balance([(0, "a", 6, None, 1)])[0] == (2, None, 1)  # another rank steps it
    for reduced, applied in ((0, 1), (1, 0)):
        with pytest.raises(longshore.LongshoreError, match="parameter a: 2 gradients arrived"):
            window.balance([(0, "a", 6, reduced, applied)])
