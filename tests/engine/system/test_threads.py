import sys

import pytest

from penstock.engine.system.process import SWITCH_SECONDS, LockHandover


def test_the_interval_is_short_until_the_last_has_left() -> None:
    before = sys.getswitchinterval()
    handover = LockHandover()
    with handover:
        with handover, pytest.raises(ZeroDivisionError), handover:
            raise ZeroDivisionError
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_already_stays() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(SWITCH_SECONDS / 10)
        with LockHandover():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS / 10)
    finally:
        sys.setswitchinterval(before)
