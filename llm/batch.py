"""Runs many requests at once, and gives each one's output as it is complete."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.engine.errors import GenerationFailed, InvalidRequest
from penstock.llm.local_model import LocalModel
from penstock.llm.output_fold import OutputFold
from penstock.llm.preparing import Prepared, located
from penstock.llm.request_output import RequestOutput

logger = logging.getLogger(__name__)


async def run_batch(model: LocalModel, batch: Sequence[Prepared]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place in the batch, output), whichever is complete first. Closing it ends what still runs.

    A sequence that fails on its way ends with an `error` and what it had said; the others go on. Raises `InvalidRequest` for a request
    that the engine does not take, and `EngineUnavailable`; then all of the batch is ended.
    """
    complete: asyncio.Queue[asyncio.Task[RequestOutput]] = asyncio.Queue()
    places: dict[asyncio.Task[RequestOutput], int] = {}
    for place, prepared in enumerate(batch):
        task = asyncio.create_task(run_one(model, prepared))
        task.add_done_callback(complete.put_nowait)
        places[task] = place
    try:
        for _ in batch:
            task = await complete.get()
            yield places.pop(task), task.result()
    finally:
        for task in places:
            task.cancel()
        await asyncio.gather(*places, return_exceptions=True)


async def run_one(model: LocalModel, prepared: Prepared) -> RequestOutput:
    context = model.generating
    fold = OutputFold(prepared, context.tokenizer)
    deltas = model.generate(prepared.request)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                try:
                    fold.add(delta)
                except (GenerationFailed, InvalidRequest) as error:
                    logger.warning("%s: answer %d failed: %s", prepared.path, delta.index, error)
                    fold.fail(delta.index, str(error))
    except InvalidRequest as error:
        raise located(error, prepared.path) from None
    return fold.whole()
