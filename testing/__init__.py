"""The checks that plug-ins must pass, and walks through grammars. Needs `hypothesis`, and works in any test runner.

from penstock.testing import check_parser

def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    check_parser(MyParser, ["<mine>why</mine>because"], markers=["<mine>", "</mine>"])
"""

from penstock.testing.grammar_walks import accepts, allowed_tokens, byte_vocabulary, random_answer
from penstock.testing.logits_processor_check import check_logits_processor
from penstock.testing.parser_check import check_cost, check_parser, join_atoms, merged, read, split_atoms
from penstock.testing.tool_format_check import check_tool_format

__all__ = [
    "accepts",
    "allowed_tokens",
    "byte_vocabulary",
    "check_cost",
    "check_logits_processor",
    "check_parser",
    "check_tool_format",
    "join_atoms",
    "merged",
    "random_answer",
    "read",
    "split_atoms",
]
