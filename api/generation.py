"""POST /v1/chat/completions and /v1/completions, and about them: /tokenize, /detokenize and /v1/grammar/check, which says whether a
constraint can be enforced before a request brings it.
"""

from typing import Literal

from aiohttp import web
from msgspec import Struct

from penstock.api.answering import encoded_response, json_response, send
from penstock.api.requests import CONTEXT, MODEL, begin_timer, caller_of, client_of, read_admitted_body, read_body
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.serving.constraints.specs import plan_constraint
from penstock.serving.context import ServerContext
from penstock.serving.endpoints.bodies import served_model
from penstock.serving.endpoints.chat import answer_chat
from penstock.serving.endpoints.completions import answer_completion
from penstock.serving.endpoints.tokenization import DetokenizeRequest, TokenizeRequest, answer_text, answer_tokens
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest, ConstraintFields
from penstock.serving.workers import queue_for


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


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of a conversation as the model sees it."""
    body, size, headers = await read_body(request, TokenizeRequest)
    return encoded_response(await answer_tokens(request.app[MODEL], body, size), headers=headers)


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    body, size, headers = await read_body(request, DetokenizeRequest)
    return encoded_response(await answer_text(request.app[MODEL], body, size), headers=headers)


class GrammarCheckRequest(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """A constraint in any spelling that other requests have for it."""


class Refused(Struct):
    """What cannot be enforced, and the path of its field."""

    message: str
    path: str | None


class GrammarCheck(Struct):
    """`exact`: the whole constraint is enforced; `lenient`: all but what `not_enforced` names; `refused`: a request would get a 400."""

    verdict: Literal["exact", "lenient", "refused"]
    not_enforced: tuple[str, ...] = ()
    refusal: Refused | None = None
    object: str = "grammar.check"


async def check_grammar(http: web.Request) -> web.Response:
    """Compiles the constraint as a request's, with the same backends and limits; the result is cached for it."""
    context = http.app[CONTEXT]
    body, size, headers = await read_body(http, GrammarCheckRequest)
    served_model(context, body.model)
    return json_response(await checked(context, body, size, client_of(http)), headers=headers)


async def checked(context: ServerContext, body: GrammarCheckRequest, size: int, client: str | None) -> GrammarCheck:
    constraint = await context.workers.run(queue_for(size), lambda: plan_constraint(context, body))
    if constraint.spec is None:
        raise InvalidRequest("give a constraint, such as `guided_json` or `response_format`")
    try:
        grammar = await context.grammar_compiler.compile(constraint.spec, constraint.backend, client=client)
    except UnsupportedGrammar as error:
        return GrammarCheck("refused", refusal=Refused(error.message, error.param))
    return GrammarCheck("lenient" if grammar.warnings else "exact", tuple(grammar.warnings))
