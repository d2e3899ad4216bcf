"""The playground's files as they are served; tests/api/pages/test_playground_in_a_browser.py uses them."""

import re

import pytest

from penstock.api.pages.playground import FOLDER, page_files
from penstock.serving.options import ServerOptions
from tests.api.running_server import Running, serve

MAX_BYTES = 61_000
SCRIPTS = sorted(FOLDER.glob("*.js"))


def test_the_page_is_small() -> None:
    assert sum(len(file.body) for file in page_files().values()) <= MAX_BYTES


@pytest.mark.parametrize("accept", ["text/html,application/xhtml+xml,*/*;q=0.8", "*/*", "application/json"])
def test_the_page_is_at_the_root_whatever_a_client_accepts(accept: str) -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/", headers={"Accept": accept}) as response:
            assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
            assert "<title>Penstock</title>" in await response.text()

    serve(scenario)


def test_the_page_loads_only_files_that_are_served() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/") as response:
            paths = set(re.findall(r'(?:src|href)="([^"]+)"', await response.text()))
        assert {f"/{path}" for path in paths} <= set(page_files())
        for path, file in page_files().items():
            async with server.http.get(path) as response:
                assert (response.status, response.content_type) == (200, file.content_type)
                assert await response.read() == file.body

    serve(scenario)


def test_nothing_but_the_pages_own_files_can_run_in_it() -> None:
    async def scenario(server: Running) -> None:
        for path in page_files():
            async with server.http.get(path) as response:
                policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
                assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"

    serve(scenario)


def test_a_browser_that_has_a_file_gets_it_again_only_when_it_has_changed() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/playground/main.js") as response:
            etag = response.headers["ETag"]
            assert response.headers["Cache-Control"] == "no-cache"
        for known, status in [(etag, 304), (f"W/{etag}", 304), ('"older"', 200)]:
            async with server.http.get("/playground/main.js", headers={"If-None-Match": known}) as response:
                assert (response.status, response.headers["ETag"]) == (status, etag)
                assert bool(await response.read()) == (status == 200)

    serve(scenario)


def test_the_page_needs_no_key_and_its_calls_do() -> None:
    async def scenario(server: Running) -> None:
        for path in page_files():
            async with server.http.get(path) as response:
                assert response.status == 200
        for path in ("/playground", "/playground/", "/v1/models", "/metrics"):
            assert (await server.get(path))[0] == 401
        assert (await server.post("/v1/grammar/check", {"guided_json": {}}))[0] == 401

    serve(scenario, ServerOptions(api_keys=("secret",)))


def test_models_say_what_they_do() -> None:
    async def scenario(server: Running) -> None:
        _, models = await server.get("/v1/models")
        assert [card["tasks"] for card in models["data"]] == [["generate"], ["generate"]]

    serve(scenario)


def test_the_page_can_be_turned_off() -> None:
    async def scenario(server: Running) -> None:
        for path in page_files():
            assert (await server.get(path))[0] == 404

    serve(scenario, ServerOptions(playground=False))


def test_a_server_with_a_key_and_without_the_page_does_not_say_what_is_there() -> None:
    async def scenario(server: Running) -> None:
        assert (await server.get("/"))[0] == 401

    serve(scenario, ServerOptions(playground=False, api_keys=("secret",)))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_no_script_reads_text_as_markup_or_as_code(script: str) -> None:
    text = FOLDER.joinpath(script).read_text(encoding="utf-8")
    assert not re.findall(r"\w*(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|setHTML\w*", text)


def test_every_setting_has_a_label() -> None:
    page = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    fields = re.findall(r'<(?:input|select|textarea)[^>]* id="([^"]+)"', page)
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', page))
    inside = set(re.findall(r'<label(?:(?!</label>).)*<(?:input|select|textarea)[^>]* id="([^"]+)"', page))
    named = set(re.findall(r'<select[^>]* id="([^"]+)"[^>]* aria-label=', page))
    assert len(fields) > 10
    assert set(fields) <= labelled | inside | named
