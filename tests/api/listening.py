"""An application behind a socket of its own, in the test's event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.api.app import build_runner


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Its address, without a slash at the end."""
    runner = build_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
