"""From a body's conversation to the prompt that the chat template makes of it, for every endpoint that takes one."""

from typing import Any, Protocol

from penstock.api.chat_protocol import ChatMessage
from penstock.api.context import SharedContext
from penstock.api.messages import template_messages
from penstock.api.templates.chat_template import RenderedPrompt
from penstock.api.workers import MANY, run
from penstock.engine.errors import InvalidRequest


class TemplateFields(Protocol):
    """What a body says of the template and of where the prompt ends."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...


def check_template_fields(context: SharedContext, body: TemplateFields) -> None:
    """Raises `InvalidRequest` for fields that contradict each other or that the operator has not allowed."""
    if body.chat_template is not None and not context.options.trust_request_chat_template:
        raise InvalidRequest(
            "a chat template in the request is refused: start the server with --trust-request-chat-template", "chat_template"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message")


async def render_conversation(
    context: SharedContext, body: TemplateFields, messages: list[ChatMessage], tools: list[dict[str, Any]], kwargs: dict[str, Any]
) -> RenderedPrompt:
    """The prompt, by the body's own template where it brings one. Raises `InvalidRequest` for what the template cannot take."""
    template = context.chat_template
    source = body.chat_template or template.source_for(tools) or ""
    knows_developer = "developer" in source
    plain = await run(context, lambda: template_messages(messages, knows_developer=knows_developer), is_long=len(messages) > MANY)
    continues = bool(body.continue_final_message)
    return await template.render(
        plain,
        tools or None,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=kwargs,
        template=body.chat_template,
    )
