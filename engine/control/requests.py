"""The requests of an engine as an operator sees them: without their text."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.engine.request import Request
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """`id` is the engine's own, and `http_id` that of the HTTP request, which several may have in common.

    `state` is `running` where one of its sequences runs, else `waiting`, or `ended` where the client has not read the end yet.

    `model` is the name of the adapter, where it has one. `client` is what the server tells its clients apart by, if it does. `age` is in
    seconds. Tokens of the output are those of all sequences; `num_blocks` are the blocks of the KV cache that they hold, shared ones once.
    """

    id: str
    http_id: str | None
    state: str
    model: str
    client: str | None
    priority: int
    age: float
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_blocks: int


def requests_of(scheduler: Scheduler, opened: Iterable[tuple[Request, float]], model_name: str) -> list[RequestInfo]:
    """The oldest first. With each request comes when it was opened, in `time.monotonic()`."""
    sequences: Mapping[str, list[Sequence]] = defaultdict(list)
    for sequence in (*scheduler.running, *scheduler.waiting):
        for member in sequence.self_and_forks:
            sequences[member.request.request_id].append(member)
    now = time.monotonic()
    return [_describe(request, model_name, now - since, sequences.get(request.request_id, [])) for request, since in opened]


def _describe(request: Request, model_name: str, age: float, sequences: list[Sequence]) -> RequestInfo:
    is_running = any(sequence.status is Status.RUNNING for sequence in sequences)
    return RequestInfo(
        id=request.request_id,
        http_id=request.http_id,
        state="running" if is_running else "waiting" if sequences else "ended",
        model=model_name if request.adapter is None else request.adapter.name,
        client=None if request.client_id is None else str(request.client_id),
        priority=request.priority,
        age=age,
        num_sequences=request.params.n,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=max((sequence.num_cached_tokens for sequence in sequences), default=0),
        num_output_tokens=sum(sequence.num_output_tokens for sequence in sequences),
        num_blocks=len({block for sequence in sequences for table in sequence.block_tables for block in table.held}),
    )
