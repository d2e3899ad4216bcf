"""gpt-oss tool calls: messages to `functions.NAME`, each with a JSON object."""

from collections.abc import Sequence as Tools

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import CallableTool, Event, FormatInfo, Text, ToolParser, Turn
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, Value
from penstock.plugins.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, ROLE, TO, Harmony

HEADERS = (
    (Literal(" "), Marker(CONSTRAIN), Literal("json"), Marker(MESSAGE)),
    (Marker(CHANNEL), Literal("commentary "), Marker(CONSTRAIN), Literal("json"), Marker(MESSAGE)),
    (Marker(CHANNEL), Literal("commentary json"), Marker(MESSAGE)),
)


class HarmonyToolFormat:
    """` to=functions.NAME`, what else the header says, and the arguments. A call that is the last one has no end but the answer's."""

    opening = TO

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        call = Either(tuple(self._call(tool, header) for tool in tools for header in HEADERS))
        separator = (Marker(ENDS[0]), Marker(ROLE), Literal(TO))
        return call if is_single else Sequence((call, Repeat(Sequence((*separator, call)))))

    def _call(self, tool: CallableTool, header: tuple[Structure, ...]) -> Structure:
        return Sequence((Literal(tool.name), *header, Value(tool.arguments)))


class HarmonyCalls(ToolParser):
    """Reads whole answers as well as what the reasoning parser leaves of them. With `tool_choice: none`, all is text."""

    tool_format = HarmonyToolFormat()

    def __init__(self, turn: Turn) -> None:
        self._harmony = None if turn.tool_choice == "none" else Harmony(turn, reads_calls=True)

    @property
    def is_in_call(self) -> bool:
        return self._harmony is not None and self._harmony.is_in_call

    def feed(self, text: str) -> list[Event]:
        if self._harmony is None:
            return [Text(text)] if text else []
        return self._harmony.feed(text)

    def finish(self) -> list[Event]:
        return [] if self._harmony is None else self._harmony.finish()


INFO = FormatInfo(
    models="gpt-oss",
    markers=(CHANNEL, TO, CONSTRAIN, MESSAGE, *ENDS, ROLE),
    quirks="the recipient precedes or follows the channel; one call per message; alone, it reads `analysis` as reasoning",
    aliases=("gpt-oss", "gpt_oss", "gptoss", "openai_gptoss", "harmony"),
    signs=(CHANNEL, MESSAGE, "functions."),
    prompt_tail=ROLE,
    example=f'{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}{{"city": "Oslo"}}<|call|>',
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("openai", HarmonyCalls, INFO)
