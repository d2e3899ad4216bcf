"""What requests and responses of the endpoints for pooling models share."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.api.chat_protocol import Messages
from penstock.api.common_protocol import RequestFields

EncodingFormat = Literal["float", "base64"]
# A string, a list of strings, token ids, or a list of lists of token ids.
PoolingSource = str | list[str | int | list[int]]


class PoolingFields(RequestFields, kw_only=True):
    """`truncate_prompt_tokens` cuts each input to so many tokens, and with -1 to what the model takes; without it none is cut."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


class InputFields(PoolingFields, kw_only=True):
    """Either `input` or, as vLLM has it, `messages` that the model's chat template makes one input of.

    `prompt_name` names one of the instructions in the model's sentence-transformers files, to be put before each text. `input_type` says
    what the texts are for, in the words of Cohere's and NVIDIA's clients: it chooses the instruction where the model has one for that.
    """

    input: PoolingSource | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PoolingUsage(Struct):
    """Nothing is generated: `total_tokens` are those of the prompts."""

    prompt_tokens: int
    total_tokens: int
