"""Many inputs through a pooling engine at once, for one caller."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from penstock.engine.errors import QueueFull
from penstock.engine.pooling.engine import EncodedText, PoolingEngine, PoolingOutput
from penstock.engine.pooling.params import PoolingParams

MAX_OPEN = 256  # enough for any batch; all of a long list at once would overflow the engine's queue, or shut others out of it


async def pool_all(
    engine: PoolingEngine,
    inputs: Sequence[EncodedText],
    params: PoolingParams | Sequence[PoolingParams],
    *,
    priority: int | Sequence[int] = 0,
    on_output: Callable[[PoolingOutput], None] | None = None,
) -> list[PoolingOutput]:
    """Their outputs in order. `params` and `priority` are for all of them, or one each. At most `MAX_OPEN` are with the engine at a time.

    The first exception of any ends the others and is raised. A full queue is waited out while inputs of this call are in it; it is a
    `QueueFull` only where none of them got in. Cancelling aborts those that run.
    """
    each = [params] * len(inputs) if isinstance(params, PoolingParams) else params
    priorities = [priority] * len(inputs) if isinstance(priority, int) else priority
    outputs: dict[int, PoolingOutput] = {}
    waiting = deque(zip(range(len(inputs)), inputs, each, priorities, strict=True))
    num_open = min(len(inputs), MAX_OPEN)

    async def work() -> None:
        nonlocal num_open
        while waiting:
            item = waiting.popleft()
            index, text, own, order = item
            if text.num_instruction_tokens:
                own = dataclasses.replace(own, num_instruction_tokens=text.num_instruction_tokens)
            try:
                output = await engine.pool(text.tokens.token_ids, own, token_type_ids=text.tokens.token_type_ids, priority=order)
            except QueueFull:
                if num_open == 1:
                    raise
                waiting.appendleft(item)
                num_open -= 1  # one place less: those that the others hold come free
                return
            outputs[index] = output
            if on_output is not None:
                on_output(output)

    tasks = [asyncio.create_task(work()) for _ in range(num_open)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outputs[index] for index in range(len(inputs))]
