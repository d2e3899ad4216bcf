"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.contracts import structure
    from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
    from penstock.engine.contracts.hooks import Register, hookimpl
    from penstock.engine.contracts.logits_processor import LogitsProcessor, LogitsRow, per_row, per_sequence
    from penstock.engine.contracts.parsing import (
        CallableTool,
        Event,
        Format,
        FormatInfo,
        Parser,
        Phase,
        Reasoning,
        ReasoningParser,
        SpecialText,
        Text,
        ToolCallArguments,
        ToolCallStart,
        ToolFormat,
        ToolParser,
        Turn,
    )
    from penstock.engine.errors import (
        ConfigurationError,
        ConstraintTooLarge,
        EngineUnavailable,
        GenerationFailed,
        InvalidRequest,
        PenstockError,
        QueueFull,
        UnsupportedGrammar,
        UnsupportedKind,
    )
    from penstock.engine.pooling.model import PoolingParams
    from penstock.engine.sampling.params import BeamSearchParams
    from penstock.engine.system.process import uncounted
    from penstock.engine.system.sandbox import Limits, Sandbox
    from penstock.llm.executor.executor import Executor
    from penstock.llm.executor.requests import KvCacheRetentionConfig, OutputConfig, Request, SamplingConfig
    from penstock.llm.executor.responses import Response, Result
    from penstock.llm.llm import LLM, AsyncLLM
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
    from penstock.plugins.calls.elements import ElementFormat
    from penstock.plugins.calls.expression_formats import NotationFormat, PythonFormat
    from penstock.plugins.calls.json_call import CallKeys
    from penstock.plugins.calls.json_format import JsonFormat
    from penstock.plugins.calls.json_stream import CallEnvelope
    from penstock.plugins.calls.markup_format import MarkupFormat
    from penstock.plugins.calls.stream import new_call_id
    from penstock.plugins.markers import MarkerBuffer
    from penstock.plugins.reasoning.think_format import ThinkFormat, Thinking

__version__ = "0.1.0"

# A new public name goes into one of these two, into the imports above, which are for type checkers, and into `__all__`.
_PLUGIN_API = {
    "penstock.engine.system.process": ("uncounted",),
    "penstock.engine.errors": ("ConstraintTooLarge", "UnsupportedGrammar", "UnsupportedKind"),
    "penstock.engine.contracts.grammar": (
        "CompiledGrammar",
        "GrammarBackend",
        "GrammarKind",
        "GrammarMatcher",
        "GrammarSpec",
        "Vocabulary",
    ),
    "penstock.engine.contracts.hooks": ("Register", "hookimpl"),
    "penstock.engine.contracts.logits_processor": ("LogitsProcessor", "LogitsRow", "per_row", "per_sequence"),
    "penstock.engine.contracts.parsing": (
        "CallableTool",
        "Event",
        "Format",
        "FormatInfo",
        "Parser",
        "Phase",
        "Reasoning",
        "ReasoningParser",
        "SpecialText",
        "Text",
        "ToolCallArguments",
        "ToolCallStart",
        "ToolFormat",
        "ToolParser",
        "Turn",
    ),
    "penstock.engine.system.sandbox": ("Limits", "Sandbox"),
    "penstock.plugins.calls.expression_formats": ("NotationFormat", "PythonFormat"),
    "penstock.plugins.calls.json_call": ("CallKeys",),
    "penstock.plugins.calls.json_format": ("JsonFormat",),
    "penstock.plugins.calls.json_stream": ("CallEnvelope",),
    "penstock.plugins.calls.elements": ("ElementFormat",),
    "penstock.plugins.calls.markup_format": ("MarkupFormat",),
    "penstock.plugins.calls.stream": ("new_call_id",),
    "penstock.plugins.markers": ("MarkerBuffer",),
    "penstock.plugins.reasoning.think_format": ("ThinkFormat", "Thinking"),
}
_LIBRARY = {
    "penstock.engine.errors": (
        "ConfigurationError",
        "EngineUnavailable",
        "GenerationFailed",
        "InvalidRequest",
        "PenstockError",
        "QueueFull",
    ),
    "penstock.engine.pooling.model": ("PoolingParams",),
    "penstock.engine.sampling.params": ("BeamSearchParams",),
    "penstock.llm.executor.executor": ("Executor",),
    "penstock.llm.executor.requests": ("KvCacheRetentionConfig", "OutputConfig", "Request", "SamplingConfig"),
    "penstock.llm.executor.responses": ("Response", "Result"),
    "penstock.llm.llm": ("LLM", "AsyncLLM"),
    "penstock.llm.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "penstock.llm.preparing": ("TextPrompt", "TokensPrompt"),
    "penstock.llm.sampling_params": ("GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
}
_MODULE_OF = {name: module for module, names in (*_PLUGIN_API.items(), *_LIBRARY.items()) for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CallEnvelope",
    "CallKeys",
    "CallableTool",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompiledGrammar",
    "CompletionOutput",
    "ConfigurationError",
    "ConstraintTooLarge",
    "ElementFormat",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineUnavailable",
    "Event",
    "Executor",
    "Format",
    "FormatInfo",
    "GenerationFailed",
    "GrammarBackend",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarSpec",
    "GuidedDecodingParams",
    "InvalidRequest",
    "JsonFormat",
    "KvCacheRetentionConfig",
    "Limits",
    "LogitsProcessor",
    "LogitsRow",
    "Logprob",
    "MarkerBuffer",
    "MarkupFormat",
    "NotationFormat",
    "OutputConfig",
    "Parser",
    "PenstockError",
    "Phase",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PythonFormat",
    "QueueFull",
    "Reasoning",
    "ReasoningParser",
    "Register",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "Response",
    "Result",
    "SamplingConfig",
    "SamplingParams",
    "Sandbox",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpecialText",
    "StructuredOutputsParams",
    "Text",
    "TextPrompt",
    "ThinkFormat",
    "Thinking",
    "TokensPrompt",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFormat",
    "ToolParser",
    "Turn",
    "UnsupportedGrammar",
    "UnsupportedKind",
    "Vocabulary",
    "__version__",
    "hookimpl",
    "new_call_id",
    "per_row",
    "per_sequence",
    "structure",
    "uncounted",
]


def __getattr__(name: str) -> Any:
    if name == "structure":  # a module: its parts have names such as `Literal` and `Sequence`
        return import_module("penstock.engine.contracts.structure")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
