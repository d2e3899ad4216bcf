"""POST /v1/chat/completions and /v1/completions."""

from aiohttp import web

from penstock.api.answering import send
from penstock.api.bodies import CONTEXT, begin_timer, caller_of, read_admitted_body
from penstock.serving.endpoints.chat import answer_chat
from penstock.serving.endpoints.completions import answer_completion
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answers a conversation, in one body or in a stream of its parts."""
    timer = begin_timer(http)
    body, size, headers = await read_admitted_body(http, ChatCompletionRequest)
    return await send(http, await answer_chat(http.app[CONTEXT], body, size, caller_of(http), timer), headers)


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continues one prompt or several. The text is the model's own: no parser reads it."""
    timer = begin_timer(http)
    body, size, headers = await read_admitted_body(http, CompletionRequest)
    return await send(http, await answer_completion(http.app[CONTEXT], body, size, caller_of(http), timer), headers)
