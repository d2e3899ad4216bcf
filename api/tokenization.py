"""POST /tokenize and /detokenize, with vLLM's fields: what the model sees of a text or a conversation."""

from aiohttp import web

from penstock.api.bodies import MODEL, read_body
from penstock.api.errors import encoded_response
from penstock.serving.endpoints.tokenization import DetokenizeRequest, TokenizeRequest, answer_text, answer_tokens


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of a conversation as the model sees it."""
    body, size, headers = await read_body(request, TokenizeRequest)
    return encoded_response(await answer_tokens(request.app[MODEL], body, size), headers=headers)


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    body, size, headers = await read_body(request, DetokenizeRequest)
    return encoded_response(await answer_text(request.app[MODEL], body, size), headers=headers)
