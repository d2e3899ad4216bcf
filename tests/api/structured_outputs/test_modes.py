"""The modes of structured outputs over HTTP: free text before a constrained answer, and how much the constraint forces the model."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.engine.scripted.file import byte_tokenizer
from tests.api.scripted_model.served import ServedScript, served_script, write_script

JSON_CUE, CUE, OPENING = "\n\nAs JSON:\n", "\n\nFinal answer:\n", "Let's think step by step.\n"
SIGN = "##"
THOUGHT = "Name, then place."
DRAFT = "The name is Maria Lindqvist, and she lives in Oslo by the sea. STOP here"
ANSWER = '{"name": "Maria Lindqvist", "city": "Oslo by the sea"}'
LOOP = " the same thing over and over."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Oslo by the sea"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
    "required": ["name", "city"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": LOOK}}]


def said_after(user: str, draft: str, answer: str, before: str = "", cue: str = JSON_CUE) -> list[dict[str, Any]]:
    """Lines of a script: to this message a model says the draft, and the answer behind the cue."""
    when = {"user": {"equals": user}}
    return [{"when": when | {"prefill": before + draft + cue}, "text": answer}, {"when": when | {"prefill": before}, "text": draft}]


def in_turn(draft: str, answer: str) -> list[int]:
    """The tokens of both, with the end of the message between them: behind a cue that neither has a character of, the answer follows."""
    backend = byte_tokenizer()
    return [token_id for text in (draft, "<|im_end|>", answer) for token_id in backend.encode(text, add_special_tokens=False).ids]


def either(user: str, text: str) -> list[dict[str, Any]]:
    """To this message a model says the text, after thoughts too, and where that is not what the answer is held to, JSON or a call."""
    when = {"user": {"equals": user}}
    thoughts = OPENING + DRAFT + CUE
    return [
        {"when": when | {"prefill": before}, "text": said}
        for before, said in ((DRAFT + JSON_CUE, ANSWER), (thoughts, text), (OPENING, DRAFT), ("", text))
    ]


LINES: list[dict[str, Any]] = [
    {"model": {"name": "demo"}},
    *said_after("draft", DRAFT, ANSWER),
    *said_after("stop", DRAFT, ANSWER),
    {"when": {"user": {"equals": "reason"}}, "tokens": in_turn(f"<think>{THOUGHT}</think>{DRAFT}", ANSWER)},
    *said_after("think", DRAFT, ANSWER, before=OPENING),
    {"when": {"user": {"equals": "think"}}, "text": f"<think>{THOUGHT}</think>{ANSWER}"},
    *either("calls", CALL),
    *either("refuses", DRAFT),
    *either("looks first", f"I look. {CALL}"),
    {"when": {"user": {"equals": "call"}}, "tokens": in_turn(f"I would say {CALL} or so.", CALL)},
    *said_after("short", "none", ANSWER, cue="\n\nShort:\n"),
    {"when": {"user": {"equals": "nothing"}, "prefill": "T" + JSON_CUE}, "text": ANSWER},
    {"when": {"user": {"equals": "nothing"}, "prefill": JSON_CUE}, "text": ANSWER},
    {"when": {"user": {"equals": "nothing"}}, "text": DRAFT},
    *said_after("A completion", "free", "no", cue=CUE),
    {"when": {"user": {"equals": "endless call"}}, "text": CALL[:40], "finish": "length"},
    {"when": {"user": {"equals": "endless"}}, "text": "xyz", "finish": "length"},
    {"when": {"user": {"equals": "loop"}, "prefill": f"I say{LOOP * 3}{JSON_CUE}"}, "text": ANSWER},
    {"when": {"user": {"equals": "loop"}}, "text": "I say" + LOOP * 9},
    {"text": "elsewhere"},
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("modes") / "answers.jsonl", LINES)


@pytest.fixture(scope="module")
def served(script: Path) -> Iterator[ServedScript]:
    with served_script(script) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: ServedScript) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def asking(user: str, mode: str = "draft", **fields: Any) -> dict[str, Any]:
    """The body of a request. What is not of OpenAI's own fields goes under `extra_body`."""
    how = {
        name: fields.pop(name)
        for name in ("preamble_tokens", "include_preamble", "opening", "cue", "pressure", "within_max_tokens")
        if name in fields
    }
    constraint: dict[str, Any] = {} if "tools" in fields else {"json": SCHEMA}
    extra: dict[str, Any] = {"structured_outputs": {"mode": mode, **constraint, **how}}
    extra |= {name: fields.pop(name) for name in ("chat_template_kwargs", "min_tokens") if name in fields}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": user}],
        "temperature": 0,
        "max_tokens": 600,
        "extra_body": extra,
        **fields,
    }


def whole(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.chat.completions.create(**body).model_dump(exclude_none=True)
    return answer


def streamed(client: Any, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices that the chunks add up to, as `comparable`, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        told = chunk.model_dump(exclude_none=True)
        usage = told.get("usage", usage)
        for choice in told["choices"]:
            known = choices.setdefault(choice["index"], {"texts": {}, "calls": {}, "logprobs": []})
            for name in ("content", "reasoning_content", "preamble"):
                known["texts"][name] = known["texts"].get(name, "") + choice["delta"].get(name, "")
            for call in choice["delta"].get("tool_calls", []):
                name, arguments = known["calls"].get(call["index"], ("", ""))
                function = call["function"]
                known["calls"][call["index"]] = (function.get("name", name), arguments + function.get("arguments", ""))
            known["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            for name in ("finish_reason", "structured_output"):
                known[name] = choice.get(name, known.get(name))
    return [choices[index] for index in sorted(choices)], usage


def comparable(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "texts": {name: choice["message"].get(name, "") for name in ("content", "reasoning_content", "preamble")},
            "calls": {
                index: (call["function"]["name"], call["function"]["arguments"])
                for index, call in enumerate(choice["message"].get("tool_calls", []))
            },
            "logprobs": (choice.get("logprobs") or {}).get("content") or [],
            "finish_reason": choice["finish_reason"],
            "structured_output": choice.get("structured_output"),
        }
        for choice in answer["choices"]
    ]


def details(answer: dict[str, Any]) -> tuple[int, int, int]:
    """The tokens of the reasoning, the preamble and the answer, which are all."""
    parts = answer["usage"]["completion_tokens_details"]
    numbers = (parts["reasoning_tokens"], parts["preamble_tokens"], parts["answer_tokens"])
    assert sum(numbers) == answer["usage"]["completion_tokens"]
    return numbers


def test_the_answer_follows_a_draft_that_is_hidden(client: Any) -> None:
    answer = whole(client, asking("draft"))
    [choice] = answer["choices"]
    assert choice["message"]["content"] == ANSWER
    assert "preamble" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert details(answer) == (0, len(DRAFT) + len(JSON_CUE), len(ANSWER))


def test_the_draft_is_returned_on_request(client: Any) -> None:
    answer = whole(client, asking("draft", include_preamble=True))
    assert answer["choices"][0]["message"]["preamble"] == DRAFT


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include_preamble": True},
        {"include_preamble": True, "n": 3},
        {"logprobs": True, "top_logprobs": 2, "include_preamble": True},
        {"stop": ["STOP", "sea"]},
        {"pressure": True},
        {"preamble_tokens": 5, "include_preamble": True},
        {"max_tokens": 20, "include_preamble": True},
    ],
)
@pytest.mark.parametrize("user", ["draft", "reason"])
def test_a_stream_adds_up_to_the_whole(client: Any, user: str, fields: dict[str, Any]) -> None:
    cue = {"cue": SIGN} if user == "reason" else {}
    answer = whole(client, asking(user, **cue, **fields))
    choices, usage = streamed(client, asking(user, **cue, **fields))
    assert choices == comparable(answer)
    for told in (usage, answer["usage"]):
        told.pop("prompt_tokens_details", None)
    assert usage == answer["usage"]


def test_reasoning_a_draft_and_the_answer_are_three_parts(client: Any) -> None:
    answer = whole(client, asking("reason", cue=SIGN, include_preamble=True))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["preamble"], message["content"]) == (THOUGHT, DRAFT, ANSWER)
    assert details(answer) == (len(THOUGHT) + 2, len(DRAFT) + len(SIGN), len(ANSWER))


def test_stop_strings_apply_to_the_answer_alone(client: Any) -> None:
    [choice] = whole(client, asking("stop", stop=["STOP", " by the sea"], include_preamble=True))["choices"]
    assert choice["message"]["preamble"] == DRAFT
    assert choice["message"]["content"] == ANSWER.partition(" by the sea")[0]
    assert choice["stop_reason"] == " by the sea"


@pytest.mark.parametrize(("budget", "draft"), [(0, ""), (1, "T")])
def test_a_small_budget_cuts_the_draft(client: Any, budget: int, draft: str) -> None:
    answer = whole(client, asking("nothing", preamble_tokens=budget, include_preamble=True))
    message = answer["choices"][0]["message"]
    assert (message.get("preamble", ""), message["content"]) == (draft, ANSWER)
    assert details(answer) == (0, budget + len(JSON_CUE), len(ANSWER))


def test_a_draft_without_room_for_the_answer_ends_by_length(client: Any) -> None:
    answer = whole(client, asking("draft", preamble_tokens=500, max_tokens=30, include_preamble=True))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["preamble"], choice["message"]["content"]) == (DRAFT[:30], "")
    assert details(answer) == (0, 30, 0)


def test_without_a_budget_half_of_the_tokens_are_for_the_answer(client: Any) -> None:
    answer = whole(client, asking("draft", max_tokens=40, include_preamble=True))
    [choice] = answer["choices"]
    assert choice["message"]["preamble"] == DRAFT[: (40 - len(JSON_CUE)) // 2]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) == 40 - len(JSON_CUE) - (40 - len(JSON_CUE)) // 2


def asking_for_either(user: str, mode: str, **fields: Any) -> dict[str, Any]:
    """A call of a tool or JSON, as the model likes."""
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    return asking(user, mode, tools=TOOLS, response_format=format_, **fields)


@pytest.mark.parametrize("mode", ["direct", "think", "draft"])
def test_beside_a_schema_a_call_is_one_in_every_mode(client: Any, mode: str) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": False}} if mode == "think" else {}  # in hidden text
    for user, is_called in (("calls", True), ("refuses", False), ("looks first", mode == "draft")):
        body = asking_for_either(user, mode, **({} if mode == "direct" else {"include_preamble": True}), **thinks)
        answer = whole(client, body)
        [choice] = answer["choices"]
        message = choice["message"]
        assert (choice["finish_reason"] == "tool_calls") == bool(message.get("tool_calls")) == is_called
        if is_called:
            assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"at": "Oslo by the sea"}]
            assert not message.get("content")
        else:
            assert json.loads(message["content"]).keys() == {"name", "city"}
        before = {"calls": "", "refuses": DRAFT, "looks first": "I look. "}[user]
        assert message.get("preamble", "") == {"direct": "", "think": DRAFT, "draft": before}[mode]
        choices, usage = streamed(client, body)
        assert choices == comparable(answer)
        assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert usage.get("completion_tokens_details") == answer["usage"].get("completion_tokens_details")


def test_calls_in_a_draft_are_text_and_those_of_the_answer_are_calls(client: Any) -> None:
    body = asking("call", tools=TOOLS, tool_choice="required", cue=SIGN, include_preamble=True, pressure=True)
    answer = whole(client, body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["preamble"] == f"I would say {CALL} or so."
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "Oslo by the sea"}
    assert streamed(client, body)[0] == comparable(answer)


def test_log_probabilities_are_those_of_the_answer(client: Any) -> None:
    [choice] = whole(client, asking("draft", logprobs=True, include_preamble=True))["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).removesuffix("<|im_end|>") == ANSWER


def test_thoughts_go_to_the_models_own_channel(client: Any) -> None:
    answer = whole(client, asking("think", mode="think"))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)
    cut = whole(client, asking("think", mode="think", preamble_tokens=3))
    assert cut["choices"][0]["message"]["reasoning_content"] == "Nam"


def test_thoughts_are_free_text_where_the_channel_is_closed(client: Any) -> None:
    body = asking("think", mode="think", include_preamble=True, chat_template_kwargs={"enable_thinking": False})
    message = whole(client, body)["choices"][0]["message"]
    assert (message["preamble"], message["content"]) == (DRAFT, ANSWER)


def test_the_cue_may_be_the_requests_own(client: Any) -> None:
    message = whole(client, asking("short", cue="\n\nShort:\n"))["choices"][0]["message"]
    assert message["content"] == ANSWER


def test_a_mode_may_stand_beside_any_field_that_constrains(client: Any) -> None:
    body = asking("draft")
    del body["extra_body"]["structured_outputs"]["json"]
    formats = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for constraint in ({"response_format": formats}, {"guided_json": SCHEMA}):
        extra = body["extra_body"] | constraint
        assert whole(client, body | {"extra_body": extra})["choices"][0]["message"]["content"] == ANSWER


def test_the_next_request_finds_the_prompt_in_the_cache(client: Any) -> None:
    answers = [whole(client, asking("draft", opening="So: " * 10)) for _ in range(2)]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 32


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mode": "direct", "cue": "So:"}, "structured_outputs.cue"),
        ({"mode": "direct", "preamble_tokens": 3}, "structured_outputs.preamble_tokens"),
        ({"cue": ""}, "structured_outputs.cue"),
        ({"mode": "fast"}, "structured_outputs.mode"),
        ({"mode": "think", "cue": "So:"}, "structured_outputs.cue"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, asking("draft", **fields))
    assert refused.value.param == param


def test_a_mode_without_a_constraint_is_refused(client: Any) -> None:
    body = asking("draft")
    del body["extra_body"]["structured_outputs"]["json"]
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, body)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("name", ["use_beam_search", "continue_final_message"])
def test_what_contradicts_a_mode_is_refused(client: Any, name: str) -> None:
    body = asking("draft")
    body["extra_body"][name] = True
    if name == "continue_final_message":
        body["messages"].append({"role": "assistant", "content": "So"})
        body["extra_body"]["add_generation_prompt"] = False
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, body)
    assert refused.value.param == name


COMPLETION = {"model": "demo", "prompt": "A completion", "temperature": 0, "max_tokens": 60}
CHOICE = {"structured_outputs": {"choice": ["yes", "no"], "mode": "draft", "include_preamble": True}}


def test_a_completion_has_a_draft_as_well(client: Any) -> None:
    [choice] = client.completions.create(**COMPLETION, logprobs=0, extra_body=CHOICE).model_dump()["choices"]
    assert (choice["preamble"], choice["text"]) == ("free", "no")
    assert "".join(choice["logprobs"]["tokens"]).removesuffix("<|im_end|>") == "no"
    texts = {"preamble": "", "text": ""}
    for chunk in client.completions.create(**COMPLETION, stream=True, extra_body=CHOICE):
        for part in chunk.model_dump()["choices"]:
            texts = {name: text + (part.get(name) or "") for name, text in texts.items()}
    assert texts == {"preamble": "free", "text": "no"}


def test_pressure_says_which_field_was_forced(client: Any) -> None:
    """A scripted model finds its own token e^20 times as probable as the next."""
    [choice] = whole(client, asking("draft", pressure=True))["choices"]
    assert choice["structured_output"]["pressure"] < 1e-6
    body = asking("draft", mode="direct", pressure=True)
    answer = whole(client, body)
    [choice] = answer["choices"]
    assert choice["structured_output"]["pressure"] > 20
    assert choice["structured_output"]["worst"]["nats"] <= choice["structured_output"]["pressure"]
    assert choice["structured_output"]["worst"]["path"] in ("$", "$.name", "$.city")
    assert json.loads(choice["message"]["content"]).keys() == {"name", "city"}


def counted(served: ServedScript, name: str) -> float:
    """The value of a metric that has one."""
    with urllib.request.urlopen(served.url.removesuffix("/v1") + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"penstock:{name}"))


def test_pressure_is_a_histogram(client: Any, served: ServedScript) -> None:
    before = counted(served, "constraint_pressure_nats_count")
    whole(client, asking("draft"))
    assert counted(served, "constraint_pressure_nats_count") == before
    whole(client, asking("draft", pressure=True))
    assert counted(served, "constraint_pressure_nats_count") == before + 1


def closed(client: Any, user: str = "endless", mode: str = "direct", **fields: Any) -> dict[str, Any]:
    return whole(client, asking(user, mode, within_max_tokens=True, **fields))


@pytest.mark.parametrize("max_tokens", [23, 40])
@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"n": 2, "temperature": 1}, {"pressure": True}, {"stop": ["zzzz"]}])
def test_an_endless_answer_is_whole_within_its_max_tokens(client: Any, max_tokens: int, fields: dict[str, Any]) -> None:
    body = asking("endless", "direct", max_tokens=max_tokens, within_max_tokens=True, seed=1, **fields)
    answer = whole(client, body)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"]).keys() == {"name", "city"}
        assert choice["structured_output"]["closed"] is True
        assert ("pressure" in choice["structured_output"]) == ("pressure" in fields)
    assert answer["usage"]["completion_tokens"] <= max_tokens * len(answer["choices"])
    choices, _ = streamed(client, body)
    assert choices == comparable(answer)


def test_an_answer_that_ends_by_itself_is_as_without(client: Any) -> None:
    for mode, max_tokens in (("draft", len(DRAFT) + len(JSON_CUE) + len(ANSWER)), ("draft", 600)):
        plain = whole(client, asking("draft", mode, max_tokens=max_tokens))["choices"][0]
        [choice] = closed(client, "draft", mode, max_tokens=max_tokens)["choices"]
        assert choice["message"] == plain["message"]
        assert choice["finish_reason"] == plain["finish_reason"] == "stop"
        assert choice["structured_output"] == {"closed": False}
        assert "structured_output" not in plain


def test_what_precedes_an_answer_leaves_room_for_it(client: Any) -> None:
    for mode, name in (("think", "reasoning_content"), ("draft", "preamble")):
        answer = closed(client, mode=mode, max_tokens=90, preamble_tokens=1000, include_preamble=True)
        [choice] = answer["choices"]
        assert json.loads(choice["message"]["content"]).keys() == {"name", "city"}
        assert 40 < len(choice["message"][name]) < 90
        assert answer["usage"]["completion_tokens"] <= 90


def test_calls_end_within_max_tokens_where_they_are_constrained(client: Any) -> None:
    shortest = len('{"name": "look", "arguments": {"at": ""}}') + 4
    for max_tokens in (shortest, 60, 100):
        [choice] = closed(client, "endless call", tools=TOOLS, tool_choice="required", max_tokens=max_tokens)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert [json.loads(call["function"]["arguments"]).keys() for call in choice["message"]["tool_calls"]] == [{"at"}]


def test_a_limit_below_the_shortest_answer_and_what_forbids_endings_are_refused(client: Any) -> None:
    for fields, param in (({"max_tokens": 5}, "max_tokens"), ({"extra": {"bad_words": ["x"]}}, "bad_words")):
        body = asking("endless", "direct", within_max_tokens=True, **{name: value for name, value in fields.items() if name != "extra"})
        body["extra_body"] |= fields.get("extra", {})
        with pytest.raises(openai.BadRequestError) as refused:
            whole(client, body)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "endless"}], extra_body={"structured_outputs": {"within_max_tokens": True}}
        )
    assert refused.value.param == "structured_outputs"


def test_closed_answers_are_counted(client: Any, served: ServedScript) -> None:
    before = counted(served, "constraint_closed_total")
    closed(client, "draft", "draft")
    assert counted(served, "constraint_closed_total") == before
    closed(client, max_tokens=30)
    assert counted(served, "constraint_closed_total") == before + 1


def test_a_response_has_a_draft_that_no_item_shows(client: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    body = {"model": "demo", "input": "draft", "temperature": 0, "text": text}
    response = client.responses.create(**body, extra_body={"structured_outputs": {"mode": "draft", "pressure": True}})
    assert response.output_text == ANSWER
    assert response.usage.output_tokens == len(DRAFT) + len(JSON_CUE) + len(ANSWER)
    assert response.structured_output["pressure"] < 1e-6
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**body, extra_body={"structured_outputs": {"mode": "draft", "include_preamble": True}})
    assert refused.value.param == "structured_outputs.include_preamble"


def test_what_repeats_itself_ends_in_a_draft_always_and_elsewhere_where_that_is_asked_for(client: Any) -> None:
    drafted = whole(client, asking("loop", include_preamble=True))
    (choice,) = drafted["choices"]
    assert (choice["message"]["preamble"], choice["message"]["content"]) == ("I say" + LOOP * 3, ANSWER)
    free = {"model": "demo", "messages": [{"role": "user", "content": "loop"}], "temperature": 0, "max_tokens": 600}
    assert comparable(whole(client, free))[0]["texts"]["content"] == "I say" + LOOP * 9
    body = {**free, "extra_body": {"repetition_detection": {"max_pattern_size": 64, "min_pattern_size": 3, "min_count": 2}}}
    answer = whole(client, body)
    assert comparable(answer)[0]["texts"]["content"] == "I say" + LOOP * 2
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("length", "repetition_detected")
    assert streamed(client, body)[0][0]["texts"]["content"] == "I say" + LOOP * 2


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"max_pattern_size": 3}, "repetition_detection.min_count"),
        ({"size": 3}, "repetition_detection.size"),
        ({"max_pattern_size": "3"}, "repetition_detection.max_pattern_size"),
    ],
)
def test_a_bad_repetition_is_named(client: Any, given: dict[str, Any], path: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, asking("loop") | {"extra_body": {"repetition_detection": given}})
    assert refused.value.param == path
