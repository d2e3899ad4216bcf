"""Checks answers against their schemas in a process of its own, which bounds what a hostile schema can cost."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from penstock.api.common_protocol import Conformance
from penstock.api.constraints.conformance import undecided
from penstock.api.constraints.conformance_worker import Task

SECONDS = 2.0
MAX_WAIT = 10.0


class ConformanceChecker:
    """One process, started when the first answer comes and again where a check has ended it; checks take turns.

    `seconds` bounds one check, and `MAX_WAIT` how long an answer waits for its turn and result together: then it goes out unchecked.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def check(self, schema: str, answer: str) -> Conformance:
        try:
            return await asyncio.wait_for(self._in_turn(schema, answer), MAX_WAIT)
        except TimeoutError:
            return undecided("too many others wait to be checked")

    async def _in_turn(self, schema: str, answer: str) -> Conformance:
        async with self._turn:
            is_complete = False
            try:
                found = await self._ask(Task(schema, answer, self._seconds))
                is_complete = True
            finally:
                if not is_complete:  # the answer to a question that nobody waits for must not be taken for the next one's
                    self._kill()
        return found

    async def _ask(self, task: Task) -> Conformance:
        if self._process is None:
            arguments = (sys.executable, "-P", "-m", "penstock.api.constraints.conformance_worker")
            self._process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            await self._process.wait()
            self._process = None
            return undecided(f"it took longer than {self._seconds:g} s, or too much memory")
        return msgspec.json.decode(line, type=Conformance)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        """Ends the process. The next answer would start another."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()
