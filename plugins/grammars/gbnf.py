"""GBNF, and the EBNF that XGrammar reads, as Lark."""


class GbnfError(Exception):
    """`line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


def to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return gbnf_to_lark(text).removeprefix("%llguidance {}")
