"""Templates that come in requests are rendered where they can take neither the server's memory nor its time."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.system.sandbox import Limits
from penstock.serving.context import ModelContext
from penstock.serving.options import ServerOptions
from penstock.serving.prompts import RESERVED_KWARGS
from penstock.serving.templates import rendering
from penstock.serving.templates.environment import TemplateTooLarge, render_bounded
from penstock.serving.templates.rendering import (
    NUM_SANDBOX_PROCESSES,
    SANDBOX_LIMITS,
    ChatTemplate,
    compile_template,
    render_prompt,
    template_sandbox,
)
from tests.api.running_server import CHAT, Running, serve, until

USER = {"role": "user", "content": "Hello"}
TRUSTED = ServerOptions(trust_request_chat_template=True)
HOSTILE = {
    "a list of one text": "{{ ['a'*1000000]*2000 }}",
    "a mapping of one": "{% set x = {'a':['b'*1000000]*2000} %}{{ x }}",
    "indent": "{{ ('a\n'*3000000)|indent(1000) }}",
    "widths": "{{ ('{:9999999}'*300).format(*([1]*300)) }}",
    "fields": "{{ ('{0}'*2000).format('a'*1000000) }}",
    "percent": "{{ ('%9999999d'*300) % ((1,)*300) }}",
    "strftime": "{{ strftime_now('%255Y'*1000000) }}",
    "sum": "{{ ([[1]*1000000]*300)|sum(start=[]) }}",
    "tojson": "{{ (['a'*1000000]*2000)|tojson }}",
    "pprint": "{{ (['a'*1000000]*2000)|pprint }}",
    "indent by a text": "{{ ('a\n'*3000000)|indent('b'*1000000) }}",
    "kept": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + ['a'*30000000] %}{% endfor %}",
    "kept apart": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + ['a'*3000000 ~ i] %}{% endfor %}",
}
KEPT = {"kept", "kept apart"}  # in pieces, each of which is small enough
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", pytest.param("/tokenize", marks=pytest.mark.thorough)])
def test_a_hostile_template_is_a_400_that_names_it(path: str) -> None:
    async def scenario(server: Running) -> None:
        answers = await asyncio.gather(*(server.post(path, CHAT | {"chat_template": source}) for source in HOSTILE.values()))
        assert [(status, body["error"]["param"]) for status, body in answers] == [(400, "chat_template")] * len(HOSTILE)
        assert (await server.post(path, CHAT | {"chat_template": "{{ messages[0].content }}"}))[0] == 200

    serve(scenario, TRUSTED)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_operations_are_bounded_in_the_servers_process_too(name: str) -> None:
    with pytest.raises(TemplateTooLarge):
        render_bounded(compile_template(HOSTILE[name]), {"messages": [USER]})


@pytest.mark.parametrize("source", [HOSTILE[name] for name in sorted(KEPT)])
def test_what_a_template_keeps_is_bounded_by_its_process(source: str) -> None:
    template = ChatTemplate("the model's own", sandbox=template_sandbox(replace(SANDBOX_LIMITS, memory_bytes=2**26)))
    with pytest.raises(InvalidRequest, match=r"^rendering the chat template took more than 64 MiB of memory$") as refusal:
        template.render([USER], template=source)
    assert refusal.value.param == "chat_template"
    template.close()


def test_an_endless_template_is_bounded_by_cpu_time() -> None:
    template = ChatTemplate("the model's own", sandbox=template_sandbox(Limits(cpu_seconds=0.3)))
    with pytest.raises(InvalidRequest, match=r"^rendering the chat template took more than 0\.3 s of CPU time$") as refusal:
        template.render([USER], template=ENDLESS)
    assert refusal.value.param == "chat_template"
    assert (template.render([USER], template="fine")).text == "fine"
    template.close()


def test_the_processes_of_templates_have_a_limit_on_their_memory() -> None:
    template = ChatTemplate("the model's own")
    template.render([USER], template="fine")
    (process,) = map(psutil.Process, template.sandbox.pids)
    at_most = process.memory_info().vms + SANDBOX_LIMITS.memory_bytes
    assert process.rlimit(psutil.RLIMIT_AS)[0] <= at_most
    template.close()


def test_a_template_of_a_request_is_never_compiled_in_the_servers_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Running) -> None:
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Z\u00fcrich", "n": 1180591620717411303424}'},
        }
        history = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "sunny"}, USER]
        source = "{% for m in messages %}[{{ m.content }}{{ m.tool_calls[0].function.arguments if m.tool_calls }}]{% endfor %}{{ style }}"
        body = CHAT | {"messages": history, "tools": [tool], "chat_template_kwargs": {"style": 2**70}, "return_token_strs": True}
        _, here = await server.post("/tokenize", body | {"chat_template": source})
        with_own = replace(server.context.chat_template, source=source)
        monkeypatch.setattr(rendering, "compile_template", lambda source: pytest.fail("compiled"))
        status, there = await server.post("/tokenize", body | {"chat_template": source})
        monkeypatch.undo()
        server.context.chat_template = with_own
        assert status == 200
        assert there == here == (await server.post("/tokenize", body))[1]

    serve(scenario, TRUSTED)


@pytest.mark.parametrize(("options", "number"), [(TRUSTED, NUM_SANDBOX_PROCESSES), (ServerOptions(), 0)])
def test_the_processes_start_with_the_server_where_requests_may_bring_templates(options: ServerOptions, number: int) -> None:
    async def scenario(server: Running) -> None:
        ModelContext.warm_up(server.context)
        await until(lambda: len(server.context.chat_template.sandbox.pids) == number)
        server.context.chat_template.close()

    serve(scenario, options)


def test_others_are_answered_while_a_template_runs_which_ends_with_its_client() -> None:
    async def scenario(server: Running) -> None:
        sandbox = template_sandbox(Limits(cpu_seconds=600))
        server.context.chat_template = replace(server.context.chat_template, sandbox=sandbox)
        hanging = [asyncio.create_task(server.post("/tokenize", CHAT | {"chat_template": ENDLESS})) for _ in range(NUM_SANDBOX_PROCESSES)]
        await until(lambda: len(sandbox.pids) == NUM_SANDBOX_PROCESSES)
        for _ in range(3):
            assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        assert (await server.post("/tokenize", CHAT | {"chat_template": "fine"}))[0] == 200
        sandbox.close()

    serve(scenario, TRUSTED)


def test_a_template_whose_process_is_killed_from_outside_is_not_blamed() -> None:
    async def scenario(server: Running) -> None:
        sandbox = template_sandbox(Limits(cpu_seconds=600))
        server.context.chat_template = replace(server.context.chat_template, sandbox=sandbox)
        async with server.http.post("/tokenize", json=CHAT | {"chat_template": "fine"}) as response:
            assert response.status == 200
        hanging = asyncio.create_task(server.http.post("/tokenize", json=CHAT | {"chat_template": ENDLESS}).__aenter__())
        while not hanging.done():
            for pid in sandbox.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        response = await hanging
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        response.close()
        sandbox.close()

    serve(scenario, TRUSTED)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|map('upper') }}",
        "{{ raise_exception }}",
        "{{ [{'a': (raise_exception,)}] }}",
        "{{ raise_exception ~ '' }}",
        "{{ [raise_exception]|join }}",
        "{{ raise_exception|string }}",
        "{{ [raise_exception]|map('upper')|list }}",
        "{{ [raise_exception]|pprint }}",
        "{{ raise_exception|replace('a', 'b') }}",
        "{{ raise_exception|indent }}",
        "{{ '%s' % raise_exception }}",
        "{{ '%s'|format(raise_exception) }}",
        "{{ '{}'.format(raise_exception) }}",
        "{{ '{a}'.format_map({'a': raise_exception}) }}",
        "{{ 'a'.format }}",
        "{{ messages[0].items }}",
        "{{ cycler(1) }}",
        "{{ namespace(x=raise_exception) }}",
        "{{ raise_exception(raise_exception) }}",
        "{{ raise_exception(['x']|map('upper')|string) }}",
        "{{ ({}[raise_exception]).a }}",
        "{{ {'a': raise_exception}.items() }}",
        "{% macro m() %}{{ caller }}{% endmacro %}{% call m() %}{% endcall %}{{ raise_exception }}",
    ],
)
def test_no_address_of_the_heap_is_written(source: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render_prompt(source, [USER], {})
    assert "0x" not in refusal.value.message


def test_text_that_speaks_of_addresses_is_written_as_it_is() -> None:
    said = "<object object at 0x7f00> and more"
    source = "{{ messages[0].content }}{{ messages }}{{ [messages[0].content]|join }}{{ range(3) }}{{ messages[0].keys() }}"
    shown = render_prompt(source, [{"role": "user", "content": said}], {}).text
    assert shown == f"{said}{[{'role': 'user', 'content': said}]}{said}range(0, 3)dict_keys(['role', 'content'])"


def test_a_templates_own_message_is_cut() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render_prompt("{{ raise_exception('a' * 30000000) }}", [USER], {})
    assert len(refusal.value.message) < 1100


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_names_that_a_template_gets_from_the_server_are_listed_where_one_is_given(name: str) -> None:
    async def scenario(server: Running) -> None:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, body = await server.post(path, CHAT | {"chat_template_kwargs": {name: 1}})
            assert (status, body["error"]["param"]) == (400, f"chat_template_kwargs.{name}")
            assert all(other in body["error"]["message"] for other in RESERVED_KWARGS)
            assert "()" not in body["error"]["message"]

    serve(scenario)
