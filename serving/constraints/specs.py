"""Every spelling of a constraint as one `GrammarSpec`; docs/requests.md lists them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.engine.contracts.grammar import AdditionalProperties, CompiledGrammar, GrammarKind, GrammarSpec
from penstock.engine.errors import InvalidRequest
from penstock.serving.constraints.sources import JsonReading, check_text, grammar_of, in_reading, json_reading, schema_spec, write_json
from penstock.serving.constraints.structural_tag import TagReader
from penstock.serving.requests import GenerationFields, ResponseFormat

RESPONSE_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "grammar": ("grammar",),
    "structural_tag": ("format", "structures", "triggers"),
}


class Form(NamedTuple):
    """A constraint that the request has: the path of its field, and how to read it."""

    param: str
    spec: Callable[[], GrammarSpec]


def grammar_spec(body: GenerationFields, additional_properties: AdditionalProperties) -> GrammarSpec | None:
    """The request's constraint, or None where it has none. `additional_properties` is how schemas are read where it does not say.

    Raises `InvalidRequest` for what cannot be read, and where there is more than one: a constraint is never ignored.
    """
    return in_reading(json_reading(body, additional_properties), lambda reading: grammar_spec_in(reading, body))


def grammar_spec_in(reading: JsonReading, body: GenerationFields) -> GrammarSpec | None:
    """The same with its schemas read in this way alone."""
    forms = list(_Forms(body, reading).all())
    if len(forms) > 1:
        fields = " and ".join(f"`{form.param}`" for form in forms)
        raise InvalidRequest(f"only one constraint may be given, got {fields}", forms[1].param)
    if not forms and body.structured_outputs is not None:
        message = "`structured_outputs` takes one of json, regex, choice, grammar, json_object and structural_tag, and got none"
        raise InvalidRequest(message, "structured_outputs")
    return forms[0].spec() if forms else None


def open_schema(body: GenerationFields, grammar: CompiledGrammar | None) -> str | None:
    """The JSON Schema that the content is to be checked against: where the request has one, and `grammar` does not enforce all of it."""
    spec = grammar_spec(body, "open") if grammar is not None and grammar.warnings else None
    return spec.text if spec is not None and spec.kind is GrammarKind.JSON_SCHEMA else None


class _Forms:
    """The constraints of one request, in the order of its fields."""

    def __init__(self, body: GenerationFields, reading: JsonReading) -> None:
        self._body = body
        self._reading = reading

    def all(self) -> Iterator[Form]:
        yield from self._guided()
        yield from self._structured_outputs()
        yield from self._response_format()
        yield from self._bare()

    def _guided(self) -> Iterator[Form]:
        body = self._body
        if body.guided_json is not None:
            yield Form("guided_json", lambda: self._json_schema(body.guided_json, "guided_json"))
        if (regex := body.guided_regex) is not None:
            yield Form("guided_regex", lambda: GrammarSpec(GrammarKind.REGEX, regex, "guided_regex"))
        if (choices := body.guided_choice) is not None:
            yield Form("guided_choice", lambda: _choice(choices, "guided_choice"))
        if (grammar := body.guided_grammar) is not None:
            yield Form("guided_grammar", lambda: grammar_of(grammar, "guided_grammar"))

    def _structured_outputs(self) -> Iterator[Form]:
        outputs, at = self._body.structured_outputs, "structured_outputs"
        if outputs is None:
            return
        if outputs.json is not None:
            yield Form(f"{at}.json", lambda: self._json_schema(outputs.json, f"{at}.json"))
        if (regex := outputs.regex) is not None:
            yield Form(f"{at}.regex", lambda: GrammarSpec(GrammarKind.REGEX, regex, f"{at}.regex"))
        if (choices := outputs.choice) is not None:
            yield Form(f"{at}.choice", lambda: _choice(choices, f"{at}.choice"))
        if (grammar := outputs.grammar) is not None:
            yield Form(f"{at}.grammar", lambda: grammar_of(grammar, f"{at}.grammar"))
        if outputs.json_object:
            yield Form(f"{at}.json_object", lambda: self._json_object(f"{at}.json_object"))
        if (tag := outputs.structural_tag) is not None:
            yield Form(f"{at}.structural_tag", lambda: self._structural_tag(tag, f"{at}.structural_tag"))

    def _response_format(self) -> Iterator[Form]:
        given = self._body.response_format
        if given is None:
            return
        _check_fields(given)
        match given.type:
            case "json_object" if given.schema is not None:
                yield Form("response_format.schema", lambda: self._json_schema(given.schema, "response_format.schema", is_lenient=True))
            case "json_object":
                yield Form("response_format", lambda: self._json_object("response_format"))
            case "json_schema":
                yield Form("response_format.json_schema.schema", lambda: self._json_schema_format(given))
            case "grammar":
                yield Form("response_format.grammar", lambda: self._grammar_format(given))
            case "structural_tag":
                members = {name: getattr(given, name) for name in RESPONSE_FORMATS["structural_tag"]}
                tag = {name: value for name, value in members.items() if value is not None}
                yield Form("response_format", lambda: self._structural_tag(tag, "response_format"))

    def _bare(self) -> Iterator[Form]:
        """SGLang's fields. Empty ones are off."""
        body = self._body
        if body.json_schema is not None and body.json_schema != "":
            yield Form("json_schema", lambda: self._json_schema(body.json_schema, "json_schema"))
        if regex := body.regex:
            yield Form("regex", lambda: GrammarSpec(GrammarKind.REGEX, regex, "regex"))
        if ebnf := body.ebnf:
            yield Form("ebnf", lambda: GrammarSpec(GrammarKind.GBNF, ebnf, "ebnf"))
        if tag := body.structural_tag:
            yield Form("structural_tag", lambda: self._structural_tag(tag, "structural_tag"))

    def _json_schema_format(self, given: ResponseFormat) -> GrammarSpec:
        param = "response_format.json_schema.schema"
        if given.json_schema is None or given.json_schema.schema is None:
            raise InvalidRequest("`response_format` of type `json_schema` needs a schema", param)
        return self._json_schema(given.json_schema.schema, param, is_lenient=given.json_schema.strict is not True)

    def _grammar_format(self, given: ResponseFormat) -> GrammarSpec:
        if given.grammar is None:
            raise InvalidRequest("`response_format` of type `grammar` needs a grammar", "response_format.grammar")
        return grammar_of(given.grammar, "response_format.grammar")

    def _structural_tag(self, tag: str | dict[str, Any], param: str) -> GrammarSpec:
        check_text(tag, param)
        return TagReader(self._reading).read(tag, param)

    def _json_object(self, param: str) -> GrammarSpec:
        return GrammarSpec(GrammarKind.JSON_OBJECT, "", param, self._reading.whitespace_pattern)

    def _json_schema(self, schema: Any, param: str, *, is_lenient: bool = False) -> GrammarSpec:
        return schema_spec(schema, param, self._reading, is_lenient=is_lenient)


def _choice(choices: list[str], param: str) -> GrammarSpec:
    check_text(choices, param)
    if not choices or not all(choices):
        raise InvalidRequest(f"`{param}` must be a list of non-empty strings", param)
    return GrammarSpec(GrammarKind.CHOICE, write_json(choices, param), param)


def _check_fields(given: ResponseFormat) -> None:
    """Raises `InvalidRequest` for a type that there is not, and for a field of another type's."""
    own = RESPONSE_FORMATS.get(given.type)
    if own is None:
        known = ", ".join(f"`{name}`" for name in RESPONSE_FORMATS)
        raise InvalidRequest(f"`response_format.type` must be one of {known}, got {given.type[:100]!r}", "response_format.type")
    for name in ResponseFormat.__struct_fields__:
        if name not in ("type", *own) and getattr(given, name) is not None:
            raise InvalidRequest(f"`{name}` has no meaning in a `response_format` of type `{given.type}`", f"response_format.{name}")
