"""What a caller may give as `structured`, and the messages for what is wrong with it."""

import json
import pickle
import time
from typing import Literal

import pytest
from pydantic import BaseModel

from mmvllm import RequestError, SamplingParams, StructuredOutputsParams
from mmvllm.structured.params import MAX_CHARACTERS, MAX_DEPTH
from mmvllm.structured.schema_keywords import FORMATS


class Shape(BaseModel):
    """A model that refers to itself."""

    kind: Literal["circle", "square"]
    inner: list["Shape"]


def of(**fields) -> StructuredOutputsParams:
    return SamplingParams(structured=fields).structured


def test_a_schema_may_be_a_dict_text_or_a_pydantic_model():
    schema = Shape.model_json_schema()
    texts = {of(json=given).json for given in (schema, json.dumps(schema, indent=1), Shape)}
    assert [json.loads(text) for text in texts] == [schema]


def test_the_order_of_keys_is_that_of_the_schema():
    properties = {name: {"type": "null"} for name in "zax"}
    assert [*json.loads(of(json={"type": "object", "properties": properties}).json)["properties"]] == ["z", "a", "x"]


def test_equal_parameters_have_equal_hashes_and_can_be_sent_to_processes():
    params = SamplingParams(structured={"json": {"type": "string", "description": "é"}})
    assert params == pickle.loads(pickle.dumps(params)) and len({params, pickle.loads(pickle.dumps(params))}) == 1
    with pytest.raises(AttributeError):
        params.structured.json = "{}"


def test_choices_are_kept_once_each_in_their_order():
    assert of(choice=["b", "a", "b"]).choice == ("b", "a")


def test_none_and_false_mean_not_given():
    assert SamplingParams(structured=None).structured is None
    assert of(regex="a", json=None, json_object=False).kind == "regex"


def nested(depth: int) -> dict:
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


WRONG = [
    ({}, "structured", "structured is empty; give exactly one of json, json_object, regex, choice, grammar"),
    ({"json": {"type": "null"}, "regex": "a"}, "structured", "structured has json and regex; give exactly one"),
    ({"jason": {}}, "structured", "structured has no field 'jason'; known: json,"),
    ("json", "structured", "structured must be StructuredOutputsParams, a dict with one of json"),
    ({"json": {}}, "structured.json", "is an empty schema; give one with a type, or json_object"),
    ({"json": True}, "structured.json", "must be a JSON schema that is an object, got True"),
    ({"json": "[1]"}, "structured.json", "must be a JSON schema that is an object, got [1]"),
    ({"json": "{"}, "structured.json", "is not JSON: Expecting property name"),
    ({"json": {"const": {1, 2}}}, "structured.json", "is not JSON: Object of type set"),
    ({"json": {"const": float("nan")}}, "structured.json", "is not JSON: Out of range float"),
    ({"json": {"const": "\ud800"}}, "structured.json", "has a lone surrogate"),
    ({"json": nested(MAX_DEPTH + 1)}, "structured.json", f"is nested more than {MAX_DEPTH} deep"),
    ({"json": '{"items":' * 9000 + "{}" + "}" * 9000}, "structured.json", "at most"),
    ({"json": {"enum": ["a" * MAX_CHARACTERS]}}, "structured.json", f"characters, got {MAX_CHARACTERS + 13}"),
    ({"json_object": 5}, "structured.json_object", "must be True, got 5"),
    ({"regex": ""}, "structured.regex", "is empty"),
    ({"regex": 5}, "structured.regex", "must be a string, got 5"),
    ({"grammar": "a" * (MAX_CHARACTERS + 1)}, "structured.grammar", f"at most {MAX_CHARACTERS}"),
    ({"choice": "red"}, "structured.choice", "must be a list of strings that are not empty, got 'red'"),
    ({"choice": ["a", ""]}, "structured.choice", "must be a list of strings that are not empty"),
    ({"regex": "a", "whitespace_pattern": ""}, "structured.whitespace_pattern", "is for json and json_object"),
]


@pytest.mark.parametrize("given, param, message", WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_refused_with_its_name(given, param, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured=given)
    assert caught.value.param == param and message in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 500


UNENFORCED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "not": {"not": {"type": "null"}},
    "if": {"if": {}, "then": {}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "minContains": {"type": "array", "minContains": 1},
    "nullable": {"const": "a", "nullable": True},
    "maxlength": {"type": "string", "maxlength": 3},
    "minProperties": {"type": "object", "minProperties": 1},
}
PLACES = {
    "/": lambda part: part,
    "/properties/a/b": lambda part: {"type": "object", "properties": {"a/b": part}},
    "/items/1": lambda part: {"type": "array", "items": [{}, part]},
    "/anyOf/0/additionalProperties": lambda part: {"anyOf": [{"type": "object", "additionalProperties": part}]},
    "/$defs/it": lambda part: {"$ref": "#/$defs/it", "$defs": {"it": part}},
}


@pytest.mark.parametrize("keyword", UNENFORCED)
@pytest.mark.parametrize("place", PLACES)
def test_a_keyword_that_is_not_enforced_is_refused_with_its_place(keyword, place):
    with pytest.raises(RequestError, match=rf"has the keyword '{keyword}' at ") as caught:
        of(json=PLACES[place](UNENFORCED[keyword]))
    assert f" at {place}, which can" in str(caught.value) and caught.value.value == keyword


@pytest.mark.parametrize("place", PLACES)
def test_what_is_nullable_as_in_openapi_may_be_null(place):
    for part, wanted in (
        ({"type": "string", "nullable": True, "title": "A"}, {"type": ["string", "null"], "title": "A"}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
    ):
        assert json.loads(of(json=PLACES[place](part)).json) == PLACES[place](wanted)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic up to 2.12 has it, beside a number


@pytest.mark.parametrize("place", PLACES)
def test_an_alternative_whose_pattern_cannot_be_enforced_is_left_out(place):
    total = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}], "title": "Total"}
    wanted = PLACES[place]({"anyOf": [{"type": "number"}, False], "title": "Total"})
    assert json.loads(of(json=PLACES[place](total)).json) == wanted


def test_no_alternative_is_left_out_where_fewer_could_mean_more():
    total = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}
    for schema in ({"oneOf": [total, {"type": "null"}]}, {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": total}}):
        with pytest.raises(RequestError, match=r"has the keyword 'pattern' at /.*/anyOf/1, which has a look-around"):
            of(json=schema)


@pytest.mark.parametrize("pattern", [DECIMAL, r"(a)\1", "a(?=b)", "(?<!a)b", r"\bred\b", r"[\]]\B", r"(?P<a>b)(?P=a)"])
def test_a_pattern_without_an_alternative_is_refused_with_its_place(pattern):
    with pytest.raises(RequestError, match="has the keyword 'pattern' at /properties/total, which has a look-around"):
        of(json={"type": "object", "properties": {"total": {"type": "string", "pattern": pattern}}})
    with pytest.raises(RequestError, match="has the keyword 'patternProperties' at /, which has a look-around"):
        of(json={"type": "object", "patternProperties": {pattern: {}}})


@pytest.mark.parametrize("pattern", [r"\(?=", "[(?=]", r"[^\](?!]", "(?:a)(?<n>b)(?i)", r"\\b", "[]\\b]", "["])
def test_a_pattern_that_only_looks_so_is_not(pattern):
    assert json.loads(of(json={"type": "string", "pattern": pattern}).json)["pattern"] == pattern


@pytest.mark.parametrize("text", ["[", "[\\", "(", "[a"])
def test_a_long_pattern_is_read_in_linear_time(text):
    pattern = text * (30_000 // len(text)) + "\\"
    begin = time.thread_time()
    of(json={"anyOf": [{"type": "string", "pattern": pattern}, {"type": "null"}]})
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    "keywords",
    [
        *({"format": name} for name in ("path", "binary", "int64", "ipv4network", "multi-host-uri")),
        *({"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"unevaluatedProperties": {}}),
        *({"unevaluatedItems": True}, {"dependentRequired": {}}, {"dependentSchemas": {}}, {"nullable": False}),
        {"not": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", PLACES)
def test_keywords_that_demand_nothing_are_left_out(keywords, place):
    part = {"type": "string", "title": "A"}
    assert of(json=PLACES[place](part | keywords)) == of(json=PLACES[place](part))


def test_known_formats_are_those_of_llguidance():
    matcher = pytest.importorskip("llguidance").LLMatcher

    def error(name: str) -> str:
        schema = json.dumps({"type": "string", "format": name})
        return matcher.validate_grammar(matcher.grammar_from_json_schema(schema))

    published = ("iri", "uri-reference", "iri-reference", "uri-template", "regex", "idn-email", "idn-hostname")
    published += ("json-pointer", "relative-json-pointer", *FORMATS)  # all that JSON Schema defines
    assert {name for name in published if error(name) == ""} == FORMATS


def test_annotations_and_properties_of_any_name_are_accepted():
    annotations = {
        "title": "A",
        "description": "b",
        "default": 1,
        "examples": [{}],
        "deprecated": False,
        "$comment": "",
        "strict": True,
    }
    named = {"type": "object", "properties": {"uniqueItems": {"const": {"not": 1}}}, "required": ["uniqueItems"]}
    assert of(json=named | annotations | {"x-order": 3, "minProperties": 1}).kind == "json"


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_contradicts_structured_is_refused(other):
    [name] = other
    with pytest.raises(RequestError, match=f"{name} is .*, which contradicts structured") as caught:
        SamplingParams(structured={"regex": "a"}, **other)
    assert caught.value.param == name
