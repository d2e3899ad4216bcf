"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.contracts import structure as structure
    from penstock.engine.contracts.grammar import CompiledGrammar as CompiledGrammar
    from penstock.engine.contracts.grammar import GrammarBackend as GrammarBackend
    from penstock.engine.contracts.grammar import GrammarKind as GrammarKind
    from penstock.engine.contracts.grammar import GrammarMatcher as GrammarMatcher
    from penstock.engine.contracts.grammar import GrammarSpec as GrammarSpec
    from penstock.engine.contracts.grammar import Vocabulary as Vocabulary
    from penstock.engine.contracts.hooks import Register as Register
    from penstock.engine.contracts.hooks import hookimpl as hookimpl
    from penstock.engine.contracts.logits_processor import LogitsProcessor as LogitsProcessor
    from penstock.engine.contracts.logits_processor import LogitsRow as LogitsRow
    from penstock.engine.contracts.logits_processor import per_row as per_row
    from penstock.engine.contracts.logits_processor import per_sequence as per_sequence
    from penstock.engine.contracts.parsing import CallableTool as CallableTool
    from penstock.engine.contracts.parsing import Event as Event
    from penstock.engine.contracts.parsing import Format as Format
    from penstock.engine.contracts.parsing import FormatInfo as FormatInfo
    from penstock.engine.contracts.parsing import Parser as Parser
    from penstock.engine.contracts.parsing import Phase as Phase
    from penstock.engine.contracts.parsing import Reasoning as Reasoning
    from penstock.engine.contracts.parsing import ReasoningParser as ReasoningParser
    from penstock.engine.contracts.parsing import SpecialText as SpecialText
    from penstock.engine.contracts.parsing import Text as Text
    from penstock.engine.contracts.parsing import ToolCallArguments as ToolCallArguments
    from penstock.engine.contracts.parsing import ToolCallStart as ToolCallStart
    from penstock.engine.contracts.parsing import ToolFormat as ToolFormat
    from penstock.engine.contracts.parsing import ToolParser as ToolParser
    from penstock.engine.contracts.parsing import Turn as Turn
    from penstock.engine.contracts.proposer import DraftedSequence as DraftedSequence
    from penstock.engine.contracts.proposer import Proposer as Proposer
    from penstock.engine.contracts.proposer import SequenceProposer as SequenceProposer
    from penstock.engine.contracts.proposer import proposer_of as proposer_of
    from penstock.engine.errors import ConfigurationError as ConfigurationError
    from penstock.engine.errors import ConstraintTooLarge as ConstraintTooLarge
    from penstock.engine.errors import EngineUnavailable as EngineUnavailable
    from penstock.engine.errors import GenerationFailed as GenerationFailed
    from penstock.engine.errors import InvalidRequest as InvalidRequest
    from penstock.engine.errors import PenstockError as PenstockError
    from penstock.engine.errors import QueueFull as QueueFull
    from penstock.engine.errors import UnsupportedGrammar as UnsupportedGrammar
    from penstock.engine.errors import UnsupportedKind as UnsupportedKind
    from penstock.engine.pooling.model import PoolingParams as PoolingParams
    from penstock.engine.sampling.params import BeamSearchParams as BeamSearchParams
    from penstock.engine.system.process import uncounted as uncounted
    from penstock.engine.system.sandbox import Limits as Limits
    from penstock.engine.system.sandbox import Sandbox as Sandbox
    from penstock.llm.adapters import LoRARequest as LoRARequest
    from penstock.llm.executor.jobs import Executor as Executor
    from penstock.llm.executor.requests import KvCacheRetentionConfig as KvCacheRetentionConfig
    from penstock.llm.executor.requests import OutputConfig as OutputConfig
    from penstock.llm.executor.requests import Request as Request
    from penstock.llm.executor.requests import SamplingConfig as SamplingConfig
    from penstock.llm.executor.responses import Response as Response
    from penstock.llm.executor.responses import Result as Result
    from penstock.llm.offline import LLM as LLM
    from penstock.llm.offline import AsyncLLM as AsyncLLM
    from penstock.llm.outputs import BeamSearchOutput as BeamSearchOutput
    from penstock.llm.outputs import BeamSearchSequence as BeamSearchSequence
    from penstock.llm.outputs import ClassificationOutput as ClassificationOutput
    from penstock.llm.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from penstock.llm.outputs import CompletionOutput as CompletionOutput
    from penstock.llm.outputs import EmbeddingOutput as EmbeddingOutput
    from penstock.llm.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from penstock.llm.outputs import Logprob as Logprob
    from penstock.llm.outputs import PoolingOutput as PoolingOutput
    from penstock.llm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from penstock.llm.outputs import RequestMetrics as RequestMetrics
    from penstock.llm.outputs import RequestOutput as RequestOutput
    from penstock.llm.outputs import ScoringOutput as ScoringOutput
    from penstock.llm.outputs import ScoringRequestOutput as ScoringRequestOutput
    from penstock.llm.preparing import TextPrompt as TextPrompt
    from penstock.llm.preparing import TokensPrompt as TokensPrompt
    from penstock.llm.sampling_params import GuidedDecodingParams as GuidedDecodingParams
    from penstock.llm.sampling_params import RequestOutputKind as RequestOutputKind
    from penstock.llm.sampling_params import SamplingParams as SamplingParams
    from penstock.llm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from penstock.plugins.calls.elements import ElementFormat as ElementFormat
    from penstock.plugins.calls.expression_formats import NotationFormat as NotationFormat
    from penstock.plugins.calls.expression_formats import PythonFormat as PythonFormat
    from penstock.plugins.calls.json_call import CallKeys as CallKeys
    from penstock.plugins.calls.json_format import JsonFormat as JsonFormat
    from penstock.plugins.calls.json_stream import CallEnvelope as CallEnvelope
    from penstock.plugins.calls.markup_format import MarkupFormat as MarkupFormat
    from penstock.plugins.calls.stream import new_call_id as new_call_id
    from penstock.plugins.markers import MarkerBuffer as MarkerBuffer
    from penstock.plugins.reasoning.think_format import ThinkFormat as ThinkFormat
    from penstock.plugins.reasoning.think_format import Thinking as Thinking

__version__ = "0.1.0"

# A new public name goes into one of these two and into the imports above, which are for type checkers.
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
    "penstock.engine.contracts.proposer": ("DraftedSequence", "Proposer", "SequenceProposer", "proposer_of"),
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
    "penstock.llm.adapters": ("LoRARequest",),
    "penstock.llm.executor.jobs": ("Executor",),
    "penstock.llm.executor.requests": ("KvCacheRetentionConfig", "OutputConfig", "Request", "SamplingConfig"),
    "penstock.llm.executor.responses": ("Response", "Result"),
    "penstock.llm.offline": ("LLM", "AsyncLLM"),
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

__all__ = ["__version__", "structure", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name == "structure":  # a module: its parts have names such as `Literal` and `Sequence`
        return import_module("penstock.engine.contracts.structure")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
