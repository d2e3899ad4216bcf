"""Every form of a constraint, kept by real grammars over a model that says random things."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai import AsyncOpenAI

from penstock.engine.text.tokenizer import Tokenizer
from tests.api.improvised import MARKER_TOKENS, MODEL, NO_MARKER_TOKENS, Improvised, improvise

SCHEMA = {
    "type": "object",
    "properties": {"b": {"enum": ["甲", "乙"]}, "a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "string", "pattern": "^[ab]$"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
OPEN = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "a" digit+ "z"\ndigit ::= [0-9]'
LARK = 'start: "a" DIGIT+ "z"\nDIGIT: /[0-9]/'
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}}, "end": "</n>"}
TAGS = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG], "at_least_one": True}}
OLD_TAGS = {"triggers": ["<n"], "structures": [{"begin": "<n>", "schema": {"enum": [1, 22]}, "end": "</n>"}]}

Check = Callable[[str], Any]


def of_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)
    assert list(json.loads(text)) == ["b", "a"]


def is_compact(text: str) -> None:
    of_schema(text)
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def matching(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text, re.DOTALL), text

    return check


of_grammar = matching("a[0-9]+z")
of_tags = matching(r"<n>(1|22)</n>((?!<n).|<n>(1|22)</n>)*")
of_old_tags = matching(r"((?!<n).|<n>(1|22)</n>)*")
FORMS: list[tuple[dict[str, Any], Check]] = [
    ({"guided_json": SCHEMA}, of_schema),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "guidance"}, of_schema),
    ({"json_schema": json.dumps(SCHEMA), "guided_whitespace_pattern": ""}, is_compact),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}}, is_compact),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, of_schema),
    ({"guided_regex": "a[0-9]+z", "guided_decoding_backend": "outlines"}, of_grammar),
    ({"regex": "a[0-9]+z"}, of_grammar),
    ({"structured_outputs": {"regex": "a[0-9]+z"}}, of_grammar),
    ({"guided_choice": ["甲", "b"]}, matching("甲|b")),
    ({"structured_outputs": {"choice": ["甲", "b"]}}, matching("甲|b")),
    ({"guided_grammar": GBNF}, of_grammar),
    ({"guided_grammar": {"syntax": "lark", "definition": LARK}}, of_grammar),
    ({"structured_outputs": {"grammar": LARK}}, of_grammar),
    ({"response_format": {"type": "grammar", "grammar": LARK}}, of_grammar),
    ({"ebnf": GBNF}, of_grammar),
    ({"structural_tag": json.dumps(TAGS)}, of_tags),
    ({"structured_outputs": {"structural_tag": TAGS}}, of_tags),
    ({"response_format": TAGS}, of_tags),
    ({"response_format": {"type": "structural_tag"} | OLD_TAGS}, of_old_tags),
]


async def content(client: AsyncOpenAI, **fields: Any) -> str:
    """A whole answer, by chat or, where there is a prompt, as a completion; it has come to its own end."""
    path = "/completions" if "prompt" in fields else "/chat/completions"
    source = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "?"}]}
    body: Any = await client.post(path, body={"model": MODEL, "max_tokens": 2000} | source | fields, cast_to=object)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"] if "prompt" in fields else choice["message"]["content"])


def test_every_form_is_kept_on_both_endpoints() -> None:
    async def scenario(improvised: Improvised) -> None:
        for fields, check in FORMS:
            check(await content(improvised.client, **fields))
            check(await content(improvised.client, prompt="?\x01", **fields))

    improvise(scenario)


def test_a_stream_adds_up_to_what_comes_whole() -> None:
    async def scenario(improvised: Improvised) -> None:
        for fields, _ in FORMS[::4]:
            chunks = await improvised.stream(extra_body=fields)
            whole = await improvised.ask(extra_body=fields)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

    improvise(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_lenient_answer_comes_with_what_was_left_out_and_its_verdict(stream: bool) -> None:
    async def scenario(improvised: Improvised) -> None:
        given = {"type": "json_schema", "json_schema": {"name": "n", "schema": OPEN}}
        create = improvised.client.chat.completions.with_raw_response.create
        verdicts = set()
        for seed in range(8):
            raw: Any = await create(
                model=MODEL,
                messages=[{"role": "user", "content": "?"}],
                max_tokens=2000,
                stream=stream,
                temperature=1.0,
                seed=seed,
                extra_body={"response_format": given},
            )
            assert "properties.a.uniqueItems" in raw.headers["x-structured-output-warning"]
            parsed = raw.parse()
            if stream:
                chunks = [chunk async for chunk in parsed]
                text, last = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0]
            else:
                last = parsed.choices[0]
                text = last.message.content
            first, second = json.loads(text)["a"]
            assert last.structured_output["valid"] is (first != second)
            verdicts.add(first != second)
        assert verdicts == {True, False}

    improvise(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": OPEN}, "guided_json.properties.a.uniqueItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OPEN, "strict": True}}},
            "response_format.json_schema.schema.properties.a.uniqueItems",
        ),
        (
            {"structural_tag": {"format": TAG | {"content": {"type": "json_schema", "json_schema": OPEN}}}},
            "structural_tag.format.content.json_schema.properties.a.uniqueItems",
        ),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "("}}}, "structural_tag.format.pattern"),
        ({"guided_grammar": {"syntax": "lark", "definition": "start: nowhere"}}, "guided_grammar.definition"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_byte(fields: dict[str, Any], param: str) -> None:
    async def scenario(improvised: Improvised) -> None:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await improvised.ask(extra_body=fields | {"stream": stream})
            assert caught.value.param == param

    improvise(scenario)


@pytest.mark.parametrize(
    ("end", "tokenizer"),
    [
        ("</think>", MARKER_TOKENS),
        ("<tool_call>", MARKER_TOKENS),
        ("<tool_call>", NO_MARKER_TOKENS),
        ("<|im_end|>", MARKER_TOKENS),
    ],
    ids=["marker", "tool tag", "spelled tool tag", "end of the answer"],
)
def test_however_the_reasoning_ends_the_constraint_is_kept(end: str, tokenizer: Tokenizer) -> None:
    """A tool tag is no content here, where there are no tools; and an answer that ends in its reasoning has not begun."""

    async def scenario(improvised: Improvised) -> None:
        for fields, check in FORMS[:9:2]:
            [choice] = (await improvised.ask(extra_body=fields)).choices
            check(choice.message.content)
            assert choice.finish_reason == "stop"
            assert choice.message.reasoning_content.strip() == "Hm." + (end if end == "<tool_call>" else "")
            chunks = await improvised.stream(extra_body=fields)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content

    improvise(scenario, tail="<think>\n", opening="Hm." + end, plugins=("hermes", "qwen3"), tokenizer=tokenizer)
