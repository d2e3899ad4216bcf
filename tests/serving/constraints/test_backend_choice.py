from typing import Any

import msgspec
import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.requests import GenerationFields
from penstock.serving.structured_outputs import chosen_backend

KNOWN = ("llguidance", "outlines_core", "mine")


def chosen(**fields: Any) -> str | None:
    return chosen_backend(msgspec.convert(fields, GenerationFields), KNOWN)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (None, None),
        ("", None),
        ("auto", None),
        ("auto:no-fallback", None),
        ("mine", "mine"),
        ("guidance", "llguidance"),
        ("outlines", "outlines_core"),
        ("outlines_core:no-fallback,disable-any-whitespace,no-additional-properties", "outlines_core"),
    ],
)
def test_a_backend_is_named_in_either_place_in_our_words_or_vllms(written: str | None, name: str | None) -> None:
    assert chosen(guided_decoding_backend=written) == name
    assert chosen(structured_outputs={"backend": written}) == name
    assert chosen(guided_decoding_backend=written, structured_outputs={"backend": written}) == name


@pytest.mark.parametrize(
    "written", ["xgrammar", "lm-format-enforcer", "guidance:fast", "guidance:no-fallback-at-all", ":", "auto:" + "no-fallback," * 100]
)
def test_any_other_name_or_option_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen(structured_outputs={"backend": written})
    assert caught.value.param == "structured_outputs.backend"


def test_a_backend_that_is_not_installed_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(InvalidRequest, match=r"not installed: pip install \./examples/penstock-plugin-xgrammar"):
        chosen(guided_decoding_backend="xgrammar:no-fallback")
    assert chosen_backend(GenerationFields(guided_decoding_backend="xgrammar"), [*KNOWN, "xgrammar"]) == "xgrammar"


def test_a_plug_in_may_take_a_name_that_is_otherwise_an_alias() -> None:
    assert chosen_backend(GenerationFields(guided_decoding_backend="guidance"), ["llguidance", "guidance"]) == "guidance"
