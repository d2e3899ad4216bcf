"""A reasoning format as a plug-in in one file: `penstock --plugin examples/bracket_thoughts.py`."""

from penstock import Register, ThinkFormat, hookimpl

BRACKETS = ThinkFormat(models="models that think in brackets", start="[[", end="]]", switches=("thinking",), prompt_tail="[[")


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("bracket_thoughts", BRACKETS)
