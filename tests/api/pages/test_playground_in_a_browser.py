"""The playground in a real browser, against servers whose engine says given texts. `.ci/run` asks for these: `-m browser`."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api.app import build_app
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.context import Workers
from penstock.serving.options import ServerOptions
from tests.api.pages.browser import CHROMIUM, Browser, Page, chromium
from tests.api.pooling.server import pooling_server
from tests.api.running_server import CountingEngine
from tests.api.scripted import CancellingServer, RecordingCompiler, byte_tokenizer, scripted_context

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
MARKUP = "<img src=x onerror=\"document.title = 'broken into'\"><b>bold</b>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'
IDLE = "!document.body.classList.contains('running')"


@dataclass
class Playground:
    """A server with scripted answers, and the browser to open its page in."""

    browser: Browser
    url: str
    engine: CountingEngine
    compiler: RecordingCompiler

    def open(self, **options: Any) -> AbstractAsyncContextManager[Page]:
        return self.browser.page(self.url, **options)

    def prompt(self, index: int = -1) -> str:
        """What the engine was asked to continue."""
        return self.engine.tokenizer.decode(list(self.engine.requests[index].prompt_token_ids), skip_special_tokens=False)


Scenario = Callable[[Playground], Awaitable[None]]


@pytest.fixture(scope="module")
def browsing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Browser]]:
    """One browser for all tests here, on the loop that they run on."""
    with asyncio.Runner() as runner:
        opened = chromium(tmp_path_factory.mktemp("profile"))
        yield runner, runner.run(opened.__aenter__())
        runner.run(opened.__aexit__(None, None, None))


@pytest.fixture
def browse(browsing: tuple[asyncio.Runner, Browser]) -> Callable[..., None]:
    """Runs a scenario; `answers` and the other arguments are those of `served`."""
    runner, browser = browsing

    def run(scenario: Scenario, *answers: str, **settings: Any) -> None:
        async def served_scenario() -> None:
            async with served(browser, *answers, **settings) as playground:
                await scenario(playground)

        runner.run(served_scenario())

    return run


@asynccontextmanager
async def served(
    browser: Browser, *answers: str, thinks: bool = False, compiles: bool = False, **settings: Any
) -> AsyncIterator[Playground]:
    """The model reasons where it `thinks`; where it `compiles`, constraints are compiled by real backends. `settings` are the context's."""
    engine, recording = CountingEngine(byte_tokenizer(), list(answers or ("Hello there.",))), RecordingCompiler()
    with Workers() as workers:
        defaults = {"reasoning_parser": FORMATS["deepseek_r1"] if thinks else None, "tool_parser": HERMES, "max_model_len": 100_000}
        context = scripted_context(engine, recording, workers, **defaults | settings)
        if compiles:
            vocab_size = engine.tokenizer.vocab_size
            context = replace(
                context, grammar_compiler=GrammarCompiler(Plugins.start([]).grammar_backends, engine.tokenizer, vocab_size, [0])
            )
        async with CancellingServer(build_app(context)) as server:
            yield Playground(browser, str(server.make_url("/")), engine, recording)
        if compiles:
            context.grammar_compiler.close()


async def ask(page: Page, text: str) -> None:
    """Sends a message by the keyboard and waits for the whole answer."""
    await begin(page, text)
    await page.wait_for(IDLE)


async def begin(page: Page, text: str) -> None:
    await page.wait_for("!document.getElementById('chat').hidden")
    await page.fill("#draft", text)
    await page.press("Enter", control=True)
    await page.wait_for("document.getElementById('draft').value === ''")


async def unfold(page: Page, title: str) -> None:
    """Opens one section of the settings."""
    await page.wait_for("!document.getElementById('panel').hidden")
    sections = "[...document.querySelectorAll('#panel > details')]"
    await page.evaluate(f"{sections}.find((it) => it.firstElementChild.textContent.startsWith({json.dumps(title)})).open = true")


def test_an_answer_is_shown_while_it_is_written(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        playground.engine.gate, playground.engine.gate_step = asyncio.Event(), 5
        async with playground.open() as page:
            await begin(page, "Hi")
            await page.wait_for_text(".assistant .content", "Hello")
            assert await page.text(".assistant .content") == "Hello"
            assert await page.evaluate("document.getElementById('send').hidden && !document.getElementById('stop').hidden")
            playground.engine.gate.set()
            await page.wait_for(IDLE)
            assert await page.text(".assistant .content") == "Hello there."
            stats = await page.text(".assistant .stats")
            assert "ms to first token" in stats
            assert "tokens/s · 12 tokens" in stats
            assert await page.text(".user .content") == "Hi"

    browse(scenario)


@pytest.mark.parametrize("by_key", [True, False])
def test_a_stopped_answer_is_aborted_and_stays(browse: Callable[..., None], by_key: bool) -> None:
    async def scenario(playground: Playground) -> None:
        playground.engine.gate, playground.engine.gate_step = asyncio.Event(), 5
        async with playground.open() as page:
            await begin(page, "Hi")
            await page.wait_for_text(".assistant .content", "Hello")
            await (page.press("Escape") if by_key else page.click("#stop"))
            await page.wait_for(IDLE)
            assert [await playground.engine.happenings.get() for _ in range(2)] == ["begun", "aborted"]
            assert await page.text(".assistant .content") == "Hello"
            assert "stopped" in await page.text(".assistant .stats")

    browse(scenario)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_folded_and_timed(browse: Callable[..., None], field: Any) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await ask(page, "The capital?")
            assert await page.text(".assistant .content") == "Paris."
            assert await page.evaluate("document.querySelector('.fold').open") is False
            assert (await page.text(".fold summary")).startswith("Thought for 0.")
            await page.click(".fold summary")
            assert "It must be in France." in await page.text(".reasoning")
            await ask(page, "Sure?")
            assert "It must be in France." not in playground.prompt()

    browse(scenario, "<think>\nIt must be in France.\n</think>\n\nParis.", thinks=True, options=ServerOptions(reasoning_field=field))


def test_messages_are_edited_deleted_and_answered_again(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await page.wait_for("!document.getElementById('chat').hidden")
            await page.fill("#system-prompt", "Be brief.")
            await ask(page, "One?")
            playground.engine.answers = ["Second."]
            await ask(page, "Two?")
            turns = (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nHello there.<|im_end|>\n"
            )
            assert playground.prompt() == f"{turns}<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"

            await page.click(".user .actions button")
            await page.fill(".editor", "Edited?")
            await page.press("Enter", control=True)
            await page.click(".user .actions button:nth-child(2)")
            await page.wait_for(f"{IDLE} && document.querySelectorAll('.assistant').length === 1")
            assert playground.prompt().endswith("<|im_start|>user\nEdited?<|im_end|>\n<|im_start|>assistant\n")
            assert await page.text(".assistant .content") == "Second."

            playground.engine.answers = ["Third."]
            await page.click(".assistant .actions button:nth-child(2)")
            await page.wait_for_text(".assistant .content", "Third.")
            await page.wait_for(IDLE)
            await page.click(".assistant .actions button:last-child")
            await page.wait_for("document.querySelectorAll('.entry').length === 2")
            assert len(playground.engine.requests) == 4

    browse(scenario)


def test_a_call_is_shown_and_its_result_is_sent_back(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await unfold(page, "Tools")
            await page.click("#tools-example")
            assert await page.evaluate("[...document.getElementById('tool-choice').options].map((it) => it.value)") == [
                "auto",
                "required",
                "none",
                "get_weather",
            ]
            await ask(page, "The weather in Lisbon?")
            assert await page.text(".call h3 code") == "get_weather"
            assert json.loads(await page.text(".call pre")) == {"city": "Lisbon"}
            playground.engine.answers = ["It is sunny."]
            await page.fill(".call textarea", "18 degrees, sun")
            await page.click(".calls > button")
            await page.wait_for_text("#entries", "It is sunny.")
            await page.wait_for(IDLE)
            assert "18 degrees, sun" in playground.prompt()
            assert "Lisbon" in playground.prompt()

    browse(scenario, CALL)


@pytest.mark.parametrize(
    ("schema", "is_strict", "kind", "words"),
    [
        ('{"type": "object", "properties": {"a": {"type": "integer"}}}', True, "exact", "every keyword is enforced"),
        ('{"properties": {"a": {"pattern": "^(?=.*a)b$"}}}', True, "refused", "$.properties.a.pattern"),
        ('{"properties": {"a": {"pattern": "^(?=.*a)b$"}}}', False, "lenient", "pattern"),
        ('{"type": ', True, "refused", "Not JSON"),
        ("[]", True, "refused", "must be a JSON Schema"),
    ],
)
def test_a_schema_has_a_verdict_as_it_is_typed(browse: Callable[..., None], schema: str, is_strict: bool, kind: str, words: str) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await unfold(page, "Schema")
            if not is_strict:
                await page.click("#strict")
            await page.fill("#schema", schema)
            await page.wait_for(f"document.querySelector('#verdict .{kind}')")
            assert words in await page.text("#verdict")
            await page.fill("#schema", "")
            await page.wait_for("document.getElementById('verdict').innerText === ''")

    browse(scenario, compiles=True)


@pytest.mark.parametrize(
    ("warnings", "answer", "kind", "words"),
    [
        ((), '{"a": 1}', "exact", "Conforms: the whole schema was enforced"),
        (("`x` at $",), '{"a": 1}', "exact", "Conforms to the schema"),
        (("`x` at $",), '{"a": "b"}', "refused", "$.a"),
    ],
)
def test_a_constrained_answer_says_whether_it_conforms(
    browse: Callable[..., None], warnings: tuple[str, ...], answer: str, kind: str, words: str
) -> None:
    async def scenario(playground: Playground) -> None:
        playground.compiler.warnings = warnings
        async with playground.open() as page:
            await unfold(page, "Schema")
            await page.click("#strict")
            await page.fill("#schema", '{"properties": {"a": {"type": "integer"}}}')
            await page.click("#constrain")
            await ask(page, "A number?")
            assert await page.text(".assistant .content") == answer
            assert words in await page.text(f".assistant .{kind}")
            assert playground.compiler.specs[-1][0].param == "response_format.json_schema.schema"

    browse(scenario, answer)


def test_tokens_show_their_alternatives_under_the_pointer_and_the_focus(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await unfold(page, "Sampling")
            await page.click("#logprobs")
            await page.fill("#top_logprobs", "3")
            await ask(page, "Hi")
            assert await page.evaluate("[...document.querySelectorAll('.tokens span')].map((it) => it.textContent)") == ["a", "b", "", "é"]
            shades = await page.evaluate("[...document.querySelectorAll('.tokens span')].map((it) => it.style.getPropertyValue('--doubt'))")
            assert shades == ["0.777"] * 4
            await page.click(".tokens span:nth-child(2)")
            rows = "[...document.querySelectorAll('#token-info tr')].map((it) => it.innerText.split(/\\s+/).filter(Boolean))"
            assert await page.evaluate(rows) == [["c", "77.9%"], ["b", "22.3%"], ["d", "<0.01%"]]
            assert await page.text("#token-info .chosen th") == "b"
            await page.evaluate("document.querySelector('.tokens span').focus()")
            assert await page.text("#token-info .chosen th") == "a"
            await page.press("ArrowRight")
            assert await page.text("#token-info .chosen th") == "b"
            await page.press("Escape")
            assert await page.evaluate("document.getElementById('token-info').hidden")

    browse(scenario, "abé")


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await page.wait_for("document.getElementById('key-dialog').open")
            for key in ("wrong", "right key"):
                await page.wait_for("document.getElementById('key-dialog').open")
                await page.fill("#key", key)
                await page.press("Enter")
            assert await page.evaluate("document.getElementById('key-dialog').open"), "a key with a blank cannot be sent"
            await page.fill("#key", "right")
            await page.press("Enter")
            await ask(page, "Hi")
            assert await page.text(".assistant .content") == "Hello there."
            await page.wait_for("!document.getElementById('gauges').hidden")
            await unfold(page, "Request")
            await page.wait_for_text("#snippet", "$PENSTOCK_API_KEY")
            kept = "JSON.stringify([{ ...localStorage }, location.href, document.cookie, document.documentElement.outerHTML])"
            assert "right" not in (await page.evaluate(kept)).replace("ArrowRight", "")
            assert await page.evaluate("Object.values(sessionStorage)") == ["right"]

        async with playground.open() as page:
            await page.wait_for("document.getElementById('key-dialog').open")
            assert await page.evaluate("sessionStorage.length") == 0

    browse(scenario, options=ServerOptions(api_keys=("right",)))


def test_a_question_for_the_key_that_is_cancelled_says_so(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await page.wait_for("document.getElementById('key-dialog').open")
            await page.press("Escape")
            await page.wait_for_text("#welcome", "asks for an API key")

    browse(scenario, options=ServerOptions(api_keys=("right",)))


def test_the_colours_are_the_systems_until_others_are_chosen(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open(is_dark=True) as page:

            async def lightness() -> int:
                colour: str = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
                return int(colour.removeprefix("rgb(").split(",")[0])

            assert await lightness() < 64
            await page.emulate_dark(False)
            assert await lightness() > 192
            await page.click("#theme")
            assert await lightness() < 64
            await page.send("Page.reload")
            await page.wait_for("document.readyState === 'complete' && document.documentElement.dataset.theme === 'dark'")
            assert await lightness() < 64

    browse(scenario)


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
WIDE = f"```python\nprint({'x' * 200!r})\n```\n\n{'y' * 200} {CALL}"


# What is cut by the window, but for what scrolls in itself.
WIDER = """[...document.querySelectorAll('body *')].filter((it) => it.checkVisibility() && !it.closest('pre *, table *, .unseen')
    && it.getBoundingClientRect().right > innerWidth + 1)"""


def test_nothing_is_wider_than_a_phone(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open(width=375, height=700) as page:

            async def check() -> None:
                assert await page.evaluate(f"{WIDER}.map((it) => it.outerHTML.slice(0, 80))") == []
                assert await page.evaluate("document.documentElement.scrollWidth") <= 375
                assert await page.evaluate("document.getElementById('scroll').scrollWidth") <= 375

            await page.wait_for("!document.getElementById('gauges').hidden")
            await page.evaluate(f"document.getElementById('tools').value = {json.dumps(json.dumps(TOOLS))}")
            await ask(page, "z" * 100)
            await page.wait_for("document.querySelector('.call')")
            await check()
            await page.click("#open-panel")
            for title in ("Sampling", "Tools", "Schema", "Request"):
                await unfold(page, title)
            await page.click("#schema-example")
            await check()
            await page.click("#close-panel")
            assert await page.evaluate("document.activeElement.id") == "open-panel"

    browse(scenario, WIDE)


def test_what_the_model_writes_is_never_markup(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await unfold(page, "Tools")
            await page.fill("#tools", json.dumps([{"type": "function", "function": {"name": MARKUP}}]))
            await ask(page, MARKUP)
            assert MARKUP in await page.text(".user .content")
            assert MARKUP in await page.text(".assistant .content")
            assert MARKUP in await page.text(".call h3")
            assert await page.evaluate("document.querySelector('.reasoning').textContent") == MARKUP
            await page.evaluate("document.getElementById('logprobs').click()")
            await ask(page, MARKUP)
            assert await page.evaluate("document.querySelectorAll('main img, main b').length") == 0
            assert "broken into" not in await page.evaluate("document.title")

    call = f"<tool_call>{json.dumps({'name': MARKUP, 'arguments': {'a': MARKUP}})}</tool_call>"
    browse(scenario, f"<think>{MARKUP}</think>{MARKUP}\n\n```\n{MARKUP}\n```\n{call}", thinks=True)


def test_the_gauges_show_what_the_server_measures(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await page.wait_for("!document.getElementById('gauges').hidden")
            shown = "[...document.querySelectorAll('#gauges dd')].map((it) => it.innerText)"
            assert await page.evaluate(shown) == ["2", "1", "25%", "40%", "50%"]

    browse(scenario)


@pytest.mark.parametrize("language", ["curl", "python"])
def test_the_copied_request_works(browse: Callable[..., None], language: str) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await playground.browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
            await page.evaluate("sessionStorage.setItem('penstock-api-key', 'secret')")
            await page.reload()
            await page.wait_for("!document.getElementById('chat').hidden")
            for title in ("Sampling", "Tools", "Request"):
                await unfold(page, title)
            await page.click("#tools-example")
            await page.fill("#temperature", "0.5")
            await page.fill("#thinking_token_budget", "7")
            await page.fill("#stop-strings", 'it\'s\n"over"')
            await page.fill("#draft", 'It\'s "quoted", $HOME `id` and\n\\n ü 🦉')
            await page.evaluate(f"document.getElementById('language').value = '{language}'")
            await page.evaluate("document.getElementById('language').dispatchEvent(new Event('input', { bubbles: true }))")
            await page.click("#copy")
            await page.wait_for_text("#copy", "Copied")
            copied = await page.evaluate("document.getElementById('snippet').textContent")
            assert "secret" not in copied
            command = ["bash", "-c", copied.replace("curl ", "curl -s ", 1)] if language == "curl" else [sys.executable, "-c", copied]
            environment = os.environ | {"PENSTOCK_API_KEY": "secret"}
            ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=environment, check=True)
            assert "Hello there." in ran.stdout
            params = playground.engine.requests[0].params
            assert (params.temperature, params.thinking_token_budget, params.stop) == (0.5, 7, ("it's", '"over"'))
            assert 'It\'s "quoted", $HOME `id` and\n\\n ü 🦉<|im_end|>' in playground.prompt()
            assert "get_weather" in playground.prompt()

    browse(scenario, "</think>Hello there.", thinks=True, options=ServerOptions(api_keys=("secret",)))


def test_an_error_is_shown_with_the_path_of_its_field(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            await unfold(page, "Tools")
            await page.fill("#tools", '[{"type": "function", "function": {"name": ""}}]')
            await ask(page, "Hi")
            assert await page.text(".assistant [role=alert] code") == "tools[0].function.name"
            await page.fill("#tools", "[")
            await page.fill("#draft", "Again")
            await page.press("Enter", control=True)
            await page.wait_for("document.activeElement.id === 'tools'")
            assert await page.evaluate("document.getElementById('draft').value") == "Again"
            assert "not JSON" in await page.text("#tools-error")
            await page.fill("#tools", "")
            await ask(page, "Again")
            assert await page.text(".entry:last-child .content") == "Hello there."
            assert playground.prompt().count("assistant") == 1, "an answer that failed is no part of the conversation"

    browse(scenario)


def test_an_answer_whose_step_fails_ends_with_the_error(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        playground.engine.failure = "the step ran out of memory"
        async with playground.open() as page:
            await ask(page, "Hi")
            assert "the step ran out of memory" in await page.text(".assistant [role=alert]")
            assert await page.text(".assistant .content") == "He"

    browse(scenario)


def test_code_blocks_stay_whole_however_the_stream_is_cut(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        async with playground.open() as page:
            for tokens_per_step in (1, 2, 3, 7, 100):
                playground.engine.tokens_per_step = tokens_per_step
                await ask(page, "Hi")
                blocks = await page.evaluate(
                    "[...document.querySelector('.entry:last-child .content').children].map((it) => [it.tagName, it.textContent])"
                )
                assert blocks == [["P", "Before `it`:\n"], ["PRE", "a\n\n``b``\n"], ["P", "``x\n"], ["P", "After\n"], ["PRE", "open"]]

    browse(scenario, "Before `it`:\n```py\na\n\n``b``\n```\n``x\n\nAfter\n\n~~~\nopen")


def test_a_long_answer_is_complete_and_moves_nothing_above_it(browse: Callable[..., None]) -> None:
    async def scenario(playground: Playground) -> None:
        playground.engine.tokens_per_step = 40
        async with playground.open() as page:
            await page.evaluate(
                "window.moved = new Set(); new PerformanceObserver((list) => list.getEntries().forEach((shift) =>"
                "shift.sources.forEach((source) => moved.add(source.node.className)))).observe({ type: 'layout-shift' })"
            )
            await ask(page, "Go on")
            assert await page.evaluate("document.querySelector('.assistant .content').textContent.length") == len(
                LONG.replace("\n\n", "\n")
            )
            assert set(await page.evaluate("[...moved]")) <= {"stats", "actions"}, "what is below the answer may move"
            assert (
                await page.evaluate(
                    "(() => { const it = document.getElementById('scroll'); return it.scrollHeight - it.scrollTop - it.clientHeight; })()"
                )
                < 2
            )

    browse(scenario, LONG)


LONG = "A line of some words.\nAnother line.\n\n" * 800


def test_an_embedding_model_compares_texts(browsing: tuple[asyncio.Runner, Browser], embedder: Path) -> None:
    runner, browser = browsing

    async def run() -> None:
        async with pooling_server(embedder) as server, browser.page(server.url) as page:
            await page.wait_for_text("#pooling", "An embedding model")
            await page.fill("#texts", "one\ntwo")
            await page.click("#pooling-form button")
            await page.wait_for("document.querySelectorAll('.shaded').length === 4")
            assert await page.text(".shaded") == "1.000"
            await page.wait_for("!document.getElementById('gauges').hidden")
            assert await page.text("#gauges") == "Running\n0\nWaiting\n0"

    runner.run(run())


def test_a_cross_encoder_scores_texts(browsing: tuple[asyncio.Runner, Browser], cross_encoder: Path) -> None:
    runner, browser = browsing

    async def run() -> None:
        async with pooling_server(cross_encoder) as server, browser.page(server.url) as page:
            await page.wait_for_text("#pooling", "A cross-encoder")
            await page.fill("#query", "one")
            await page.fill("#texts", "one\ntwo\nthree")
            await page.click("#pooling-form button")
            await page.wait_for("document.querySelectorAll('.shaded').length === 3")

    runner.run(run())


def test_a_classifier_classifies_texts(browsing: tuple[asyncio.Runner, Browser], classifier: Path) -> None:
    runner, browser = browsing

    async def run() -> None:
        async with pooling_server(classifier) as server, browser.page(server.url) as page:
            await page.wait_for_text("#pooling", "A classifier")
            await page.fill("#texts", "one\ntwo")
            await page.click("#pooling-form button")
            await page.wait_for("document.querySelectorAll('.shaded').length === 2")

    runner.run(run())
