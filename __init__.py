"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.errors import ConfigurationError, EngineUnavailable, GenerationFailed, InvalidRequest, PenstockError, QueueFull
    from penstock.engine.hooks import hookimpl
    from penstock.engine.pooling.params import PoolingParams
    from penstock.engine.sampling.params import BeamSearchParams
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.executor.executor import Executor
    from penstock.llm.executor.requests import KvCacheRetentionConfig, OutputConfig, Request, SamplingConfig
    from penstock.llm.executor.responses import Response, Result
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.llm.preparing import TextPrompt, TokensPrompt
    from penstock.llm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncLLM": "penstock.llm.async_llm",
    "BeamSearchOutput": "penstock.llm.outputs",
    "BeamSearchParams": "penstock.engine.sampling.params",
    "BeamSearchSequence": "penstock.llm.outputs",
    "ClassificationOutput": "penstock.llm.outputs",
    "ClassificationRequestOutput": "penstock.llm.outputs",
    "CompletionOutput": "penstock.llm.outputs",
    "ConfigurationError": "penstock.engine.errors",
    "EmbeddingOutput": "penstock.llm.outputs",
    "EmbeddingRequestOutput": "penstock.llm.outputs",
    "EngineUnavailable": "penstock.engine.errors",
    "Executor": "penstock.llm.executor.executor",
    "GenerationFailed": "penstock.engine.errors",
    "GuidedDecodingParams": "penstock.llm.sampling_params",
    "hookimpl": "penstock.engine.hooks",
    "InvalidRequest": "penstock.engine.errors",
    "KvCacheRetentionConfig": "penstock.llm.executor.requests",
    "LLM": "penstock.llm.llm",
    "Logprob": "penstock.llm.outputs",
    "OutputConfig": "penstock.llm.executor.requests",
    "PenstockError": "penstock.engine.errors",
    "PoolingOutput": "penstock.llm.outputs",
    "PoolingParams": "penstock.engine.pooling.params",
    "PoolingRequestOutput": "penstock.llm.outputs",
    "QueueFull": "penstock.engine.errors",
    "Request": "penstock.llm.executor.requests",
    "RequestMetrics": "penstock.llm.outputs",
    "RequestOutput": "penstock.llm.outputs",
    "RequestOutputKind": "penstock.llm.sampling_params",
    "Response": "penstock.llm.executor.responses",
    "Result": "penstock.llm.executor.responses",
    "SamplingConfig": "penstock.llm.executor.requests",
    "SamplingParams": "penstock.llm.sampling_params",
    "ScoringOutput": "penstock.llm.outputs",
    "ScoringRequestOutput": "penstock.llm.outputs",
    "StructuredOutputsParams": "penstock.llm.sampling_params",
    "TextPrompt": "penstock.llm.preparing",
    "TokensPrompt": "penstock.llm.preparing",
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
