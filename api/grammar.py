"""POST /v1/grammar/check: whether a constraint can be enforced, before a request brings it."""

from typing import Literal

from aiohttp import web
from msgspec import Struct

from penstock.api.bodies import CONTEXT, client_of, read_body
from penstock.api.errors import json_response
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.serving.context import ServerContext
from penstock.serving.endpoints.bodies import served_model
from penstock.serving.preparing import plan_constraint
from penstock.serving.requests import ConstraintFields
from penstock.serving.workers import queue_for


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
