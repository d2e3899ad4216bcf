"""`kv_transfer_params`: one server computes a prompt, another one the answer, by the fields that vLLM's routers pass between the two."""

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.engine.errors import InvalidRequest
from penstock.serving.context import LocalContext, ServerContext
from penstock.serving.requests import GenerationFields, KVTransferParams
from penstock.serving.workers import JobQueue

if TYPE_CHECKING:
    from penstock.engine.request import Request

PARAM = "kv_transfer_params"


class TransferAnswer(Struct):
    """What a response to `do_remote_decode` has, and the request to the other server has in its turn."""

    state: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


async def plan_transfer(context: ServerContext, body: GenerationFields, given: KVTransferParams, requests: "list[Request]") -> None:
    """Has the prompt exported, or receives its blocks, as the body's parameters say. Raises `InvalidRequest`."""
    if not (given.do_remote_decode or given.do_remote_prefill):
        return
    if given.do_remote_decode and given.do_remote_prefill:
        raise InvalidRequest("`do_remote_decode` and `do_remote_prefill` are for two servers: set one of them", PARAM)
    if not isinstance(context, LocalContext) or (core := context.engine.core).transfer is None:
        raise InvalidRequest(f"`{PARAM}` is off: start the server with --kv-transfer-dir", PARAM)
    request, *others = requests
    if others or request.beam is not None or request.exact:
        raise InvalidRequest(f"`{PARAM}` is for one prompt, without beams or exact sampling", PARAM)
    if given.do_remote_decode:
        if body.stream:
            raise InvalidRequest("a prompt is handed over with a whole answer: `do_remote_decode` does not go with `stream`", PARAM)
        request.is_exported = True
        return
    state = given.state
    if state is None:
        raise InvalidRequest("`do_remote_prefill` needs the `state` that the other server's answer has", f"{PARAM}.state")
    try:
        request.received = await context.workers.run(JobQueue.LONG, lambda: core.receive(request, state.encode()))
    except InvalidRequest as refusal:
        raise InvalidRequest(f"`{PARAM}`: {refusal}", f"{PARAM}.state") from None
