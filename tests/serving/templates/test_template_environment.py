"""What chat templates may do, and that none of them can hold the server up."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from penstock.serving.templates import environment as bounds
from penstock.serving.templates.environment import (
    MAX_OUTPUT_CHARS,
    Interruptible,
    TemplateEnvironment,
    TemplateTimeout,
    TemplateTooLarge,
    render_bounded,
)

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


def render(source: str, **variables: object) -> str:
    return render_bounded(TemplateEnvironment().from_string(source), variables)


def test_json_is_written_as_models_learned_it() -> None:
    assert render("{{ value | tojson }}", value={"b": "<é'>", "a": 1}) == '{"b": "<é\'>", "a": 1}'
    assert render("{{ value | tojson(indent=1, sort_keys=true) }}", value={"b": 2, "a": 1}) == '{\n "a": 1,\n "b": 2\n}'


def test_blocks_take_their_line_with_them() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\na\n{% endif %}\nb") == "a\nb"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    assert (
        render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "02"
    )
    assert render("a{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}c") == "abc"


def test_the_year_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_raise_exception_carries_its_message() -> None:
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ''['__class__']['__base__']['__subclasses__']() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% set x = messages.__class__ %}{{ x.__base__.__subclasses__() }}",
    ],
)
def test_what_could_reach_beyond_the_template_is_refused(source: str) -> None:
    with pytest.raises((SecurityError, jinja2.UndefinedError)):
        render(source, messages=[])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** (9 ** 9)) }}",
        "{{ 'ab' * 999999999999 }}",
        "{{ 999999999999 * [1, 2] }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% for i in range(1) %}{{ twice('x' * 30000000) }}{% endfor %}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a' | indent(9999999999, true) }}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{{ [1] | batch(9999999999, 'a') | list }}",
        "{{ 5 | round(-9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ ('\t' * 999999).expandtabs(999999) }}",
        "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ ('a' * 9999999) | replace('a', 'bbbbbbbbbb') }}",
        "{{ ('a' * 9999999).replace('a', 'bbbbbbbbbb') }}",
        "{{ (['a' * 9999999] * 9) | join }}",
        "{{ ''.join(['a' * 9999999] * 9) }}",
        "{{ ('a' * 9999999).translate({97: 'b' * 99}) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ ('f' * 99999) | int(base=16) % 7 }}",
        "{{ ('a' * 3000).join('b' * 300000) | length }}",
        "{{ ('a' * 30000).join(range(3000) | map('string')) | length }}",
        "{{ ('a' * 3000000).join(dict.fromkeys('abcdefghijklmn')) | length }}",
        "{{ ('a' * 1000000) | list | length }}",
        "{{ ('a' * 1000000) | sort | length }}",
        "{{ ('aa ' * 1000000).split() | length }}",
        "{{ ('aa ' * 1000000).split(' ') | length }}",
        "{{ ('aa\\n' * 1000000).splitlines() | length }}",
        "{{ ('a' * 1000000).encode('ascii', 'namereplace') | length }}",
        "{{ dict.fromkeys('a' * 1000000) | length }}",
    ],
)
def test_what_could_fill_memory_is_refused(source: str) -> None:
    with pytest.raises(TemplateTooLarge):
        render(source)


KEEPING = "{% set ns = namespace(x=[]) %}{% set a = 'a' * 3000000 %}{% for i in range(99999) %}%s{% endfor %}"


@pytest.mark.parametrize(
    "step",
    [
        "{% set ns.x = [ns.x, 'a' * 3000000] %}",
        "{% set ns.x = ns.x + [a ~ i] %}",
        "{% set ns.x = [ns.x, a[1:]] %}",
        "{% set ns.x = [ns.x, a | upper] %}",
        "{% set ns.x = [ns.x, [a] | map('upper') | list] %}",
        "{% set ns.x = [ns.x, a.upper()] %}",
        "{% set ns.x = [ns.x, range(99999) | list] %}",
        "{% set ns.x = [ns.x, ('aa,' * 99999).split(',')] %}",
        "{% set x %}{{ a }}{{ i }}{% endset %}{% set ns.x = [ns.x, x] %}",
        "{% set ns.x = (ns.x, {'a': 1, 'b': 2}) %}{{ range(99999) | list | length }}",
        "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}a{{ '' }}{% endfor %}{% endfor %}{% endset %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}a{% endfor %}{% endfor %}",
    ],
)
def test_what_all_operations_of_a_rendering_build_is_bounded(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_BUILT_BYTES", 2**24)
    with pytest.raises(TemplateTooLarge, match=r"^the template builds texts and lists of more than 16777216 bytes together$"):
        render(KEEPING.replace("%s", step))


NESTED = (
    "{% set ns = namespace(a=[1], b=[1], c=(1,)) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.c = (ns.c, ns.c) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "operation",
    [
        *("ns.a == ns.b", "ns.a < ns.b", "ns.a in [ns.b]", "ns.a is eq(ns.b)", "[ns.a] | select('eq', ns.b) | list"),
        *("[ns.a, ns.b] | sort", "[ns.a, ns.b] | map('list') | max", "[ns.c] | unique | list", "[[ns.a, 1], [ns.b, 1]] | groupby(0)"),
        *("[ns.a].index(ns.b)", "{}.get(ns.c)", "{}[ns.c]", "{ns.c: 1} | length", "ns.c in {}"),
        *("{'x': ns.a, 'y': ns.b} | dictsort(by='value')", "{'x': ns.a}.items() == {'x': ns.b}.items()"),
        "1 %}{% for i in [ns.a, ns.b] %}{{ loop.changed(i) }}{% endfor %}{% set x = 1",
    ],
)
def test_comparing_and_hashing_what_holds_itself_many_times_is_refused(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_OUTPUT_CHARS", 2**16)
    with pytest.raises(TemplateTooLarge):
        render(NESTED + "{% set y = " + operation + " %}")


def test_comparisons_within_reason_work() -> None:
    source = "{{ a == b }}{{ a[0] < 2 and b }}{{ 1 in a }}{{ d[k] }}{{ {k: 1} == {'x': 1} }}{{ a is eq(b) }}{{ [3, 1] | sort }}"
    assert render(source, a=[1], b=[1], d={"x": 7}, k="x") == "True[1]True7TrueTrue[1, 3]"


def test_each_rendering_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_BUILT_BYTES", 2**20)
    template = TemplateEnvironment().from_string("{{ ('a' * 300000 ~ wait()) | length }}{{ ('a' * 300000) | length }}")
    half_way = threading.Barrier(2)

    def wait() -> str:
        half_way.wait(10)
        return ""

    with ThreadPoolExecutor() as threads:
        together = [threads.submit(render_bounded, template, {"wait": wait}) for _ in range(2)]
        assert [each.result() for each in together] == ["300000300000"] * 2
    for _ in range(9):
        assert render_bounded(template, {"wait": str}) == "300000300000"


def test_arithmetic_within_reason_works() -> None:
    assert render("{{ 2 ** 10 + 3 * 4 }}{{ 'ab' * 2 + 'c' }}{{ [1] + [2] }}{{ 2 ** -1 }}{{ 1.5 * 2 }}") == "1036ababc[1, 2]0.53.0"
    assert MAX_OUTPUT_CHARS > 16 * 2**20


def test_what_templates_do_with_text_within_reason_works() -> None:
    assert render("{{ 'a' ~ 1 ~ none }}|{% set x %}b{{ 2 }}{% endset %}{{ x }}|{{ ['a', 1] | join('-') }}") == "a1None|b2|a-1"
    assert (
        render("{{ [{'k': 'a'}, {'k': 'b'}] | join(', ', attribute='k') }}|{{ 'aXa' | replace('a', 'bc') | replace('b', '', 1) }}")
        == "a, b|cXbc"
    )
    assert render("{{ '%s is %05.1f' | format('pi', 3.14) }}|{{ '%(a)s' | format(a=1) }}|{{ '%d%%' % 7 }}") == "pi is 003.1|1|7%"
    assert (
        render("{{ '{:>4}'.format(1700000000) }}|{{ 'a'.ljust(3) }}|{{ 'a' | center(3) }}|{{ 'a\nb' | indent(2) }}")
        == "1700000000|a  | a |a\n  b"
    )
    assert (
        render("{{ 'a-b'.replace('-', '+') }}|{{ ', '.join(['a', 'b']) }}|{{ 7 % 4 }}|{{ 7 // 2 }}|{{ 1.25 | round(1) }}")
        == "a+b|a, b|3|3|1.2"
    )


def test_an_endless_template_can_be_interrupted_and_its_thread_goes_on() -> None:
    call = Interruptible()
    outcome: list[str] = []

    def work() -> None:
        try:
            call.run(lambda: render(ENDLESS))
        except TemplateTimeout:
            outcome.append("interrupted")
        outcome.append(render("{{ 'well' }}"))

    thread = threading.Thread(target=work)
    thread.start()
    while call._thread_id is None:
        time.sleep(0.001)
    call.interrupt()
    thread.join()
    assert outcome == ["interrupted", "well"]


def test_an_interrupt_before_the_start_keeps_the_call_from_starting() -> None:
    call = Interruptible()
    call.interrupt()
    with pytest.raises(TemplateTimeout):
        call.run(lambda: pytest.fail("it ran"))


def test_an_interrupt_after_the_end_has_no_effect() -> None:
    call = Interruptible()
    assert call.run(lambda: 1) == 1
    call.interrupt()
    assert sum(range(10_000)) == 49_995_000


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_nothing_is_left_pending_once_a_call_is_over(is_interrupted: bool) -> None:
    """Where something were, Python 3.11 would never get past the first step of the traced function."""
    script = f"""
import contextlib, sys
from penstock.serving.templates.environment import Interruptible, TemplateTimeout
call = Interruptible()
with contextlib.suppress(TemplateTimeout):
    call.run(call.interrupt if {is_interrupted} else list)
sys.settrace(lambda frame, event, argument: None)
print((lambda: "through")())
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout == "through\n"
