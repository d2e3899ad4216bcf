"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.beam_params import BeamSearchParams
    from penstock.engine.errors import ConfigurationError, EngineUnavailable, GenerationFailed, InvalidRequest, PenstockError, QueueFull
    from penstock.engine.hooks import hookimpl
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.executor import Executor
    from penstock.llm.executor_output import OutputConfig
    from penstock.llm.executor_request import Request
    from penstock.llm.executor_response import Response, Result
    from penstock.llm.executor_retention import KvCacheRetentionConfig
    from penstock.llm.executor_sampling import SamplingConfig
    from penstock.llm.llm import LLM
    from penstock.llm.prompts import TextPrompt, TokensPrompt
    from penstock.llm.request_output import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from penstock.llm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncLLM": "penstock.llm.async_llm",
    "BeamSearchOutput": "penstock.llm.request_output",
    "BeamSearchParams": "penstock.engine.beam_params",
    "BeamSearchSequence": "penstock.llm.request_output",
    "CompletionOutput": "penstock.llm.request_output",
    "ConfigurationError": "penstock.engine.errors",
    "EngineUnavailable": "penstock.engine.errors",
    "Executor": "penstock.llm.executor",
    "GenerationFailed": "penstock.engine.errors",
    "GuidedDecodingParams": "penstock.llm.sampling_params",
    "hookimpl": "penstock.engine.hooks",
    "InvalidRequest": "penstock.engine.errors",
    "KvCacheRetentionConfig": "penstock.llm.executor_retention",
    "LLM": "penstock.llm.llm",
    "Logprob": "penstock.llm.request_output",
    "OutputConfig": "penstock.llm.executor_output",
    "PenstockError": "penstock.engine.errors",
    "QueueFull": "penstock.engine.errors",
    "Request": "penstock.llm.executor_request",
    "RequestMetrics": "penstock.llm.request_output",
    "RequestOutput": "penstock.llm.request_output",
    "RequestOutputKind": "penstock.llm.sampling_params",
    "Response": "penstock.llm.executor_response",
    "Result": "penstock.llm.executor_response",
    "SamplingConfig": "penstock.llm.executor_sampling",
    "SamplingParams": "penstock.llm.sampling_params",
    "StructuredOutputsParams": "penstock.llm.sampling_params",
    "TextPrompt": "penstock.llm.prompts",
    "TokensPrompt": "penstock.llm.prompts",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigurationError",
    "EngineUnavailable",
    "Executor",
    "GenerationFailed",
    "GuidedDecodingParams",
    "InvalidRequest",
    "KvCacheRetentionConfig",
    "Logprob",
    "OutputConfig",
    "PenstockError",
    "QueueFull",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "Response",
    "Result",
    "SamplingConfig",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
