"""Templates that come in requests are rendered where they can take neither the server's memory nor its time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.api.context import ServerOptions
from penstock.api.templates.chat_template import SANDBOX_LIMITS, ChatTemplate, template_sandbox
from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.sandbox import Limits
from tests.api.running_server import CHAT, Running, serve

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
    "kept apart": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + ['a'*3000000 ~ i] %}{% endfor %}{{ ns.x }}",
}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


def peak_bytes(pid: int) -> int:
    """Of the address space."""
    with open(f"/proc/{pid}/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmPeak:"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_hostile_template_is_a_400_that_names_it_and_others_are_answered_meanwhile(path: str) -> None:
    async def scenario(server: Running) -> None:
        answers = await asyncio.gather(*(server.post(path, CHAT | {"chat_template": source}) for source in HOSTILE.values()))
        assert [(status, body["error"]["param"]) for status, body in answers] == [(400, "chat_template")] * len(HOSTILE)

    serve(scenario, TRUSTED)
