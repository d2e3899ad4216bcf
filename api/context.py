"""What handlers find in the aiohttp application: the server's objects and the timer of each request; and GET /metrics."""

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from penstock.serving.context import PoolingContext, ServerContext, SharedContext
from penstock.serving.metrics import LoggedTimer, Metrics, PoolingTimer, RequestMetrics, RequestTimer

SHARED: web.AppKey[SharedContext] = web.AppKey("shared", SharedContext)

# One of these two is there. No route leads to handlers of the other kind, so that each takes its own context without asking.
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)

POOLING: web.AppKey[PoolingContext] = web.AppKey("pooling", PoolingContext)


REQUEST_METRICS: web.AppKey[RequestMetrics] = web.AppKey("request_metrics", RequestMetrics)

METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)  # the same, where the model generates

ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)

TIMER: web.RequestKey[LoggedTimer] = web.RequestKey("timer", LoggedTimer)


def begin_timer(request: web.Request) -> RequestTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log.

    A handler writes `begin_timer(request).watch(engine.generate(...))` in place of `engine.generate(...)`.
    """
    timer = request.app[METRICS].begin(request[ARRIVED])
    request[TIMER] = timer
    return timer


async def show_metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    return web.Response(body=request.app[REQUEST_METRICS].expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def begin_pooling_timer(request: web.Request) -> PoolingTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log."""
    timer = PoolingTimer(request.app[REQUEST_METRICS], request[ARRIVED])
    request[TIMER] = timer
    return timer
