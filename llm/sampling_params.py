"""The library's `SamplingParams`: the engine's parameters, and the other fields of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from msgspec import structs

from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import SamplingParams as EngineParams
from penstock.engine.sampling.params import check_types, parameter, require
from penstock.serving.requests import GenerationFields, LogitsProcessorChoice, StructuredOutputs


class RequestOutputKind(Enum):
    """The contents of a stream's outputs: everything so far, only the new part, or a single output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(StructuredOutputs, kw_only=True):
    """The constraint of an answer: one of the first six fields; the others are settings. Names are vLLM's, meanings in docs/requests.md.

    `json` is a JSON Schema as a dict or as its text. `grammar` is in Lark or GBNF; {"definition": ..., "syntax": ...} states which.
    `additional_properties` is the reading of a schema that names properties and does not mention others: "closed" or "open". `backend` is
    the name of a grammar backend.
    """

    def wire(self) -> StructuredOutputs:
        """The same, checked as a request's body is. Raises `InvalidRequest`."""
        try:
            return msgspec.convert(structs.asdict(self), StructuredOutputs)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"`structured_outputs`: {error}", "structured_outputs") from None


GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(EngineParams):
    """How one request is sampled. Names and meanings are vLLM's, except that `max_tokens` defaults to the rest of the context.

    `structured_outputs` (or its older name `guided_decoding`) is the answer's constraint. `logits_processors` are registered ones:
    names, or {"name": ..., "arguments": {...}}. `additional_outputs` are the named model outputs requested for every generated token, such
    as "hidden_states.last", and `additional_context_outputs` requests the prompt's too. `prediction` is the known part of the
    answer, such as a file to be edited: its tokens are draft tokens, so a good prediction is faster. With
    `detokenize=False` there is no text. `output_kind` is for streams.

    Raises `InvalidRequest` with `param` set to the field's name.
    """

    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    logits_processors: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = ()
    additional_outputs: Sequence[str] = parameter((), "named model outputs of every token of an answer")
    additional_context_outputs: bool = parameter(False, "the additional outputs of the prompt are wanted too")
    prediction: str | None = None
    detokenize: bool = parameter(True, "answers have a text")
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        check_types(self)
        self._require(isinstance(self.prediction, str | None), "prediction", "a string")
        self._require(isinstance(self.output_kind, RequestOutputKind), "output_kind", "a RequestOutputKind")
        allowed = self.allowed_token_ids
        self._require(
            allowed is None or isinstance(allowed, tuple) or len(allowed) > 0, "allowed_token_ids", "made of one token id or more"
        )
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "a positive integer")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        EngineParams.__post_init__(self)  # without arguments, `super` does not find its way in a dataclass with slots
        named = self.additional_outputs
        chosen = self.logits_processors
        object.__setattr__(self, "logits_processors", (chosen,) if isinstance(chosen, str | Mapping) or callable(chosen) else chosen or ())
        self._require(isinstance(self.logits_processors, Sequence), "logits_processors", "a list of names, or of dicts with a name")
        object.__setattr__(self, "additional_outputs", (named,) if isinstance(named, str) else tuple(named or ()))
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidRequest("`guided_decoding` is the older name of `structured_outputs`: give one", "guided_decoding")
        for name in ("structured_outputs", "guided_decoding"):
            self._require(isinstance(getattr(self, name), StructuredOutputsParams | None), name, "StructuredOutputsParams")
        if self.stop and not self.detokenize:
            raise InvalidRequest("`stop` needs the text: leave `detokenize` as it is", "detokenize")
        self.processor_choices()
        self.constraint_fields()

    def processor_choices(self) -> list[LogitsProcessorChoice]:
        """As a request's body names them."""
        choices = []
        for index, given in enumerate(self.logits_processors):
            path = f"logits_processors[{index}]"
            if callable(given):
                message = f"`{path}`: processors are chosen by name: register it with the engine, `logits_processors={{name: factory}}`"
                raise InvalidRequest(message, path)
            try:
                choices.append(msgspec.convert({"name": given} if isinstance(given, str) else given, LogitsProcessorChoice))
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"`{path}`: {error}", path) from None
        return choices

    def constraint_fields(self) -> GenerationFields:
        """The answer's constraint, in the fields of a request's body."""
        outputs = self.structured_outputs or self.guided_decoding
        return GenerationFields(structured_outputs=None if outputs is None else outputs.wire())

    def _require(self, condition: bool, name: str, rule: str) -> None:
        require(condition, name, rule, getattr(self, name))
