from pathlib import Path

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.engine.system.cache import cache_directory


def test_the_nearest_of_the_variables_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("PENSTOCK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/user/.cache/penstock")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/kept")
    assert cache_directory() == Path("/home/user/kept/penstock")
    monkeypatch.setenv("PENSTOCK_CACHE", "/elsewhere")
    assert cache_directory() == Path("/elsewhere")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="PENSTOCK_CACHE"):
        cache_directory()
    monkeypatch.setenv("PENSTOCK_CACHE", "/elsewhere")
    assert cache_directory() == Path("/elsewhere")
