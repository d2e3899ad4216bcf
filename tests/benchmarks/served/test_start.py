"""What `benchmarks/start.py` reads of a server's log, and its table."""

import logging

import pytest

from benchmarks.start import Phase, Start, phases, table
from penstock.engine.system.process import startup_phase

GB = 10**9


def test_the_phases_are_those_that_a_server_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "penstock"), startup_phase("outer: a"), startup_phase("inner"):
        pass
    found = phases(caplog.text)
    assert [phase.name for phase in found] == ["inner", "outer: a"]
    assert all(phase.seconds >= 0 and phase.processor_seconds >= 0 for phase in found)


def test_the_table_has_medians_in_the_order_of_the_phases() -> None:
    starts = [Start(float(n), n / 2, n * GB, 2 * n * GB, [Phase("torch", 1.0 * n, 0.5), Phase("model", 0.25, 0.125)]) for n in (1, 2, 9)]
    rows = [line.split() for line in table(starts).splitlines()]
    assert rows == [
        ["phase", "s", "CPU", "s"],
        ["torch", "2.00", "0.50"],
        ["model", "0.25", "0.12"],
        ["first", "answer", "2.00", "1.00"],
        ["resident", "2.00", "GB,", "peak", "4.00", "GB"],
    ]
