"""Where work is done that could hold up the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from penstock.api.context import SharedContext
from penstock.engine.overlap.lock_handover import HANDOVER

T = TypeVar("T")

MANY = 500  # messages and tools, or prompts: fewer take less than a few milliseconds


async def run(context: SharedContext, call: Callable[[], T], *, is_long: bool) -> T:
    """Calls it here where that is quick, in a worker where it would hold up every stream."""
    if not is_long:
        return call()
    with HANDOVER:
        return await asyncio.get_running_loop().run_in_executor(context.workers, call)
