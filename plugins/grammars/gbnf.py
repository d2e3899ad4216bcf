"""GBNF, and the EBNF that XGrammar reads, as Lark."""


class GbnfError(Exception):
    """`line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


def to_lark(text: str) -> str:
    """Raises `GbnfError`."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        line = text.count("\n", 0, error.pos.pos) + 1
        column = error.pos.pos - text.rfind("\n", 0, error.pos.pos)
        raise GbnfError(str(error).partition(" at line ")[0], line, column) from error
    return lark.removeprefix("%llguidance {}")
