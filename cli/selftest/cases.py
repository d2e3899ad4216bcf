"""What the test asks of a model: conversations with constraints, tools, budgets and stop strings, drawn by a seed.

For the built-in script each case has its answer as well. The script compares the whole question, and goes on from the answer's tokens
so far, so that a wrong token in the KV cache changes what it says.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.llm.sampling_params import StructuredOutputsParams


class Feature(StrEnum):
    GRAMMAR = "grammar"
    TOOLS = "tools"
    REASONING = "reasoning"
    BUDGET = "budget"
    STOP = "stop strings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `params` are keywords of `SamplingParams`, `options` those of `chat`. `line` answers in the built-in script."""

    feature: Feature
    name: str
    messages: Sequence[Mapping[str, str]]
    params: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    line: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        """With greedy sampling, whatever the model's authors recommend."""
        return {"temperature": 0.0, **self.params}

    @property
    def is_free(self) -> bool:
        """Whether each token of an answer without reasoning is the most probable one: no mask, budget or penalty decides."""
        return self.feature is Feature.STOP and not self.params.keys() & {"frequency_penalty", "presence_penalty", "min_tokens"}

    def penalty(self, token_id: int, answer: Sequence[int]) -> float:
        """What is subtracted from the logit of a token after these tokens of the answer."""
        number = answer.count(token_id)
        penalty: float = self.params.get("frequency_penalty", 0.0) * number + self.params.get("presence_penalty", 0.0) * (number > 0)
        return penalty

    def stopped(self, rng: random.Random, text: str) -> "Case":
        """With stop strings from the answer without them: most of them end it, and some begin without an end."""
        length = min(len(text), rng.randint(1, 5))
        start = rng.randint(min(len(text) // 3, len(text) - length), len(text) - length) if text else 0
        found = text[start : start + length] or "\n"
        stops = rng.choice([[found], [found], [found, "\n\n"], [f"{found}§", "§§"]])
        return replace(self, params={**self.params, "stop": stops, "include_stop_str_in_output": rng.random() < 0.3})


WORDS = [
    *("apple", "river", "stone", "cloud", "lamp", "paper", "glass", "table", "garden", "bridge", "window", "silver"),
    *("copper", "letter", "number", "winter", "summer", "engine", "signal", "harbor", "mirror", "ribbon", "basket", "candle"),
]
SYSTEM_WORDS = 24
NUM_SYSTEM_PROMPTS = 3
GRAMMARS = (
    'start: item (", " item)*\nitem: WORD " " NUMBER\nWORD: "apple" | "river" | "stone" | "cloud"\nNUMBER: /[0-9]{1,3}/\n',
    'start: sum\nsum: product ("+" product)*\nproduct: value ("*" value)*\nvalue: /[0-9]{1,2}/ | "(" sum ")"\n',
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "count_items",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["item", "limit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"words": {"type": "array", "items": {"enum": WORDS[:6]}, "maxItems": 3}},
                "required": ["words"],
                "additionalProperties": False,
            },
        },
    },
]


def draw_cases(rng: random.Random, features: Sequence[Feature], number: int) -> list[Case]:
    """So many of each feature. Some share a system prompt."""
    systems = [" ".join(rng.choices(WORDS, k=SYSTEM_WORDS)) for _ in range(NUM_SYSTEM_PROMPTS)]
    return [_draw(rng, feature, place, rng.choice(systems)) for feature in features for place in range(number)]


def _draw(rng: random.Random, feature: Feature, place: int, system: str) -> Case:
    records = ", ".join(f"{rng.choice(WORDS)} {rng.randint(0, 99)}" for _ in range(rng.randint(1, 4)))
    question = f"{feature} {place}: say this list twice, one line each: {records}"
    said = f"{records}\n{records}"
    if rng.random() < 0.5:  # what an earlier text proposes goes wrong here
        said = said.replace("1", rng.choice(["7", "one", "1, 1"]))
    params: dict[str, Any] = {"max_tokens": rng.randint(8, 28)}
    if rng.random() < 0.2:
        params["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        params[rng.choice(["frequency_penalty", "presence_penalty"])] = rng.choice([-0.3, 0.4])
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(1, 8)
    thought = f"They want {records}. " + " ".join(rng.choices(WORDS[:5], k=rng.randint(2, 6)))
    line: dict[str, Any] = {"content": said}
    options: dict[str, Any] = {}
    match feature:
        case Feature.GRAMMAR:
            constraint, line["content"] = _constraint(rng, said)
            params["structured_outputs"] = constraint
            if rng.random() < 0.3:
                line["reasoning"] = thought
        case Feature.TOOLS:
            options = {"tools": TOOLS, "tool_choice": rng.choice(["auto", "auto", "required", _named(rng)])}
            line = {"tool_calls": _calls(rng)} if rng.random() < 0.8 else line
            if rng.random() < 0.3:
                line["content"] = "I look. "
        case Feature.REASONING:
            line["reasoning"] = thought
        case Feature.BUDGET:
            line["reasoning"] = thought
            params["thinking_token_budget"] = rng.randint(0, 16)
        case Feature.STOP:
            if rng.random() < 0.3:
                line["reasoning"] = thought
    if feature in (Feature.REASONING, Feature.BUDGET) or "reasoning" in line:
        params["max_tokens"] += 12
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Case(feature=feature, name=f"{feature} {place}", messages=messages, params=params, options=options, line=line)


def _constraint(rng: random.Random, said: str) -> tuple[StructuredOutputsParams, str]:
    """A constraint, and what a script says that fulfils it, or does so at first, or not at all."""
    match rng.randrange(6):
        case 0 | 1:
            schema, value = _schema(rng)
            text = json.dumps(value, separators=rng.choice([(",", ":"), (", ", ": ")]))
            return StructuredOutputsParams(json=schema), rng.choice(["", "Sure! "]) + text
        case 2:
            items = "|".join(rng.sample(WORDS, 4))
            return StructuredOutputsParams(regex=f"({items}) [0-9]{{1,3}}(, ({items}) [0-9]{{1,3}}){{0,4}}"), said
        case 3:
            first = rng.choice(WORDS)
            choices = [f"{first} {rng.choice(WORDS)} {number}" for number in range(5)] + [first]
            return StructuredOutputsParams(choice=choices), rng.choice(choices)
        case 4:
            return StructuredOutputsParams(grammar=GRAMMARS[0]), said
        case _:
            return StructuredOutputsParams(grammar=GRAMMARS[1]), rng.choice(["1+2*(3+44)*5+6", "7*7*7*7*7*7", said])


def _schema(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A strict schema, and an instance."""
    properties: dict[str, Any] = {}
    value: dict[str, Any] = {}
    for name in rng.sample(WORDS, rng.randint(1, 3)):
        match rng.randrange(4):
            case 0:
                properties[name], value[name] = {"type": "string", "maxLength": 12}, rng.choice(WORDS)
            case 1:
                properties[name], value[name] = {"type": "integer", "minimum": 0, "maximum": 500}, rng.randint(0, 500)
            case 2:
                properties[name], value[name] = {"enum": WORDS[:4]}, rng.choice(WORDS[:4])
            case _:
                value[name] = [rng.randint(0, 9) for _ in range(rng.randint(0, 4))]
                properties[name] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}, value


def _named(rng: random.Random) -> dict[str, Any]:
    return {"type": "function", "function": {"name": rng.choice(TOOLS)["function"]["name"]}}


def _calls(rng: random.Random) -> list[dict[str, Any]]:
    counted = {"name": "count_items", "arguments": {"item": rng.choice(WORDS), "limit": rng.randint(0, 99)}}
    looked_up = {"name": "look_up", "arguments": {"words": rng.sample(WORDS[:6], 2)}}
    return rng.choice([[counted], [looked_up], [counted, counted]])


def script_of(cases: Sequence[Case], *, draft: random.Random | None = None) -> str:
    """The file of a scripted model that answers the cases; as a `draft`, with some words replaced by others."""
    lines: list[dict[str, Any]] = [{"model": {"name": "selftest", "context_length": 1024}}]
    for case in cases:
        line = json.loads(json.dumps(dict(case.line)))
        if draft is not None:
            for name in ("content", "reasoning"):
                if name in line:
                    line[name] = " ".join(word if draft.random() < 0.8 else draft.choice(WORDS) for word in line[name].split(" "))
        lines.append({"when": {"user": {"equals": case.messages[-1]["content"]}}, **line})
    return "\n".join(map(json.dumps, lines)) + "\n"
