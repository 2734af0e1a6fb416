from __future__ import annotations

from longshore.store.agreement import WindowStatus


def test_a_window_that_another_rank_gave_up_is_counted_once() -> None:
    window = WindowStatus()
    window.hear(3)
    assert window.told and window.number == 3
    assert not window.give_up()  # the others know
    assert window.number == 3
    window.told = False  # it was discarded
    assert window.give_up()
    assert window.number == 4


def test_an_old_message_says_nothing() -> None:
    window = WindowStatus()
    window.number = 5
    window.hear(5)
    assert not window.told and window.number == 5
