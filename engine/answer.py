"""One sequence's tokens on their way to events: detokenizer → reasoning parser → stop strings → tool parser."""

# Written by the parser work; the engine calls exactly this:
#
# class Answer:
#     def __init__(self, detokenizer: Detokenizer, reasoning: ReasoningParser | None, tool_parser: Parser | None,
#                  stop: Sequence[str], include_stop_str_in_output: bool, skip_special_tokens: bool) -> None
#     def feed(self, token_id: int) -> list[Event]
#     def finish(self) -> list[Event]
#     phase: Phase                      (property; CONTENT where there is no reasoning parser)
#     num_reasoning_tokens: int
#     stop_match: str | None            the stop string that ended the content; nothing after it comes out
#     end_marker: str | None            the reasoning parser's
