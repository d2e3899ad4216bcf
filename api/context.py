"""The keys under which handlers find the server's objects in the aiohttp application."""

from typing import TYPE_CHECKING

from aiohttp import web

from penstock.serving.context import PoolingContext, ServerContext, SharedContext

if TYPE_CHECKING:
    pass


SHARED: web.AppKey[SharedContext] = web.AppKey("shared", SharedContext)

# One of these two is there. No route leads to handlers of the other kind, so that each takes its own context without asking.
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)

POOLING: web.AppKey[PoolingContext] = web.AppKey("pooling", PoolingContext)
