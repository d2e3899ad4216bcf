"""In place of the pydantic models of `ray.serve.llm`, which cannot be imported without vLLM or SGLang: any fields are theirs."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ChatCompletionRequest(_Open):
    """Has a default that no client has set, as vLLM's has many."""

    stream: bool | None = False
    vllm_xargs: dict[str, Any] | None = {"not": "sent"}


class ChatCompletionResponse(_Open):
    choices: list[dict[str, Any]]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo
