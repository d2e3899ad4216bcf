"""The keywords of JSON Schema, by what they are about."""

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"),
        *("$defs", "definitions"),
        "discriminator",  # OpenAPI's hint to parsers; what it says, `oneOf` says too
    }
)
KEYWORDS_OF = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
            *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        }
    ),
    "array": frozenset(
        {
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains", "unevaluatedItems"),
        }
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
TRANSLATED = frozenset(
    {
        *("type", "properties", "required", "additionalProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
