"""How long the processor has been at something: what is short is told by the clock, which costs less to read."""

import time

SHORT = 0.001  # seconds by the clock, up to which it does not matter whether the thread ran all the while

Moment = tuple[float, float]


def now() -> Moment:
    return time.perf_counter(), time.thread_time()


def since(moment: Moment) -> float:
    """Seconds of this thread's processor time, or by the clock where that is no more than `SHORT`."""
    seconds = time.perf_counter() - moment[0]
    return seconds if seconds <= SHORT else time.thread_time() - moment[1]
