"""A thread that fills masks, and can be left alone with one that takes too long."""

import threading
import weakref
from queue import Empty, SimpleQueue

from penstock.engine.grammars.mask_fill import MaskFill


class MaskTask:
    """Masks to be filled one after the other. `is_begun` once a worker has been given it; `is_over` is set when none is left."""

    __slots__ = ("_fills", "is_begun", "is_over")

    def __init__(self, fills: list[MaskFill]) -> None:
        self._fills = fills
        self.is_begun = False
        self.is_over = threading.Event()

    def run(self) -> None:
        for fill in self._fills:
            if fill.take():
                fill.run()
        self.is_over.set()


class MaskWorker:
    """Runs tasks in the order they came. Its thread starts with the first, and ends when the worker is closed or let go.

    The thread is a daemon: nothing can stop a grammar that never comes back, and the process must be able to end all the same.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[MaskTask | None] = SimpleQueue()
        self._is_started = False
        self.close = weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: MaskTask) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=_work, args=(self._tasks,), name="mask", daemon=True).start()
        self._tasks.put(task)

    def successor(self) -> "MaskWorker":
        """A worker that takes over what this one has not begun, and leaves it alone with what it is at."""
        successor = MaskWorker()
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None:
                successor.submit(task)
        self.close()
        return successor


def _work(tasks: "SimpleQueue[MaskTask | None]") -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it holds a step's masks
