"""Tool parsers for families that write calls as named parameters in markup: one `ParameterMarkup` each."""

from functools import partial

from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn
from penstock.plugins.markers import MarkerBuffer
from penstock.plugins.markup_calls.call_reader import Surroundings
from penstock.plugins.markup_calls.call_sections import CallSections, Envelope
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup
from penstock.plugins.markup_calls.parameter_reader import ParameterReader
from penstock.plugins.schema_types import ToolSchemas


def parameter_calls(turn: Turn, markup: ParameterMarkup, tool_format: ToolFormat | None) -> CallSections:
    """The parser of calls that are marked up so."""
    envelope = Envelope(
        call=markup.call,
        section=markup.section,
        section_end=markup.section_end,
        skipped=markup.skipped,
        may_lack_section=markup.may_lack_section,
        is_offered_only=markup.is_offered_only,
    )
    return CallSections(turn, envelope, partial(_new_reader, markup), tool_format)


def _new_reader(markup: ParameterMarkup, buffer: MarkerBuffer, schemas: ToolSchemas, around: Surroundings) -> ParameterReader:
    return ParameterReader(buffer, markup, schemas, around)
