"""Batches: files of requests that are answered when the server has nothing else to do, and go on after a restart where they were.

What a batch has answered is what its output files say; beside them it has one file of state, which is replaced as a whole.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.engine.errors import InvalidRequest, NoSuchObject, StorageFull
from penstock.serving.batches.files import Disk, FileObject, FileStore, Page, new_id, write_atomically
from penstock.serving.batches.lines import (
    ENVELOPE,
    BatchError,
    BatchUsage,
    InputFile,
    LineChecker,
    LineError,
    LineFile,
    LineResponse,
    NumberedLine,
    OutputLine,
    line_id,
    read_line,
)

log = logging.getLogger(__name__)

WINDOW_SECONDS = 24 * 3600
MAX_BATCHES = 10_000
MAX_UNFINISHED = 1_000
MAX_ACTIVE = 16  # batches that are worked on at a time, in turn
SWEEP_SECONDS = 60.0
OUTPUTS = ("output", "error")

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
Outcome = Literal["completed", "expired", "cancelled"]
# What a batch goes through. The last row's are final.
TRANSITIONS: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "failed", "cancelling", "finalizing"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired"),
    "cancelling": ("cancelled",),
    **dict.fromkeys(("completed", "failed", "expired", "cancelled"), ()),
}
WHY_UNANSWERED = {
    "expired": LineError("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": LineError("batch_cancelled", "The batch was cancelled before this request was executed."),
}


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(Struct, kw_only=True):
    """OpenAI's batch object. Times are in Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"

    @property
    def is_finished(self) -> bool:
        return not TRANSITIONS[self.status]

    def enter(self, status: Status, now: int) -> None:
        assert status in TRANSITIONS[self.status], f"{self.status} → {status}"
        self.status = status
        setattr(self, f"{status}_at", now)


class StoredBatch(Struct, kw_only=True):
    """A batch, the client that it belongs to, and its place in the order of creation.

    `key_name` is that of the API key that created it: others of the same client may have other limits. `outcome` is set once all lines of
    its output files are written. `file_ids` are those that the files will have, by `OUTPUTS`.
    """

    batch: Batch
    owner: str
    order: int
    file_ids: tuple[str, str]
    key_name: str | None = None
    output_seconds: int | None = None
    outcome: Outcome | None = None

    @property
    def key(self) -> str:
        return self.batch.id.removeprefix("batch_")


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What an endpoint answers. Where it cannot take the request now, `retry_after` says in how many seconds to ask again."""

    status: int
    body: bytes
    retry_after: float | None = None


class AnswerLine(Protocol):
    def __call__(self, endpoint: str, body: bytes, *, request_id: str, owner: str, key_name: str | None) -> Awaitable[LineAnswer]:
        """Answers one request as the endpoint would, after all requests that are not part of a batch."""
        ...


@dataclass(slots=True)
class _Job:
    """A batch that is not finished. `work` is the part that an end of the batch from outside cuts short."""

    stored: StoredBatch
    outputs: tuple[LineFile, LineFile]
    task: asyncio.Task[None] | None = None
    work: asyncio.Task[None] | None = None
    answered: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_body` is in bytes; `retry_seconds` is how long a full disk is waited for."""

    num_in_flight: int
    max_body: int
    retry_seconds: float = 10.0


class BatchStore:
    """All batches, and the tasks that work on them. `answer` answers a line; `endpoints` and `model_names` are what lines may ask for.

    Batches are for the first of these models, or, where there are `several`, for those that their lines name.
    """

    def __init__(
        self,
        disk: Disk,
        files: FileStore,
        answer: AnswerLine,
        *,
        endpoints: Collection[str],
        model_names: Callable[[], Sequence[str]],
        several: bool = False,
        limits: BatchLimits,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.files = files
        self.endpoints = endpoints
        self.num_answered = {"completed": 0, "failed": 0}  # since the start
        self._disk = disk
        self._answer = answer
        self._model_names = model_names
        self._several = several
        self._limits = limits
        self._now = now
        self._folder = disk.folder("batches")
        self._batches = {stored.batch.id: stored for stored in self._load()}
        self._jobs: dict[str, _Job] = {}
        self._active = asyncio.Semaphore(MAX_ACTIVE)
        self._in_flight = asyncio.Semaphore(limits.num_in_flight)  # in turn, so batches have equal shares
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopping = False
        files.is_in_use = self._reads

    def start(self) -> None:
        """Goes on with what is not finished."""
        self._sweeper = asyncio.create_task(self._sweep_now_and_then())
        for stored in self._batches.values():
            if not stored.batch.is_finished:
                self._begin(stored)

    async def stop(self) -> None:
        """Ends the work at once. What is not answered yet will be after the next start."""
        self._is_stopping = True
        tasks = [task for task in (self._sweeper, *(job.task for job in self._jobs.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_unfinished(self) -> int:
        return sum(not stored.batch.is_finished for stored in self._batches.values())

    async def create(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        *,
        key_name: str | None = None,
        metadata: dict[str, str] | None = None,
        output_seconds: int | None = None,
    ) -> Batch:
        """Raises `InvalidRequest` for what cannot be a batch, `StorageFull` where there is no room for its output."""
        file = self.files.get(owner, input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest(f"the file has the purpose {file.purpose!r}, and a batch takes one of purpose 'batch'", "input_file_id")
        self.files.check_room()
        if self.num_unfinished >= MAX_UNFINISHED:
            raise StorageFull(f"{MAX_UNFINISHED} batches are not finished yet: try again later")
        now = int(self._now())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
            model=None if self._several else self._model_names()[0],
        )
        file_ids = (new_id("file-"), new_id("file-"))
        stored = StoredBatch(
            batch=batch, owner=owner, order=time.time_ns(), file_ids=file_ids, key_name=key_name, output_seconds=output_seconds
        )
        await asyncio.shield(self._add(stored))  # whether its client waits for that or not
        return batch

    async def _add(self, stored: StoredBatch) -> None:
        self._batches[stored.batch.id] = stored  # from now on its input is in use
        try:
            await self._save(stored)
        except OSError:
            del self._batches[stored.batch.id]
            raise
        if not self._is_stopping:
            self._begin(stored)
        await self._forget_oldest()

    def get(self, owner: str, batch_id: str) -> Batch:
        """Raises `NoSuchObject`, also for other clients' batches."""
        stored = self._batches.get(batch_id)
        if stored is None or stored.owner != owner:
            raise NoSuchObject(f"there is no batch {batch_id!r}", "batch_id")
        return stored.batch

    def page_of(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """A page of the client's batches, and whether more follow."""
        return page.of([stored.batch for stored in self._batches.values() if stored.owner == owner], lambda batch: batch.id)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Aborts what is in flight. Raises `NoSuchObject`, and `InvalidRequest` where the batch is finished or about to be."""
        batch = self.get(owner, batch_id)
        if batch.status == "cancelling":
            return batch
        stored = self._batches[batch_id]
        work = self._jobs[batch_id].work if batch_id in self._jobs else None
        has_ended = stored.outcome is not None or (work is not None and work.done())
        if "cancelling" not in TRANSITIONS[batch.status] or has_ended:
            raise InvalidRequest(f"the batch cannot be cancelled: it is {'finalizing' if has_ended else batch.status}", "batch_id")
        batch.enter("cancelling", int(self._now()))
        if work is not None:
            work.cancel()
        await self._save(stored)
        return batch

    def _reads(self, file_id: str) -> bool:
        return any(stored.batch.input_file_id == file_id and not stored.batch.is_finished for stored in self._batches.values())

    def _load(self) -> list[StoredBatch]:
        for scratch in self._folder.glob("*.tmp"):
            scratch.unlink()
        found = self._disk.read_objects(self._folder, StoredBatch, lambda stored: stored.batch.id)
        found.sort(key=lambda stored: stored.order)
        written = {self._output_path(stored, name) for stored in found if not stored.batch.is_finished for name in OUTPUTS}
        for orphan in set(self._folder.glob("*.jsonl")) - written:
            orphan.unlink()
        return found

    def _output_path(self, stored: StoredBatch, name: str) -> Path:
        return self._folder / f"{stored.batch.id}.{name}.jsonl"

    def _state_path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"

    async def _save(self, stored: StoredBatch) -> None:
        data = msgspec.json.encode(stored)
        await self._disk.run(lambda: write_atomically(self._state_path(stored.batch.id), data))

    async def _patiently(self, job: Callable[[], Awaitable[None]]) -> None:
        """Does the job again for as long as the disk is full, or fails otherwise."""
        while True:
            try:
                return await job()
            except OSError as error:
                seconds = self._limits.retry_seconds
                log.warning("batches wait for the disk of --files-dir: %s; the next attempt is in %g s", error.strerror, seconds)
                await asyncio.sleep(seconds)

    async def _sweep_now_and_then(self) -> None:
        while True:
            try:
                await self.files.sweep()
            except OSError as error:
                log.warning("expired files cannot be removed: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _forget_oldest(self) -> None:
        """Keeps as many batches as there may be. Those that are not finished stay."""
        excess = len(self._batches) - MAX_BATCHES
        finished = [stored.batch.id for stored in self._batches.values() if stored.batch.is_finished]
        for batch_id in finished[: max(0, excess)]:
            del self._batches[batch_id]
            await self._disk.run(partial(self._state_path(batch_id).unlink, missing_ok=True))

    def _begin(self, stored: StoredBatch) -> None:
        output, error = (LineFile(self._output_path(stored, name)) for name in OUTPUTS)
        job = self._jobs[stored.batch.id] = _Job(stored, (output, error))
        job.task = asyncio.create_task(self._process(job))
        job.task.add_done_callback(lambda _: self._jobs.pop(stored.batch.id, None))

    async def _process(self, job: _Job) -> None:
        """From wherever the batch is to its end."""
        stored = job.stored
        try:
            if stored.outcome is None:
                await self._work_until_end(job)
            if not stored.batch.is_finished:
                await self._finish(job)
        except Exception:  # a defect of our own: the batch ends, and the client can see that
            log.exception("batch %s failed", stored.batch.id)
            stored.batch.status, stored.batch.failed_at = "failed", int(self._now())
            stored.batch.errors = BatchErrors([BatchError("server_error", "internal server error; the server's log has more")])
            await self._patiently(lambda: self._save(stored))

    async def _work_until_end(self, job: _Job) -> None:
        """Answers the lines until all are answered, the batch is cancelled, or its time is over."""
        stored, batch = job.stored, job.stored.batch
        if batch.status != "cancelling":
            job.work = asyncio.create_task(self._work(job))
            try:
                await asyncio.wait({job.work}, timeout=max(0.0, batch.expires_at - self._now()))
            finally:
                if not job.work.done():
                    job.work.cancel()
                    await asyncio.gather(job.work, return_exceptions=True)
        if batch.status == "failed":
            return
        outcome: Outcome = "cancelled" if batch.status == "cancelling" else "completed"
        if outcome == "completed" and job.work is not None:
            if job.work.cancelled():
                outcome = "expired"
            else:
                job.work.result()
        if outcome != "completed":
            await self._recover(job)
            await self._each_line(job, partial(self._leave, job, WHY_UNANSWERED[outcome]))
        for output in job.outputs:
            await self._patiently(partial(self._disk.run, output.sync))
        stored.outcome = outcome
        if batch.status != "cancelling":
            batch.enter("finalizing", int(self._now()))
        await self._patiently(lambda: self._save(stored))

    async def _work(self, job: _Job) -> None:
        batch = job.stored.batch
        is_served = self._several if batch.model is None else batch.model in self._model_names()
        if not is_served or batch.endpoint not in self.endpoints:
            model = "several models" if batch.model is None else batch.model
            log.warning("%s waits for a server of %s with %s, and expires without one", batch.id, model, batch.endpoint)
            await asyncio.Event().wait()
        async with self._active:
            if batch.status == "validating":
                await self._validate(job)
            if batch.status == "in_progress":
                await self._recover(job)
                async with asyncio.TaskGroup() as group:
                    await self._each_line(job, partial(self._spawn, group, job))

    async def _validate(self, job: _Job) -> None:
        stored, batch = job.stored, job.stored.batch
        checker = LineChecker(batch.endpoint, self._model_names())

        async def check(lines: list[NumberedLine]) -> bool:
            await self._disk.run(lambda: checker.check(lines))
            return checker.is_full

        await self._read_input(job, check)
        checker.finish()
        if checker.errors:
            batch.errors = BatchErrors(checker.errors)
            batch.enter("failed", int(self._now()))
        else:
            batch.request_counts.total = checker.num_requests
            batch.enter("in_progress", int(self._now()))
        await self._patiently(lambda: self._save(stored))

    async def _read_input(self, job: _Job, use: Callable[[list[NumberedLine]], Awaitable[bool]]) -> None:
        """Reads the lines until `use` has had enough of them."""
        path = self.files.path(job.stored.batch.input_file_id)
        source = InputFile(path, self._limits.max_body + ENVELOPE)
        try:
            while lines := await self._disk.run(source.read):
                if await use(lines):
                    break
        finally:
            await self._disk.run(source.close)

    async def _recover(self, job: _Job) -> None:
        """Counts what the output files say."""
        batch, usage = job.stored.batch, BatchUsage()
        completed, failed = [await self._disk.run(partial(output.recover, usage)) for output in job.outputs]
        job.answered = completed | failed
        batch.request_counts.completed, batch.request_counts.failed = len(completed), len(failed)
        batch.usage = usage

    async def _each_line(self, job: _Job, use: Callable[[NumberedLine], Awaitable[None]]) -> None:
        """Calls `use` with each line that is not answered."""

        async def use_all(lines: list[NumberedLine]) -> bool:
            for line in lines:
                if line.number not in job.answered:
                    await use(line)
            return False

        if job.stored.batch.request_counts.total:
            await self._read_input(job, use_all)

    async def _spawn(self, group: asyncio.TaskGroup, job: _Job, line: NumberedLine) -> None:
        await self._in_flight.acquire()
        task = group.create_task(self._answer_line(job, line))
        task.add_done_callback(lambda _: self._in_flight.release())

    async def _answer_line(self, job: _Job, line: NumberedLine) -> None:
        stored = job.stored
        assert line.text is not None
        given, request_id = read_line(line.text), line_id(stored.key, line.number)
        body = bytes(given.body)
        while True:
            answer = await self._answer(stored.batch.endpoint, body, request_id=request_id, owner=stored.owner, key_name=stored.key_name)
            if answer.retry_after is None:
                break
            await asyncio.sleep(answer.retry_after)
        written = OutputLine(request_id, given.custom_id, LineResponse(answer.status, request_id, Raw(answer.body)))
        await self._write(job, written, is_failed=not 200 <= answer.status < 300)
        stored.batch.usage.add(answer.body)

    async def _leave(self, job: _Job, why: LineError, line: NumberedLine) -> None:
        assert line.text is not None
        given = read_line(line.text)
        await self._write(job, OutputLine(line_id(job.stored.key, line.number), given.custom_id, error=why), is_failed=True)

    async def _write(self, job: _Job, line: OutputLine, *, is_failed: bool) -> None:
        output = job.outputs[is_failed]
        await self._patiently(lambda: self._disk.run(lambda: output.append(line)))
        counts = job.stored.batch.request_counts
        counts.completed += not is_failed
        counts.failed += is_failed
        self.num_answered["failed" if is_failed else "completed"] += 1

    async def _finish(self, job: _Job) -> None:
        """Hands the output files over to the file store, whatever of that was done before a crash."""
        stored, batch = job.stored, job.stored.batch
        assert stored.outcome is not None
        ids: list[str | None] = []
        for name, file_id in zip(OUTPUTS, stored.file_ids, strict=True):
            path = self._output_path(stored, name)
            if not self.files.has(file_id) and path.exists():
                await self._patiently(partial(self._adopt, stored, path, file_id, name))
            ids.append(file_id if self.files.has(file_id) else None)
        output_file_id, error_file_id = ids
        final = replace(batch, output_file_id=output_file_id, error_file_id=error_file_id)
        final.enter(stored.outcome, int(self._now()))
        await self._patiently(lambda: self._save(replace(stored, batch=final)))
        stored.batch = final  # clients see it once it is certain

    async def _adopt(self, stored: StoredBatch, path: Path, file_id: str, name: str) -> None:
        now, status = int(self._now()), await self._disk.run(path.stat)
        expires_at = None if stored.output_seconds is None else now + stored.output_seconds
        file = FileObject(
            id=file_id,
            bytes=status.st_size,
            created_at=now,
            filename=f"{stored.batch.id}_{name}.jsonl",
            purpose="batch_output",
            expires_at=expires_at,
        )
        await self.files.adopt(path, stored.owner, file)
