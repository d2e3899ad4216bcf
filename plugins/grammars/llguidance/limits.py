"""What one grammar may cost in llguidance.

Measured on two shared cores with 49,152 tokens: with these limits a hostile grammar takes up to a second to compile, one mask some
tens of milliseconds, and the lexer 50 MB; the schemas of a public collection of 200, which take up to 0.1 s, all stay within them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Each takes four items in a row of the parser; the time to compile grows with their square.
MAX_OPTIONAL_PROPERTIES = 1500
MAX_ITEMS_IN_ROW = 2000  # of other grammars, which may begin a row with every character: 4 ms each

# Of the CPU, for what is done on the event loop. In an ambiguous grammar it grows with the third power of the text.
MAX_STEP_SECONDS = 0.01
TOO_SLOW = "a step of this grammar takes too long"


def parser_limits(*, is_schema: bool = False) -> "LLParserLimits":
    """Errors do not quote the grammar, which is the client's. Rows of a schema are long, but there are few of them."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4 * MAX_OPTIONAL_PROPERTIES + 1000 if is_schema else MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000 if is_schema else 50_000,
        max_lexer_states=25_000,  # of 1 to 2 kB, shared by all answers with one grammar; the collection's schemas need a tenth
        max_grammar_size=500_000,
        verbose_errors=False,
    )
