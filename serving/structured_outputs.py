"""What answers are held to: every spelling of a constraint as one `GrammarSpec`, the backend that it names, and what precedes the answer:
nothing (`direct`), thoughts (`think`) or a free answer (`draft`).

docs/requests.md has the table of the spellings, docs/grammars.md the modes.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.engine.constraints.limits import MAX_GRAMMAR
from penstock.engine.contracts.grammar import AdditionalProperties, CompiledGrammar, GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import Phase, ReasoningParser, ToolFormat
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.engine.text.answer import PreambleParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.constraints.schemas import JsonReading, check_text, in_reading, schema_spec, whitespace_regex, write_json
from penstock.serving.constraints.structural_tag import TagReader
from penstock.serving.context import ServerContext, queue_for
from penstock.serving.messages import AnswerCheck
from penstock.serving.requests import (
    ChatCompletionRequest,
    ConstraintFields,
    GenerationFields,
    GrammarDefinition,
    ResponseFormat,
    StructuredOutputs,
)
from penstock.serving.tools import ToolUse, answer_grammar, call_grammar, callable_tool

RESPONSE_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "grammar": ("grammar",),
    "structural_tag": ("format", "structures", "triggers"),
}


class Form(NamedTuple):
    """A constraint as the request has it: the path of its field, what kind of form that is, and its value."""

    param: str
    kind: str
    value: Any
    is_lenient: bool = False

    def spec(self, reading: JsonReading) -> GrammarSpec:
        """With its schemas read in this way. Raises `InvalidRequest` for what cannot be read."""
        param, value = self.param, self.value
        match self.kind:
            case "json":
                return schema_spec(value, param, reading, is_lenient=self.is_lenient)
            case "json_object":
                return GrammarSpec(GrammarKind.JSON_OBJECT, "", param, reading.whitespace_pattern)
            case "regex":
                return GrammarSpec(GrammarKind.REGEX, value, param)
            case "choice":
                check_text(value, param)
                if not value or not all(value):
                    raise InvalidRequest(f"`{param}` must be a list of non-empty strings", param)
                return GrammarSpec(GrammarKind.CHOICE, write_json(value, param), param)
            case "grammar":
                return grammar_text_spec(value, param)
            case "ebnf":
                return GrammarSpec(GrammarKind.GBNF, value, param)
            case "structural_tag":
                check_text(value, param)
                return TagReader(reading).read(value, param)
        raise AssertionError(self.kind)


def grammar_spec(body: ConstraintFields, additional_properties: AdditionalProperties) -> GrammarSpec | None:
    """The request's constraint, or None where it has none. `additional_properties` is how schemas are read where it does not say.

    Raises `InvalidRequest` for what cannot be read, and where there is more than one: a constraint is never ignored.
    """
    return in_reading(json_reading(body, additional_properties), lambda reading: grammar_spec_in(reading, body))


def grammar_spec_in(reading: JsonReading, body: ConstraintFields) -> GrammarSpec | None:
    """The same with its schemas read in this way alone."""
    forms = list(forms_of(body))
    if len(forms) > 1:
        fields = " and ".join(f"`{form.param}`" for form in forms)
        raise InvalidRequest(f"only one constraint may be given, got {fields}", forms[1].param)
    if not forms and body.structured_outputs is not None and not asks_only_how(body.structured_outputs):
        message = "`structured_outputs` takes one of json, regex, choice, grammar, json_object and structural_tag, and got none"
        raise InvalidRequest(message, "structured_outputs")
    return forms[0].spec(reading) if forms else None


def possible_choices(spec: GrammarSpec | None, bad_words: Sequence[str], encode: Callable[[str], list[int]]) -> GrammarSpec | None:
    """A choice without the texts whose tokens hold those of a bad word: other tokens could spell them. Other constraints as they are.

    Raises `InvalidRequest` if no text is left.
    """
    if spec is None or spec.kind is not GrammarKind.CHOICE or not bad_words:
        return spec
    bad = [_token_text(encode(spelling)) for word in bad_words if word for spelling in (word, " " + word.lstrip(" "))]
    choices = [choice for choice in json.loads(spec.text) if not any(ids in _token_text(encode(choice)) for ids in bad)]
    if not choices:
        raise InvalidRequest(f"`bad_words` leave none of the texts of `{spec.param}`", "bad_words")
    return replace(spec, text=write_json(choices, spec.param))


def _token_text(token_ids: Sequence[int]) -> str:
    """A text for each sequence of tokens, of which those of its parts are parts."""
    return "".join(map(chr, (token_id + 0x10000 for token_id in token_ids)))


def samples_exactly(body: ConstraintFields) -> bool:
    """Whether answers are to be drawn from the model's distribution given that they are valid."""
    return body.structured_outputs is not None and body.structured_outputs.sampling == "exact"


def open_schema(body: ConstraintFields, grammar: CompiledGrammar | None) -> str | None:
    """The JSON Schema that the content is to be checked against: where the request has one, and `grammar` does not enforce all of it."""
    spec = grammar_spec(body, "open") if grammar is not None and grammar.warnings else None
    return spec.text if spec is not None and spec.kind is GrammarKind.JSON_SCHEMA else None


def forms_of(body: ConstraintFields) -> Iterator[Form]:
    """The constraints of one request, in the order of its fields."""
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            yield Form(f"guided_{kind}", kind, value)
    if (outputs := body.structured_outputs) is not None:
        for kind in ("json", "regex", "choice", "grammar", "json_object", "structural_tag"):
            value = getattr(outputs, kind)
            if value is not None and not (kind == "json_object" and value is False):
                yield Form(f"structured_outputs.{kind}", kind, value)
    if body.response_format is not None and (form := format_form(body.response_format)) is not None:
        yield form
    # SGLang's fields, which are off where they are empty.
    if body.json_schema is not None and body.json_schema != "":
        yield Form("json_schema", "json", body.json_schema)
    for kind in ("regex", "ebnf", "structural_tag"):
        if value := getattr(body, kind):
            yield Form(kind, kind, value)


def format_form(given: ResponseFormat) -> Form | None:
    """Raises `InvalidRequest` for a type that there is not, for a field of another type's, and where its own is missing."""
    own = RESPONSE_FORMATS.get(given.type)
    if own is None:
        known = ", ".join(f"`{name}`" for name in RESPONSE_FORMATS)
        raise InvalidRequest(f"`response_format.type` must be one of {known}, got {given.type[:100]!r}", "response_format.type")
    for name in ResponseFormat.__struct_fields__:
        if name not in ("type", *own) and getattr(given, name) is not None:
            raise InvalidRequest(f"`{name}` has no meaning in a `response_format` of type `{given.type}`", f"response_format.{name}")
    match given.type:
        case "json_object" if given.schema is not None:
            return Form("response_format.schema", "json", given.schema, is_lenient=True)
        case "json_object":
            return Form("response_format", "json_object", True)
        case "json_schema":
            param = "response_format.json_schema.schema"
            if given.json_schema is None or given.json_schema.schema is None:
                raise InvalidRequest("`response_format` of type `json_schema` needs a schema", param)
            return Form(param, "json", given.json_schema.schema, is_lenient=given.json_schema.strict is not True)
        case "grammar":
            if given.grammar is None:
                raise InvalidRequest("`response_format` of type `grammar` needs a grammar", "response_format.grammar")
            return Form("response_format.grammar", "grammar", given.grammar)
        case "structural_tag":
            members = {name: value for name in own if (value := getattr(given, name)) is not None}
            return Form("response_format", "structural_tag", members)
    return None


AUTO = "auto"
ALIASES = {"guidance": "llguidance", "outlines": "outlines_core"}  # vLLM's names of the same libraries
INSTALLABLE = {"xgrammar": "pip install ./examples/penstock-plugin-xgrammar"}  # vLLM has them built in; in a checkout of Penstock
NO_FALLBACK = "no-fallback"
COMPACT = "disable-any-whitespace"
CLOSED = "no-additional-properties"
OPTIONS = (NO_FALLBACK, COMPACT, CLOSED)
MAX_CHARACTERS = 1000


class NamedBackend(NamedTuple):
    """A backend as a request writes it, `name:option,option`, and the path of the field."""

    name: str
    options: tuple[str, ...]
    param: str


def named_backend(body: ConstraintFields) -> NamedBackend | None:
    """What the request says, in either place. Raises `InvalidRequest` for two different ones and for options that there are not.

    Naming a backend means that no other is tried, so `no-fallback` asks for nothing more.
    """
    fields = [("guided_decoding_backend", body.guided_decoding_backend)]
    if body.structured_outputs is not None:
        fields.append(("structured_outputs.backend", body.structured_outputs.backend))
    given = [_parsed(text, param) for param, text in fields if text]
    if len(given) > 1 and given[0][:2] != given[1][:2]:
        raise InvalidRequest(f"`{given[0].param}` and `{given[1].param}` differ", given[1].param)
    return given[0] if given else None


def chosen_backend(body: ConstraintFields, known: Iterable[str]) -> str | None:
    """The name of one of the `known` backends, or None for whichever takes the constraint. Raises `InvalidRequest` for any other name."""
    named = named_backend(body)
    if named is None or named.name == AUTO:
        return None
    names = list(known)
    name = known_backend(named.name, names)
    if name is None:
        if named.name in INSTALLABLE:
            message = f"the grammar backend {named.name!r} is not installed: {INSTALLABLE[named.name]}, and start the server again"
            raise InvalidRequest(message, named.param)
        raise InvalidRequest(f"no grammar backend {named.name[:100]!r}: there are {', '.join([AUTO, *names])}", named.param)
    return name


def known_backend(name: str, known: Collection[str]) -> str | None:
    """The one of the `known` backends that has this name, or had it in vLLM; None for an unknown name."""
    return next((spelling for spelling in (name, ALIASES.get(name)) if spelling in known), None)


def _parsed(text: str, param: str) -> NamedBackend:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"`{param}` may have {MAX_CHARACTERS} characters", param)
    name, _, rest = text.partition(":")
    options = tuple(option.strip().replace("_", "-") for option in rest.split(",") if option.strip())
    for option in options:
        if option not in OPTIONS:
            raise InvalidRequest(f"no backend option {option[:100]!r}: there are {', '.join(OPTIONS)}", param)
    return NamedBackend(name.strip(), options, param)


def json_reading(body: ConstraintFields, default: AdditionalProperties) -> JsonReading:
    """What the request says, or else the server's `default`. Raises `InvalidRequest` where two fields differ."""
    outputs, backend = body.structured_outputs or StructuredOutputs(), named_backend(body)
    whitespace = {
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": "" if outputs.disable_any_whitespace else None,
    }
    properties: dict[str, AdditionalProperties | None] = {
        "guided_additional_properties": body.guided_additional_properties,
        "structured_outputs.additional_properties": outputs.additional_properties,
        "structured_outputs.disable_additional_properties": "closed" if outputs.disable_additional_properties else None,
    }
    if backend is not None and COMPACT in backend.options:
        whitespace[backend.param] = ""
    if backend is not None and CLOSED in backend.options:
        properties[backend.param] = "closed"
    asking, spacing = _agreed(properties, "additional properties"), _agreed(whitespace, "whitespace")
    pattern = None if spacing is None else whitespace_regex(whitespace[spacing] or "", spacing)
    return JsonReading(pattern, (properties[asking] if asking else None) or default, is_asking=asking is not None)


def _agreed(fields: Mapping[str, str | None], subject: str) -> str | None:
    """The first of the fields that say anything; all of them say the same."""
    given = {param: value for param, value in fields.items() if value is not None}
    if len(set(given.values())) > 1:
        names = " and ".join(f"`{param}`" for param in given)
        raise InvalidRequest(f"{names} say different things of {subject}", [*given][-1])
    return next(iter(given), None)


# Both dialects begin each rule on a line of its own. Lark's names may have a modifier, a priority, attributes or parameters.
RULE = re.compile(r"^[ \t]*[?!]{0,2}([A-Za-z_][\w-]*)(?:\.-?\d+|\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*(::=|:)", re.MULTILINE)


def grammar_text_spec(source: str | GrammarDefinition, param: str) -> GrammarSpec:
    """The grammar in the dialect that is stated, or that its text leaves no doubt about. Raises `InvalidRequest` where it does."""
    if isinstance(source, str):
        return GrammarSpec(detected_kind(source, param), source, param)
    return GrammarSpec(source.kind, source.definition, f"{param}.definition")


def detected_kind(text: str, param: str) -> GrammarKind:
    """GBNF where every rule is defined by `::=` and one is `root`, Lark where each is by `:` and one is `start`."""
    if len(text) > MAX_GRAMMAR:  # which would be refused later, and here is the event loop
        raise InvalidRequest(f"a grammar of more than {MAX_GRAMMAR} characters is refused", param)
    operators: set[str] = set()
    names: set[str] = set()
    for rule in RULE.finditer(text):
        names.add(rule[1])
        operators.add(rule[2])
    if operators == {"::="} and "root" in names:
        return GrammarKind.GBNF
    if operators == {":"} and "start" in names:
        return GrammarKind.LARK
    raise InvalidRequest(
        f"`{param}` is neither clearly GBNF (rules with `::=`, one of them `root`) nor clearly Lark (rules with `:`, one of them `start`): "
        'say which, as {"syntax": "gbnf" or "lark", "definition": ...}',
        param,
    )


@dataclass(frozen=True, slots=True)
class Constraint:
    """What answers are held to, and the backend that the request names; None for the first that takes it.

    Where there are `calls`, an answer may be these in place of content under `spec`.
    """

    spec: GrammarSpec | None
    backend: str | None
    calls: GrammarSpec | None = None


def plan_constraint(context: ServerContext, body: ConstraintFields, bad_words: Sequence[str] = ()) -> Constraint:
    """What the fields alone demand, without tools. Raises `InvalidRequest`."""
    encode = functools.partial(context.tokenizer.encode, add_special_tokens=False)
    spec = possible_choices(grammar_spec(body, context.options.additional_properties), bad_words, encode)
    require_constraint(body, spec)
    return Constraint(spec, chosen_backend(body, context.plugins.grammar_backends))


def chat_constraint(
    context: ServerContext, body: ChatCompletionRequest, tools: ToolUse, tool_format: ToolFormat | None
) -> tuple[GrammarSpec | None, GrammarSpec | None]:
    """The answer's constraint, and the tool calls that it may be instead."""
    content = grammar_spec(body, context.options.additional_properties)
    if not tools.shown or context.tool_parser is None:
        return content, None
    parser_name, reading = context.plugins.tool_parsers.active, json_reading(body, context.options.additional_properties)
    if content is not None and not tools.is_forced and not body.use_beam_search:
        return content, in_reading(reading, lambda reading: call_grammar(tools, content, tool_format, parser_name, reading))

    def spec(reading: JsonReading) -> GrammarSpec | None:
        return answer_grammar(tools, grammar_spec_in(reading, body), tool_format, parser_name, reading)

    return in_reading(reading, spec), None


async def compiled(context: ServerContext, constraint: Constraint, client: str | None = None) -> CompiledGrammar | None:
    """The constraint, compiled by the backend that the request names or by the first that takes it. Raises `InvalidRequest`."""
    if constraint.spec is None:
        return None
    return await context.grammar_compiler.compile(constraint.spec, constraint.backend, client=client)


async def make_answer_check(
    context: ServerContext, body: GenerationFields, size: int, request: Request, tools: ToolUse | None = None
) -> AnswerCheck:
    """Where a grammar is lenient: a check of the content against its schema, and of calls against those of their tools."""
    reads_pressure, reads_closing = measures_pressure(body), ends_within(body)
    if not request.grammar_warnings:
        return AnswerCheck(context.conformance, reads_pressure=reads_pressure, reads_closing=reads_closing)

    def schemas() -> tuple[str | None, dict[str, str]]:
        callable_tools = () if tools is None else tools.callable
        arguments = {tool.name: callable_tool(tool).arguments.text for tool in callable_tools if not tool.is_strict}
        return open_schema(body, request.grammar), arguments

    return AnswerCheck(
        context.conformance,
        *await context.workers.run(queue_for(size), schemas),
        reads_pressure=reads_pressure,
        reads_closing=reads_closing,
    )


THINK_OPENING = "Let's think step by step.\n"  # Kojima et al., arXiv:2205.11916
DEFAULT_CUE = "\n\nFinal answer:\n"
JSON_CUE = "\n\nAs JSON:\n"
DEFAULT_BUDGET = 1024  # tokens
OF_PREAMBLES = ("preamble_tokens", "include_preamble", "opening", "cue")
CONTRADICTING = ("use_beam_search", "continue_final_message", "echo")


@dataclass(frozen=True, slots=True)
class AnswerMode:
    """What the prompt ends with, and whether free text precedes the answer, with the cue that ends it.

    `channel_budget` is that of the model's own reasoning where this is what precedes the answer.
    """

    opening: str = ""
    has_preamble: bool = False
    cue: str | None = None
    budget: int | None = None
    channel_budget: int | None = None
    is_draft: bool = False
    shows_preamble: bool = False

    def preamble(self, tokenizer: Tokenizer, spec: GrammarSpec, max_tokens: int, *, may_call: bool = False) -> PreambleParams | None:
        """The free text has `DEFAULT_BUDGET` tokens unless the request says otherwise, but no more than are left for the answer.

        The cue is the request's own, or says what kind of constraint follows. Where the answer `may_call`, a call in a draft is the answer,
        and what follows thoughts may be either.
        """
        if not self.has_preamble:
            return None
        is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT) and (self.is_draft or not may_call)
        cue = (JSON_CUE if is_json else DEFAULT_CUE) if self.cue is None else self.cue
        cue_token_ids = tuple(tokenizer.encode(cue, add_special_tokens=False))
        half = max(max_tokens - len(cue_token_ids), 0) // 2
        schema = spec.text if spec.kind is GrammarKind.JSON_SCHEMA else None
        budget = min(DEFAULT_BUDGET, half) if self.budget is None else self.budget
        return PreambleParams(budget, cue_token_ids, schema, reads_calls=may_call and self.is_draft)


DIRECT = AnswerMode()


def answer_mode(body: ConstraintFields, reasoning: Callable[[], ReasoningParser] | None = None) -> AnswerMode:
    """As the request says; `reasoning` makes the parser of its answer, if it has one. Raises `InvalidRequest` for what has no meaning."""
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.mode is None or outputs.mode == "direct":
        for name in OF_PREAMBLES:
            if getattr(outputs, name) is not None:
                path = f"structured_outputs.{name}"
                raise InvalidRequest(f"`{path}` is for the modes `think` and `draft` of `structured_outputs`", path)
        return DIRECT
    if outputs.sampling == "exact":
        message = f'`structured_outputs.sampling` "exact" cannot be combined with the mode `{outputs.mode}`: it draws whole answers'
        raise InvalidRequest(message, "structured_outputs.sampling")
    for name in CONTRADICTING:
        if getattr(body, name, None):
            raise InvalidRequest(f"`{name}` cannot be combined with the mode `{outputs.mode}` of `structured_outputs`", name)
    parser = reasoning() if outputs.mode == "think" and reasoning is not None else None
    if parser is not None and parser.phase is not Phase.CONTENT:
        for name in ("opening", "cue"):
            if getattr(outputs, name) is not None:
                path = f"structured_outputs.{name}"
                raise InvalidRequest(f"`{path}` has no meaning here: the model has reasoning of its own, with its own markers", path)
        marker = parser.start_marker if parser.phase is Phase.UNDECIDED else ""
        return AnswerMode(opening=marker, channel_budget=outputs.preamble_tokens)
    default = THINK_OPENING if outputs.mode == "think" else ""
    opening = default if outputs.opening is None else outputs.opening
    return AnswerMode(
        opening,
        has_preamble=True,
        cue=outputs.cue,
        budget=outputs.preamble_tokens,
        is_draft=outputs.mode == "draft",
        shows_preamble=bool(outputs.include_preamble),
    )


def measures_pressure(body: ConstraintFields) -> bool:
    """Whether the answer is to come with its constraint's pressure. Raises `InvalidRequest` where that cannot be measured."""
    if body.structured_outputs is None or not body.structured_outputs.pressure:
        return False
    if getattr(body, "use_beam_search", None):
        raise InvalidRequest("`structured_outputs.pressure` is that of sampled tokens, and beam search samples none", "use_beam_search")
    if body.structured_outputs.sampling == "exact":
        message = '`structured_outputs.pressure` cannot be combined with `sampling` "exact", where no mask forces the model'
        raise InvalidRequest(message, "structured_outputs.pressure")
    return True


def ends_within(body: ConstraintFields) -> bool:
    """Whether the answer is to end within its `max_tokens`."""
    return body.structured_outputs is not None and bool(body.structured_outputs.within_max_tokens)


def asks_only_how(outputs: StructuredOutputs) -> bool:
    """Whether the field says how an answer is to be made whose constraint may be elsewhere in the request."""
    hows = (outputs.mode, outputs.pressure, outputs.sampling, outputs.within_max_tokens)
    return any(how is not None for how in hows)


def require_constraint(body: ConstraintFields, spec: GrammarSpec | None) -> None:
    """Raises `InvalidRequest` where anything is asked of a constrained answer and nothing in the request constrains the answer."""
    if body.structured_outputs is not None and asks_only_how(body.structured_outputs) and spec is None:
        message = "`structured_outputs` takes one of json, regex, choice, grammar, json_object and structural_tag, and got none"
        raise InvalidRequest(f"{message}; nor does another field constrain the answer", "structured_outputs")
