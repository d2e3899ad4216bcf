"""The files of examples/deploy, as tests read them."""

import os
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DIRECTORIES = {"%C": "/var/cache", "%S": "/var/lib"}  # of a unit of the system


def yaml_documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def manifest(path: str) -> dict[str, Any]:
    """A file of examples/deploy/kubernetes with a single document."""
    (document,) = yaml_documents(DEPLOY / "kubernetes" / path)
    return document


def compose() -> dict[str, Any]:
    """compose.yaml with its variables at their defaults, or `given` where they have none."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", re.sub(r"\$\{\w+:\?.*?\}", "given", text))
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile's last stage, with their arguments on one line."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    last = max(place for place, words in enumerate(lines) if words[0] == "FROM")
    return [(words[0], words[1]) for words in lines[last:]]


def image_environment() -> dict[str, str]:
    text = " ".join(argument for name, argument in dockerfile() if name == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", text.replace("$PATH", os.defpath)))


class Unit(dict[str, list[str]]):
    """The directives of a unit's section [Service]: all values of each, specifiers filled in."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        section = path.read_text(encoding="utf-8").split("[Service]\n")[1].split("\n[")[0]
        for line in section.splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                for specifier, directory in DIRECTORIES.items():
                    value = value.replace(specifier, directory)
                self.setdefault(name, []).append(value)

    @property
    def environment(self) -> dict[str, str]:
        return dict(value.split("=", 1) for value in self["Environment"])
