"""The checks that plug-ins must pass, and walks through grammars. Needs `hypothesis`, and works in any test runner.

from penstock.testing import check_parser

def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    check_parser(MyParser, ["<mine>why</mine>because"], markers=["<mine>", "</mine>"])
"""

from penstock.testing.decoding import accepts as accepts
from penstock.testing.decoding import allowed_tokens as allowed_tokens
from penstock.testing.decoding import byte_vocabulary as byte_vocabulary
from penstock.testing.decoding import check_logits_processor as check_logits_processor
from penstock.testing.decoding import random_answer as random_answer
from penstock.testing.parser_check import check_cost as check_cost
from penstock.testing.parser_check import check_cuts as check_cuts
from penstock.testing.parser_check import check_parser as check_parser
from penstock.testing.parser_check import join_atoms as join_atoms
from penstock.testing.parser_check import merged as merged
from penstock.testing.parser_check import read as read
from penstock.testing.parser_check import split_atoms as split_atoms
from penstock.testing.tool_format_check import check_tool_format as check_tool_format
