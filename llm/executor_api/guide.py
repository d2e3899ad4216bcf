"""What an executor's request holds its answer to. Names and meanings are those of TensorRT-LLM's `GuidedDecodingParams`."""

import json
from dataclasses import dataclass
from enum import Enum

from penstock.api.constraints.constraint_size import check_text
from penstock.api.constraints.json_reading import JsonReading, in_reading, schema_spec
from penstock.api.constraints.structural_tag import TagReader
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import AdditionalProperties, GrammarKind, GrammarSpec
from penstock.llm.executor_api.checks import check_type, wrong

PARAM = "guided_decoding_params.guide"
ANY_JSON = json.dumps({"type": ["object", "array"]})


class GuideType(Enum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


@dataclass(frozen=True, slots=True)
class GuidedDecodingParams:
    """JSON takes no `guide` and allows any object or array; for the others it is a schema, a regex, a grammar or a tag, as text.

    Grammars are in XGrammar's dialect: rules with `::=`, one of them `root`. Raises `TypeError` for values of the wrong type.
    """

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.guide_type, GuideType):
            wrong("guide_type", "a GuideType", self.guide_type)
        check_type(self.guide, "guide", str, "a string")

    def spec(self, additional_properties: AdditionalProperties) -> GrammarSpec:
        """Raises `InvalidRequest` for a guide that is missing, superfluous or not to be read."""
        return in_reading(JsonReading(additional_properties=additional_properties), self._spec_in)

    def _spec_in(self, reading: JsonReading) -> GrammarSpec:
        if self.guide_type is GuideType.JSON:
            if self.guide is not None:
                raise InvalidRequest("a guide of type JSON has no text: for a schema there is JSON_SCHEMA", PARAM)
            return GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_JSON, PARAM)
        if not self.guide:
            raise InvalidRequest(f"a guide of type {self.guide_type.name} needs its text", PARAM)
        check_text(self.guide, PARAM)
        match self.guide_type:
            case GuideType.JSON_SCHEMA:
                return schema_spec(self.guide, PARAM, reading)
            case GuideType.REGEX:
                return GrammarSpec(GrammarKind.REGEX, self.guide, PARAM)
            case GuideType.EBNF_GRAMMAR:
                return GrammarSpec(GrammarKind.GBNF, self.guide, PARAM)
        return TagReader(reading).read(self.guide, PARAM)
