"""The routes against the OpenAPI document, by schemathesis: `scripts/test -m schemathesis`, which takes about a minute."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.api.running_server import Running, serve

pytestmark = pytest.mark.schemathesis

PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
OPTIONS = (
    *("--max-examples=30", "--seed=1", "--generation-database=none", "--no-color"),
    # A schema says less than the server checks: two fields may exclude each other, or a text be no template. And a path with a parameter
    # has the paths beside it as values, so that both take what either takes.
    "--exclude-checks=positive_data_acceptance,allow_header_conformance",
)


def test_no_route_fails_and_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    command = shutil.which("schemathesis", path=PATH)
    assert command is not None, "it is one of the packages of the extra `dev`"

    async def scenario(server: Running) -> None:
        arguments = ("run", f"{server.url}/openapi.json", *OPTIONS)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(command, *arguments, stdout=pipe, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path)
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-10_000:]

    serve(scenario)
