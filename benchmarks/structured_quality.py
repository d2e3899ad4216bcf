# mypy: disable-error-code="import-untyped"
"""What a constraint does to the answers of small models: how many are right, free and constrained, in seven ways of asking.

    python benchmarks/structured_quality.py --answers answers.jsonl --json benchmarks/results/structured-quality.json
    python benchmarks/structured_quality.py --answers answers.jsonl --models smollm2-135m --tasks arithmetic calendar --items 20
    python benchmarks/structured_quality.py --answers answers.jsonl --summary --page docs/structured-quality.md

The ways (arms), all greedy:

- `free`: an answer in text, out of which a parser reads the value
- `prompt`: JSON asked for in the prompt alone
- `direct`: the same prompt, and a JSON Schema as the constraint
- `think`: the same, after free text (mode `think`)
- `draft`: the prompt of `free`; its answer is the draft, and the constrained answer follows it (mode `draft`)
- `draft+pressure`: the same once more, to measure the constraint's pressure, which takes time; `direct` and `think` always measure it
- `free+closed`, `direct+closed` and `draft+closed`: the same with `repetition_detection`, which ends an answer that repeats itself, and
  of constrained answers with `within_max_tokens`, which has them complete at their end
- `retry`: the library Instructor, which validates, and asks again with the errors, at most three times in all; no constraint
- `outlines`: the library Outlines over transformers' model in bfloat16, without a server; slow, so only `--outlines-items` of each task
- `tools`, `tools+schema` and `tools+draft`: of the tasks with calls, whether the model calls a tool that it need not call (`tool_choice`
  auto), without a schema for its answer, with one, and with one in mode `draft`

The arms of an item follow one another in an order that the seed gives, so whatever disturbs the machine disturbs all of them. Times are
compared of answers that were asked for with `--concurrency 1`, one request at a time. None finds the prompt of another in the prefix cache.
A free answer has at most `--max-tokens` tokens, and so has what a mode lets precede an answer. Answers are
appended to `--answers` as they come, and a later run goes on with those that are missing.
`benchmarks/quality_tasks.py` has the tasks, and `benchmarks/quality_figures.py` says what each figure is.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import instructor
import jsonschema
import openai
import pydantic
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

from benchmarks import report
from benchmarks.quality_figures import Record, page, summary, table
from benchmarks.quality_tasks import BFCL_TASKS, GENERATED, Item, Schema, items, json_in
from benchmarks.target import ProcessTree, Target, TargetError, running
from penstock.engine.model.store import resolve_model
from penstock.engine.system.cache import cache_directory

MODELS = ("smollm2", "qwen-coder", "qwen-coder-1.5b")
TASKS = (*GENERATED, *(f"bfcl_{task}" for task in BFCL_TASKS))
SERVED = (
    *("free", "free+closed", "draft", "prompt", "direct", "think", "retry", "draft+pressure", "direct+closed", "draft+closed"),
    *("tools", "tools+schema", "tools+draft"),
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0}
MODES = ("direct", "think", "draft")
REPETITION = {"max_pattern_size": 128, "min_pattern_size": 16, "min_count": 3}  # as in modes by default
ANSWER_TOKENS = 300  # of what follows a draft or thoughts, and its cue
MAX_RETRIES = 2
SERVER = report.ROOT / "server.py"
ANSWER: Schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"], "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Asker:
    """One server. Where one request runs at a time, `processes` are its own, whose processor time is that of the answer."""

    client: openai.AsyncOpenAI
    model: str
    processes: ProcessTree | None
    max_tokens: int

    async def ask(self, item: Item, arm: str) -> Record | None:
        """None where the arm does not apply. An answer that the server refuses is a record with its message."""
        if arm.startswith("tools") and not item.functions:
            return None
        record = Record(self.model, item.task, item.key, arm)
        begun, spent = time.perf_counter(), self._processor_seconds()
        try:
            if arm == "retry":
                await self._retry(item, record)
            elif arm.startswith("tools"):
                await self._tools(item, record)
            else:
                await self._answer(item, record)
        except openai.APIStatusError as error:
            record.error = str(error)
        record.seconds, record.processor_seconds = time.perf_counter() - begun, self._processor_seconds() - spent
        return record

    def _processor_seconds(self) -> float:
        return 0.0 if self.processes is None else self.processes.processor_seconds()

    async def _answer(self, item: Item, record: Record) -> None:
        mode, _, how = record.arm.partition("+")
        form = item.free_form if mode in ("free", "draft") else item.json_form
        extra, max_tokens = extra_of(record), self.max_tokens
        if how == "closed":
            extra["repetition_detection"] = REPETITION
        if mode in MODES:
            extra["structured_outputs"] = {"json": item.schema, "mode": mode, "within_max_tokens": how == "closed"}
            extra["structured_outputs"]["pressure"] = how == "pressure" or mode != "draft"
            if mode != "direct":
                extra["structured_outputs"] |= {"preamble_tokens": self.max_tokens, "include_preamble": True}
                max_tokens += ANSWER_TOKENS
        whole = await self.client.chat.completions.create(
            **{"model": self.model, "messages": item.messages(form), "max_tokens": max_tokens, "extra_body": extra, **GREEDY}
        )
        message = whole.choices[0].message
        record.text, record.finish_reason = message.content or "", whole.choices[0].finish_reason
        record.tokens = whole.usage.completion_tokens
        extras = message.model_extra or {}
        record.preamble = extras.get("preamble")
        pressure = (whole.choices[0].model_extra or {}).get("structured_output", {}).get("pressure")
        if pressure is not None:
            record.pressure = pressure["nats"] if isinstance(pressure, dict) else pressure

    async def _retry(self, item: Item, record: Record) -> None:
        client = instructor.from_openai(self.client, mode=instructor.Mode.MD_JSON)

        def count(response: Any) -> None:
            record.tokens += response.usage.completion_tokens
            record.text, record.finish_reason = response.choices[0].message.content or "", response.choices[0].finish_reason

        client.on("completion:response", count)
        with suppress(InstructorRetryException, IncompleteOutputException):
            await client.chat.completions.create(
                model=self.model,
                messages=cast(Any, item.messages(item.json_form)),
                max_tokens=self.max_tokens,
                response_model=answer_type(item.schema),
                max_retries=MAX_RETRIES,
                extra_body=extra_of(record),
                **GREEDY,
            )

    async def _tools(self, item: Item, record: Record) -> None:
        """Names have underscores for dots, which OpenAI's API does not allow."""
        tools = [{"type": "function", "function": {**function, "name": function["name"].replace(".", "_")}} for function in item.functions]
        asked: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": item.question}], "tools": tools}
        _, _, held_to = record.arm.partition("+")
        if held_to:
            asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
        asked |= {"max_tokens": self.max_tokens, "extra_body": extra_of(record), **GREEDY}
        if held_to == "draft":
            asked["extra_body"]["structured_outputs"] = {"mode": "draft", "preamble_tokens": self.max_tokens}
            asked["max_tokens"] += ANSWER_TOKENS
        whole = await self.client.chat.completions.create(**asked)
        message = whole.choices[0].message
        record.text, record.finish_reason = message.content or "", whole.choices[0].finish_reason
        record.tokens = whole.usage.completion_tokens
        record.has_call = bool(message.tool_calls)
        if message.tool_calls:
            record.text = json.dumps([call.function.model_dump() for call in message.tool_calls])


def extra_of(record: Record) -> dict[str, Any]:
    """Packaged models may come with another penalty. The salt keeps the prefix cache of one arm apart from that of the others."""
    return {"repetition_penalty": 1.0, "cache_salt": f"{record.key} {record.arm}"}


def answer_type(schema: Schema) -> type[pydantic.BaseModel]:
    """As Instructor takes it: a model that describes itself with the schema and validates with it."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    class Answer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")

        @classmethod
        def model_json_schema(cls, *_: Any, **__: Any) -> Schema:
            return schema

        @pydantic.model_validator(mode="before")
        @classmethod
        def check(cls, value: Any) -> Any:
            faults = [error.message for error in validator.iter_errors(value)]
            if faults:
                raise ValueError("; ".join(faults))
            return value

    return Answer


def judge(item: Item, record: Record) -> None:
    """What the answer is worth. One that cannot be read is not valid."""
    read = item.read if record.arm.startswith("free") else json_in if record.arm in ("prompt", "retry") else json.loads
    try:
        value = read(record.text)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return
    validator = jsonschema.Draft202012Validator(item.schema, format_checker=jsonschema.FormatChecker())
    record.is_valid = validator.is_valid(value)
    record.is_right = record.is_valid and item.is_right(value)


def kept(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(slots=True)
class Study:
    options: argparse.Namespace
    done: set[tuple[str, str, str, str]]

    def items(self, task: str, number: int) -> list[Item]:
        return items(task.removeprefix("bfcl_"), number, self.options.seed, cache_directory() / "benchmarks")

    def judged(self) -> list[Record]:
        """All answers to these models' items."""
        known = {(item.task, item.key): item for task in self.options.tasks for item in self.items(task, self.options.items)}
        found = []
        for record in kept(self.options.answers):
            item = known.get((record.task, record.key))
            if item is not None and record.model in self.options.models:
                judge(item, record)
                found.append(record)
        return sorted(found, key=lambda record: (self.options.models.index(record.model), self.options.tasks.index(record.task)))

    def missing(self, model: str, item: Item, arms: Sequence[str]) -> list[str]:
        """In the order in which they are asked."""
        left = [arm for arm in arms if (model, item.task, item.key, arm) not in self.done]
        random.Random(f"{self.options.seed} {item.key}").shuffle(left)
        return left

    def keep(self, record: Record) -> None:
        self.done.add(record.identity)
        with self.options.answers.open("a", encoding="utf-8") as file:
            answer = {name: value for name, value in asdict(record).items() if name not in ("is_valid", "is_right")}  # judged later
            file.write(json.dumps(answer) + "\n")

    async def serve(self, model: str) -> None:
        """All that is missing of a model, in every served arm."""
        tasks = [self.items(task, self.options.items) for task in self.options.tasks]
        asked = [item for place in zip_longest(*tasks) for item in place if item is not None]  # so that a run cut short has some of each
        arms = [arm for arm in self.options.arms if arm in SERVED]
        work = [(item, left) for item in asked if (left := self.missing(model, item, arms))]
        if not work:
            return
        command = f"{sys.executable} {SERVER} --model {model} --port {{port}} {self.options.flags}"
        async with running(Target("penstock", command=command), True, 600, 600) as server:
            client = openai.AsyncOpenAI(base_url=server.client.url, api_key="none", timeout=1800, max_retries=0)
            is_alone = self.options.concurrency == 1
            asker = Asker(client, server.client.model, server.processes if is_alone else None, self.options.max_tokens)
            limit = asyncio.Semaphore(self.options.concurrency)
            await asyncio.gather(*(self._ask(asker, model, limit, item, left) for item, left in work))

    async def _ask(self, asker: Asker, model: str, limit: asyncio.Semaphore, item: Item, arms: Sequence[str]) -> None:
        async with limit:
            for arm in arms:
                record = await asker.ask(item, arm)
                if record is not None:
                    record.model = model
                    self.keep(record)

    def outlines(self, model: str) -> None:
        """The arm `outlines`: in this process, without the server."""
        asked = [item for task in self.options.tasks for item in self.items(task, min(self.options.outlines_items, self.options.items))]
        work = [item for item in asked if self.missing(model, item, ["outlines"])]
        if not work:
            return
        import outlines
        from transformers import AutoTokenizer

        from penstock.engine.model.loader import load_model

        source = resolve_model(model)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        loaded = load_model(source, "bfloat16", "cpu", quantization="none", attn_implementation="sdpa").model
        generator = outlines.from_transformers(loaded, tokenizer)
        for item in work:
            record = Record(model, item.task, item.key, "outlines")
            prompt = tokenizer.apply_chat_template(item.messages(item.json_form), tokenize=False, add_generation_prompt=True)
            begun = time.perf_counter()
            try:
                schema = outlines.json_schema(json.dumps(item.schema))
                record.text = str(
                    generator(prompt, schema, max_new_tokens=self.options.max_tokens, do_sample=False, repetition_penalty=1.0)
                )
            except (ValueError, TypeError, NotImplementedError) as error:  # what outlines_core does not support
                record.error = f"{type(error).__name__}: {error}"[:500]
            record.seconds = time.perf_counter() - begun
            record.tokens = len(tokenizer.encode(record.text, add_special_tokens=False))
            self.keep(record)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument(
        "--answers", type=Path, required=True, metavar="FILE", help="JSON lines: every answer; those in it are not asked again"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="(default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="(default: %(default)s)")
    parser.add_argument(
        "--arms", nargs="+", choices=(*SERVED, "outlines"), default=list(SERVED), metavar="ARM", help="(default: %(default)s)"
    )
    parser.add_argument("--items", type=int, default=50, help="of each task (default: %(default)s)")
    parser.add_argument("--outlines-items", type=int, default=10, help="of each task, for the arm outlines (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer in one piece, and of a preamble (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=1, help="items at once; times are not compared then (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of the server")
    parser.add_argument("--summary", action="store_true", help="ask nothing; the figures of what is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures")
    parser.add_argument("--page", type=Path, metavar="FILE", help="writes the tables into this page, and plots into benchmarks/results")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    study = Study(options, {record.identity for record in kept(options.answers)})
    status = 0
    try:
        for model in () if options.summary else options.models:
            asyncio.run(study.serve(model))
            if "outlines" in options.arms:
                study.outlines(model)
    except (TargetError, openai.APIConnectionError) as error:
        print(f"benchmarks/structured_quality.py: error: {error}", file=sys.stderr)
        status = 1
    figures = summary(study.judged(), options.seed)
    for line in table(figures):
        print(line)
    if options.json:
        options.json.write_text(json.dumps({**report.surroundings([]), **figures}, indent=1) + "\n", encoding="utf-8")
    if options.page:
        page(options.page, figures, report.ROOT / "benchmarks" / "results")
    return status


if __name__ == "__main__":
    sys.exit(main())
