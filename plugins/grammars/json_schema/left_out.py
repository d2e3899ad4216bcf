"""What of a lenient schema is not enforced, as the client is told."""

MAX_WARNINGS = 200  # of a constraint: who leaves out more has been warned
MAX_CHARACTERS = 300  # of each: names in a schema may be as long as the whole


def left_out(keyword: str, place: str) -> str:
    """One warning. `place` is the path of what is not enforced."""
    text = f"`{keyword}` at {place}"
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."
