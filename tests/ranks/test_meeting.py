from __future__ import annotations

from longshore.ranks.meeting import Epoch


def test_a_window_that_another_rank_gave_up_is_counted_once() -> None:
    epoch = Epoch()
    epoch.hear(3)
    assert epoch.told and epoch.number == 3
    assert not epoch.give_up()  # the others know
    assert epoch.number == 3
    epoch.told = False  # it was discarded
    assert epoch.give_up()
    assert epoch.number == 4


def test_an_old_message_says_nothing() -> None:
    epoch = Epoch()
    epoch.number = 5
    epoch.hear(5)
    assert not epoch.told and epoch.number == 5
