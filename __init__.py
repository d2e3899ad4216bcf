"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.errors import ConfigurationError, EngineUnavailable, GenerationFailed, InvalidRequest, PenstockError, QueueFull
    from penstock.engine.hooks import hookimpl
    from penstock.engine.pooling.params import PoolingParams
    from penstock.engine.sampling.params import BeamSearchParams
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.executor import Executor
    from penstock.llm.executor_api.output import OutputConfig
    from penstock.llm.executor_api.request import Request
    from penstock.llm.executor_api.response import Response, Result
    from penstock.llm.executor_api.retention import KvCacheRetentionConfig
    from penstock.llm.executor_api.sampling import SamplingConfig
    from penstock.llm.llm import LLM
    from penstock.llm.pooling_output import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
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
    "BeamSearchParams": "penstock.engine.sampling.params",
    "BeamSearchSequence": "penstock.llm.request_output",
    "ClassificationOutput": "penstock.llm.pooling_output",
    "ClassificationRequestOutput": "penstock.llm.pooling_output",
    "CompletionOutput": "penstock.llm.request_output",
    "ConfigurationError": "penstock.engine.errors",
    "EmbeddingOutput": "penstock.llm.pooling_output",
    "EmbeddingRequestOutput": "penstock.llm.pooling_output",
    "EngineUnavailable": "penstock.engine.errors",
    "Executor": "penstock.llm.executor",
    "GenerationFailed": "penstock.engine.errors",
    "GuidedDecodingParams": "penstock.llm.sampling_params",
    "hookimpl": "penstock.engine.hooks",
    "InvalidRequest": "penstock.engine.errors",
    "KvCacheRetentionConfig": "penstock.llm.executor_api.retention",
    "LLM": "penstock.llm.llm",
    "Logprob": "penstock.llm.request_output",
    "OutputConfig": "penstock.llm.executor_api.output",
    "PenstockError": "penstock.engine.errors",
    "PoolingOutput": "penstock.llm.pooling_output",
    "PoolingParams": "penstock.engine.pooling.params",
    "PoolingRequestOutput": "penstock.llm.pooling_output",
    "QueueFull": "penstock.engine.errors",
    "Request": "penstock.llm.executor_api.request",
    "RequestMetrics": "penstock.llm.request_output",
    "RequestOutput": "penstock.llm.request_output",
    "RequestOutputKind": "penstock.llm.sampling_params",
    "Response": "penstock.llm.executor_api.response",
    "Result": "penstock.llm.executor_api.response",
    "SamplingConfig": "penstock.llm.executor_api.sampling",
    "SamplingParams": "penstock.llm.sampling_params",
    "ScoringOutput": "penstock.llm.pooling_output",
    "ScoringRequestOutput": "penstock.llm.pooling_output",
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
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigurationError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineUnavailable",
    "Executor",
    "GenerationFailed",
    "GuidedDecodingParams",
    "InvalidRequest",
    "KvCacheRetentionConfig",
    "Logprob",
    "OutputConfig",
    "PenstockError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueFull",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "Response",
    "Result",
    "SamplingConfig",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
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
