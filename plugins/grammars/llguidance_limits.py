"""What one grammar may cost in llguidance."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


def parser_limits() -> "LLParserLimits":
    """Errors do not quote the grammar, which is the client's."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)
