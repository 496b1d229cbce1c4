"""What takes long to compile in ways that llguidance does not bound is refused; what is accepted takes little time."""

import contextlib
import json
import time

import pytest

from mmvllm import RequestError, StructuredOutputsParams
from mmvllm.sampling.grammar import GrammarCompiler
from tests.helpers.models.tokenizers import tokenizer_of

pytest.importorskip("llguidance")

ANY = "[ -\U0010ffff]"
PRIMES = (2, 3, 5, 7, 11, 13, 17)
INTERSECTED = {
    "small": "AA: " + " & ".join(f"/(.{{{prime}}})*/" for prime in PRIMES),
    "two": "AA: /(.{499})*/ & /(.{491})*/",
    "ranges": "AA: /(.{1,499})*/ & /(.{ 2 , 491 })*/",
    "at least": "AA: /(.{499,})*/ & /(.{491,})*/",
    "of terminals": "B: /./\nAA: (B{499})* & (B{491})*",
    "of terminals with ~": "B: /./\nAA: (B~499)* & (B~1..491)*",
    "of inner terminals": "B: /(.{499})*/\nC: /(.{491})*/\nAA: B & C",
    "long": f"AA: /{'a' * 200}/ & /{'b' * 200}/",
}


@pytest.mark.parametrize("terminals", INTERSECTED.values(), ids=INTERSECTED)
def test_intersections_of_large_expressions_are_refused(terminals):
    with pytest.raises(RequestError, match="'AA' intersects expressions that are too large") as error:
        StructuredOutputsParams(grammar=f"start: AA\n{terminals}")
    assert error.value.param == "structured.grammar"


@pytest.mark.parametrize("text", ["b" + " " * 65_000 + "x", "b::" + " " * 65_000, "b [" * 20_000, "b::x " * 13_000])
def test_a_grammar_is_read_in_linear_time(text):
    begin = time.process_time()
    with contextlib.suppress(RequestError):
        StructuredOutputsParams(grammar=f'start: "<[" ~2\n{text}')
    assert time.process_time() - begin < 0.5  # and not 4 s


@pytest.mark.parametrize(
    ("schemas", "reason"),
    [
        (['{"anyOf": [' + "{}," * 2000 + "{}]}"], "more than 2000 schemas within"),
        (['{"anyOf": [' + "{}," * 60 + "{}]}"] * 40, "more than 2000 schemas within"),
        (['{"items":' * 40 + "{}" + "}" * 40], "nested more than 32 deep"),
    ],
    ids=["one", "together", "deep"],
)
def test_schemas_within_a_grammar_have_the_limits_of_others(schemas, reason):
    with pytest.raises(RequestError, match=reason):
        StructuredOutputsParams(grammar="start: " + " | ".join(f"%json {schema}" for schema in schemas))


def test_a_name_without_digits_is_no_number_of_repetitions(compiler):
    compiler.check(StructuredOutputsParams(grammar="start: A999\nA999: /[a-z]{1,9}/ & ~/x999/ & /.{3}/"))


IGNORED = {
    "regex": {"regex": f"(?i){ANY * 50}"},
    "other flags": {"regex": f"(?si:{ANY * 50})"},
    "escapes": {"regex": r"(?i)" + r"\w\W" * 25},
    "points": {"regex": r"(?i)" + "." * 50},
    "pattern": {"json": {"type": "string", "pattern": f"(?i){ANY * 50}"}},
    "names": {"json": {"type": "object", "patternProperties": {f"(?i){ANY * 50}": {}}}},
    "white space": {"json_object": True, "whitespace_pattern": f"(?i){ANY * 50}"},
    "rule": {"grammar": f"start: /{ANY * 50}/i"},
    "terminal": {"grammar": f"start: A\nA: /{ANY * 50}/si"},
    "inner terminal": {"grammar": f"start: A\nB: /{ANY * 10}/i\nA: B B B B B"},
    "schema": {"grammar": "start: %json " + json.dumps({"type": "string", "pattern": f"(?i){ANY * 50}"})},
    "stop": {"grammar": f'start: a\na[stop=/{ANY * 50}/i]: "x"'},
    "ignored": {"grammar": f'start: "x"\n%ignore /{ANY * 50}/i'},
}


@pytest.mark.parametrize("given", IGNORED.values(), ids=IGNORED)
def test_many_classes_where_case_is_ignored_are_refused(given):
    with pytest.raises(RequestError, match="classes of characters where case is ignored, can be enforced"):
        StructuredOutputsParams(**given)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = tokenizer_of("bundled")
    return GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))


ACCEPTED = {
    "classes that ignore case": {"regex": f"(?i){ANY * 39}"},
    "words that ignore case": {"grammar": "start: A\nA: " + " | ".join(f'"word{i}"i' for i in range(500))},
    "classes": {"regex": "[a-z]" * 500},
    "an intersection": {"grammar": "start: AA\nAA: /(.{9})*/ & /(.{8})*/"},
    "names": {"json": {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(100)}}},
    "choices that begin alike": {"choice": [f"x{i}" for i in range(2500)]},
}


@pytest.mark.parametrize("given", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted_takes_little_time(given, compiler):
    begin = time.thread_time()
    compiler.check(StructuredOutputsParams(**given))
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize("num_objects", [1, 4])
def test_names_that_are_compared_in_pairs_are_limited(num_objects):
    names = {f"^a{i}$": {} for i in range({1: 101, 4: 51}[num_objects])}
    schema = {"type": "object", "properties": {str(i): {"patternProperties": names} for i in range(num_objects)}}
    for given in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(RequestError, match=r"'patternProperties' at .* too many expressions, which are compared"):
            StructuredOutputsParams(**given)


LOW, HIGH = {"exclusiveMinimum": 0}, {"exclusiveMaximum": 1}
NOT_ENFORCED = {
    "beside anyOf": LOW | {"anyOf": [{"type": "number", "maximum": 0.5}, {"type": "null"}]},
    "any type": LOW | {"maximum": 0.5, "type": ["null", "number"]},
    "low": LOW | {"maximum": 0.75},
    "both": {"exclusiveMinimum": 5, "exclusiveMaximum": 5.5},
    "high": {"minimum": -0.5, "exclusiveMaximum": 0},
    "negative": {"minimum": -1.5, "exclusiveMaximum": -1},
    "beside a weaker one": LOW | {"minimum": 0, "maximum": 0.1},
    "allOf": {"allOf": [LOW, {"maximum": 0.5}]},
    "in allOf": {"maximum": 0.5, "allOf": [{"allOf": [LOW]}]},
    "reference": {"$ref": "#/$defs/a~1b", "maximum": 0.5},
    "in anyOf": {"maximum": 0.5, "anyOf": [LOW]},
    "of a name": {"properties": {"a": LOW}, "patternProperties": {"^a": {"type": "number", "maximum": 0.5}}},
    "of items": {"allOf": [{"items": LOW}, {"items": {"maximum": 0.5}}]},
}


@pytest.mark.parametrize("schema", NOT_ENFORCED.values(), ids=NOT_ENFORCED)
def test_an_excluded_integer_beside_another_near_bound_is_refused(schema):
    """Llguidance's numbers have the excluded bound, if no other integer lies between the two."""
    root = {"type": "object", "properties": {"p": {"type": "number"} | schema}, "$defs": {"a/b": LOW}}
    with pytest.raises(RequestError, match=r"keyword 'exclusive(Minimum|Maximum)' at /.*, which cannot be"):
        StructuredOutputsParams(json=root)


ENFORCED = [LOW | {"maximum": 1}, LOW | HIGH, {"exclusiveMinimum": 0.25, "exclusiveMaximum": 0.75}, LOW]
ENFORCED += [{"minimum": 0, "maximum": 0.75}, LOW | {"minimum": 0.5, "maximum": 0.75}, HIGH | {"maximum": 0.5}]
ENFORCED += [LOW | {"maximum": 0.5, "type": "string"}, {"minimum": 0.5, "maximum": 10**400}, {"minimum": -(10**400)}]
ENFORCED += [LOW | {"maximum": 0.5, "type": "integer", "minimum": -5}]


@pytest.mark.parametrize("schema", ENFORCED)
def test_other_bounds_are_enforced(schema):
    StructuredOutputsParams(json={"type": "number"} | schema)


def test_options_of_llguidance_in_a_schema_have_no_effect():
    options = {"item_separator": "; ", "coerce_one_of": True}
    schema = {"type": "array", "items": {"type": "integer", "x-guidance": options}, "x-guidance": options}
    made = json.loads(StructuredOutputsParams(json=schema | {"x-own": 1}).json)
    assert made == {"type": "array", "items": {"type": "integer"}, "x-own": 1}


def test_references_that_lead_to_each_other_are_followed_once():
    for schema in (
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 60}}, "$ref": "#/$defs/a"},
        {"allOf": [{"allOf": [{"minimum": i}] * 30} for i in range(30)], "type": "number"},
    ):
        begin = time.thread_time()
        with contextlib.suppress(RequestError):
            StructuredOutputsParams(json=schema)
        assert time.thread_time() - begin < 1


USED = [
    {"regex": r"(?i)(" + "|".join(rf"v\.{i}\.x" for i in range(60)) + ")"},
    {"grammar": "start: T\nT: /(?s:.){0,200}/ & ~/(?s:.)*(foo|bar|bazzz)(?s:.)*/"},
    {"grammar": "start: T\nT: /(.|\\n){0,1000}/ & ~/(.|\\n)*<end>(.|\\n)*/"},
]


@pytest.mark.parametrize("given", USED)
def test_expressions_in_use_are_accepted(given, compiler):
    begin = time.thread_time()
    compiler.check(StructuredOutputsParams(**given))
    assert time.thread_time() - begin < 1


def test_classes_behind_an_escaped_bracket_are_counted():
    with pytest.raises(RequestError, match="classes of characters where case is ignored"):
        StructuredOutputsParams(regex=r"(?i)\[" + r"\W" * 50)


def chain(number: int, made) -> dict:
    """A schema of definitions, each of which refers to the next."""
    found = {f"d{i}": made({"$ref": f"#/$defs/d{i + 1}"}) for i in range(number)}
    return {"$defs": found | {f"d{number}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def lines(number: int, body: str, last: str = '"x"', start: str = "a") -> str:
    """A grammar of rules or terminals, each of which names the next."""
    made = (f"{start}{i}: {body.format(f'{start}{i + 1}')}\n" for i in range(number))
    return f"start: {start}0\n{''.join(made)}{start}{number}: {last}\n"


FATAL = {  # to the process: each overflows llguidance's stack
    "const": {"json": {"const": -(2**63)}},
    "const, rounded": {"json": {"const": -(2**63) + 512}},
    "inner const": {"json": {"properties": {"a": {"const": [{"b": -(2**63)}]}}}},
    "enum": {"json": {"type": "integer", "enum": [-1e300]}},
    "bounds": {"json": {"type": "integer", "minimum": -1e30, "maximum": -1e20}},
    "excluded bound": {"json": {"exclusiveMinimum": -(2**63) - 4000, "maximum": -(2**63)}},
    "in a grammar": {"grammar": "start: %json " + json.dumps({"const": -(2**63)})},
    "items": {"json": chain(1100, lambda one: {"items": one})},
    "properties": {"json": chain(900, lambda one: {"properties": {"a": one}})},
    "anyOf": {"json": chain(1100, lambda one: {"anyOf": [one]})},
    "deep": {"json": chain(150, lambda one: {"items": {"items": {"items": {"items": {"items": {"items": one}}}}}})},
    "rules": {"grammar": lines(3500, '"x" {}')},
    "alternatives": {"grammar": lines(3000, '{} | "x"')},
    "groups": {"grammar": lines(1100, '(((("x"? {})?)*)+)')},
    "terminals": {"grammar": lines(4000, "{}", start="A")},
    "a circle": {"grammar": lines(3000, '"x" {}', last='"y" a0?')},
    "brackets": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
}


@pytest.mark.parametrize("given", FATAL.values(), ids=FATAL)
def test_what_ends_the_process_is_refused(given):
    reason = "beyond 2\\*\\*53|has to be in \\[-2\\*\\*53|more than 1000 levels deep|more than 2000 schemas"
    with pytest.raises(RequestError, match=reason):
        StructuredOutputsParams(**given)


ALMOST = {
    "rules": {"grammar": lines(990, '"x" {}')},
    "terminals": {"grammar": lines(990, "{}", start="A")},
    "items": {"json": chain(450, lambda one: {"type": "array", "items": one})},
    "64 bits": {"json": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}},
    "53 bits": {"json": {"enum": [2**53, -(2**53)]}},
    "a power of two": {"json": {"type": "integer", "multipleOf": 2**19}},
    "a power of five": {"json": {"type": "integer", "multipleOf": 5**6}},
    "a power of ten": {"json": {"type": "integer", "multipleOf": 10**9}},
    "a tree": {
        "json": {
            "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i * 7 % 60}"}}} for i in range(60)},
            "$ref": "#/$defs/d1",
        }
    },
}


@pytest.mark.parametrize("given", ALMOST.values(), ids=ALMOST)
def test_what_is_just_accepted_compiles(given, compiler):
    begin = time.thread_time()
    compiler.check(StructuredOutputsParams(**given))
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize("exponent", [20, 22, 31, 52])
def test_large_powers_of_two_are_no_multiples(exponent):
    """They took minutes and gigabytes: only factors of ten are told by the last digits."""
    with pytest.raises(RequestError, match="keyword 'multipleOf' at /, which is too large"):
        StructuredOutputsParams(json={"type": "integer", "multipleOf": 2**exponent})


@pytest.mark.parametrize(
    "grammar",
    [
        'C: "x"\nB: ' + "C " * 11_000 + "\nA: " + "B " * 11_000 + "\nstart: A\n",
        "A: " + "B " * 15_000 + '\nB: "y"' + ' "y"' * 4000 + "\nstart: A\n",
    ],
)
def test_terminals_with_many_names_are_refused_at_once(grammar):
    begin = time.thread_time()
    with pytest.raises(RequestError, match="has more than 100000 characters with the terminals that it names"):
        StructuredOutputsParams(grammar=grammar)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize("others", [{"additionalItems": False}, {"additionalItems": {}}, {"items": [{}]}])
def test_items_of_two_drafts_are_refused(others):
    """Llguidance then takes the schema for one of a draft that has no prefixItems."""
    schema = {"type": "array", "prefixItems": [{"type": "integer"}]}
    with pytest.raises(RequestError, match="'prefixItems' at /, which cannot be enforced beside additionalItems"):
        StructuredOutputsParams(json=schema | others)
    StructuredOutputsParams(json=schema | {"items": False})


@pytest.mark.parametrize("others", [{}, {"allOf": [{}]}])
def test_many_bounds_are_looked_at_in_little_time(others):
    fields = {f"{i:x}": {"type": "number", "exclusiveMinimum": i} for i in range(1200)}
    begin = time.thread_time()
    StructuredOutputsParams(json={"type": "object", "properties": fields} | others)
    assert time.thread_time() - begin < 1
