"""Grammars for tokenizers: what may follow, what is refused, and random schemas whose completions all validate."""

import contextlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from mmvllm.sampling.constraints import ConstraintFailed
from mmvllm.sampling.grammar import MAX_COMPILED, GrammarCompiler
from mmvllm.scheduler.sequence import Sequence
from mmvllm.structured.params import StructuredOutputsParams
from tests.helpers.models.tokenizers import NAMES, tokenizer_of
from tests.helpers.serving.schemas import SchemaMaker, doubling, wide, write

WIDTH = 768  # of the logits, more than the tokenizer has


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("bundled")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, WIDTH)


def following(compiler: GrammarCompiler, text_ids: list[int], width: int = WIDTH, **fields) -> set[int]:
    """The tokens that may follow."""
    seq = Sequence([0], SamplingParams(structured=fields), request_id="", block_size=4)
    constraint = compiler.constraint(seq.sampling_params.structured)
    for token_id in text_ids:
        seq.append_token(token_id)
    allowed = np.full(-(-width // 32), 0xFFFFFFFF, np.uint32)
    constraint.restrict(seq, allowed)
    return {*np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()}


@pytest.mark.essential(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_tokenizer_writes_json_and_ends_with_any_of_its_ends(name):
    tokenizer = tokenizer_of(name)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    width = -(-len(tokenizer) // 128) * 128 + 128
    compiler = GrammarCompiler(tokenizer, ends, width)
    schema = {"type": "object", "properties": {"größe": {"enum": ["日本", "<|im_end|>"]}}, "required": ["größe"]}
    for value in ("日本", "<|im_end|>"):
        ids = tokenizer.encode(json.dumps({"größe": value}, ensure_ascii=False), split_special_tokens=True)
        assert ids[0] in following(compiler, [], width, json=schema)
        assert following(compiler, ids, width, json=schema | {"additionalProperties": False}) == ends
    assert max(following(compiler, [], width, regex=".+")) < len(tokenizer)


def test_no_control_token_is_text(compiler, tokenizer):
    special = {*tokenizer.all_special_ids}
    for fields in (
        {"regex": ".*"},
        {"regex": r"<\|im_end\|>"},
        {"choice": ["<|im_start|>"]},
        {"json": {"type": "string"}},
    ):
        assert not following(compiler, [], **fields) & special - {tokenizer.eos_token_id}
    assert following(compiler, [], regex=r"<\|im_end\|>") == {tokenizer.encode("<")[0]}


def test_a_tokenizer_may_have_more_tokens_than_the_logits(tokenizer):
    compiler = GrammarCompiler(tokenizer, {5}, 64)
    assert following(compiler, tokenizer.encode("a"), 64, regex="a") == {5}


def test_constraints_of_one_grammar_are_independent(compiler, tokenizer):
    first, second = tokenizer.encode("a"), tokenizer.encode("b")
    grammar = 'start: "a" "1" | "b" "2"'
    assert following(compiler, first, grammar=grammar) == {*tokenizer.encode("1")}
    assert following(compiler, second, grammar=grammar) == {*tokenizer.encode("2")}


def test_what_others_forbid_stays_forbidden(compiler, tokenizer):
    seq = Sequence([0], SamplingParams(structured={"regex": "[0-9]"}), request_id="", block_size=4)
    allowed = np.zeros(WIDTH // 32, np.uint32)
    compiler.constraint(seq.sampling_params.structured).restrict(seq, allowed)
    assert not allowed.any()


def test_a_text_that_left_the_grammar_fails(compiler, tokenizer):
    with pytest.raises(ConstraintFailed, match="the grammar of structured failed"):
        following(compiler, tokenizer.encode("b"), regex="a")


def test_a_grammar_that_grows_too_large_fails_alone(compiler, tokenizer):
    with pytest.raises(ConstraintFailed, match=r"row has .* items") as caught:
        following(compiler, tokenizer.encode("b") * 5, grammar=doubling())
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(a{1000}){1000}"),
        ("json", json.dumps({"const": "a" * 60_000})),
        ("grammar", 'start: "a"{1000000}'),
        ("grammar", wide()),
    ],
)
def test_a_grammar_that_is_too_large_for_its_first_tokens_is_refused(kind, value, compiler):
    for _ in range(2):
        reason = rf"structured.{kind} cannot be enforced: .*([Tt]oo many|row has)"
        with pytest.raises(RequestError, match=reason) as caught:
            compiler.check(StructuredOutputsParams(**{kind: value}))
        assert caught.value.param == f"structured.{kind}"


COSTLY = [
    {"multipleOf": 1000003},
    {"multipleOf": 10**400},
    {"type": "number", "multipleOf": 1.0000003},
    {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    {"anyOf": [{"properties": {"a": {"multipleOf": number}}} for number in (89, 97, 101)]},
]


STARS = "(.*)" * 1001
WIDE = {"type": "object", "properties": {f"{i:x}": {} for i in range(400)}, "anyOf": [{}] * 300}
COSTLY_EXPRESSIONS = [
    ("regex", {"regex": STARS}),
    ("regex", {"regex": "|".join("a" * 16_002)}),
    ("whitespace_pattern", {"json_object": True, "whitespace_pattern": "( ?)" * 1001}),
    ("json", {"json": {"type": "string", "pattern": STARS}}),
    ("json", {"json": {"type": "object", "patternProperties": {STARS: {}}}}),
    ("json", {"json": {"type": "object", "patternProperties": {f"{i}{'(.*)' * 300}": {} for i in range(4)}}}),
    *(
        ("grammar", {"grammar": grammar})
        for grammar in (
            f"start: /{STARS}/",
            f"start: A\nA: /{STARS}/",
            "start: " + "a*" * 2001 + '\na: "x"',
            "start: b\nb: " + "a? " * 2001 + '\na: "x"',
            "start: " + "x " * 4001 + '\nx: a?\na: "x"',
            "start: A\nA: " + "/.*/ " * 1001,
            "start: A\nB: /.*/\nA: " + "B " * 1001,
            'start: A\nB: "b"\nA: ' + "B? " * 1001,
            "start: A1000\nA0 : /.*/\n" + "".join(f"_A{i + 1}: A{i}\nA{i + 1}: _A{i + 1} A{i}\n" for i in range(1000)),
            "start: A\nA: " + " & ".join(f"/.*a{i}.*/" for i in range(13)),
            "start: A\nA: ~(" + " | ".join(f"~/.*a{i}.*/" for i in range(12)) + ")",
            "".join(f"A{i}: /x{i}/ & /.*y/ // & \n" for i in range(12)) + "start: A\nA: " + "A1 " * 12,
            f"start: a\na: %json {json.dumps({'type': 'string', 'pattern': STARS})}",
        )
    ),
]


@pytest.mark.parametrize(
    "grammar", ["!" * 65_000, "?" * 65_000, '"' + '\\"' * 32_000, "/" + "\\/" * 32_000, "a" * 65_000, '"' * 65_000]
)
def test_the_cost_of_a_grammar_is_found_in_linear_time(grammar):
    begin = time.thread_time()
    with contextlib.suppress(RequestError):
        StructuredOutputsParams(grammar=f"start: {grammar}")
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_many_properties_beside_many_alternatives_are_refused(keyword):
    schema = {keyword if name == "anyOf" else name: value for name, value in WIDE.items()}
    for given in ({"json": schema}, {"grammar": f"start: a\na: %json {json.dumps(schema)}"}):
        with pytest.raises(
            RequestError, match=f"has the keyword '{keyword}' at /, which has 300 members beside 400 properties"
        ):
            StructuredOutputsParams(**given)


def test_a_schema_of_long_names_is_read_in_linear_time():
    inner = {"type": "object", "properties": {f"{i:x}": {} for i in range(500)}}
    begin = time.thread_time()
    for _ in range(30):
        StructuredOutputsParams(json={"type": "object", "properties": {"n" * 30_000: inner}})
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(("kind", "given"), COSTLY_EXPRESSIONS, ids=range(len(COSTLY_EXPRESSIONS)))
def test_expressions_that_take_long_to_compile_are_refused(kind, given):
    with pytest.raises(
        RequestError, match=r"too many repetitions and alternatives|more than 11 operators|levels deep"
    ) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.param == f"structured.{kind}"


CHEAP_GRAMMARS = [
    'start: "&~" /a&b~c/ // & & & & & & & & & & & & &\n# ~ ~ ~ ~ ~ ~ ~ ~ ~ ~ ~ ~ ~',
    "start: " + " ".join("ab") + '\na: b? "x"*\nb: /y+/\n' + "".join(f'c{i}: "{i}"*\n' for i in range(2000)),
    "start: WORD\nWORD: " + " | ".join(f'"w{i}"' for i in range(1500)),
    "start: " + '"a"~1..2 ' * 14 + '"b"',
    "start: WORD\nWORD: /" + "|".join(f"w{i}" for i in range(1500)) + "/",
    "start: A\nA: /" + r"\+\*\?\{\|[*+?{]" * 300 + "/",
    'start: T "!"\nT: /(.|\\n)+/ & ~/(.|\\n)*!(.|\\n)*/',
]


@pytest.mark.parametrize("grammar", CHEAP_GRAMMARS, ids=range(len(CHEAP_GRAMMARS)))
def test_long_grammars_of_short_expressions_are_enforced(grammar, compiler):
    compiler.check(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize("schema", COSTLY, ids=range(len(COSTLY)))
def test_multiples_that_need_too_many_states_are_refused(schema):
    for kind, given in [("json", schema), ("grammar", f"start: a\na: %json // it\n {json.dumps(schema)}")]:
        with pytest.raises(RequestError, match=r"keyword 'multipleOf' at .* which is too large, or") as caught:
            StructuredOutputsParams(**{kind: given})
        assert caught.value.param == f"structured.{kind}"


def test_usual_multiples_are_enforced(compiler):
    usual = [0.01, 0.5, 5, 60, 100, 10**6, 65536]
    schema = {"type": "object", "properties": {str(one): {"type": "number", "multipleOf": one} for one in usual}}
    for given in ({"json": schema}, {"grammar": f'start: "%json" a\na: %json {json.dumps(schema)}'}):
        compiler.check(StructuredOutputsParams(**given))


def test_grammars_are_compiled_once_and_the_oldest_are_dropped(tokenizer):
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, WIDTH)
    all_params = [StructuredOutputsParams(regex=f"a{{{i + 1}}}") for i in range(MAX_COMPILED + 1)]
    first = compiler._matcher(all_params[0])
    assert compiler._matcher(StructuredOutputsParams(regex="a{1}")) is first
    for params in all_params:
        compiler.check(params)
    assert len(compiler._compiled) == MAX_COMPILED and all_params[0] not in compiler._compiled


def test_a_kept_grammar_does_not_wait_for_another_that_is_compiled(tokenizer):
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, WIDTH)
    params = StructuredOutputsParams(regex="a")
    compiler.check(params)
    is_compiling, may_end, compile_ = threading.Event(), threading.Event(), compiler._compile

    def slow(params):
        is_compiling.set()
        assert may_end.wait(60)
        return compile_(params)

    compiler._compile = slow
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(compiler.check, StructuredOutputsParams(regex="b"))
        try:
            assert is_compiling.wait(60)
            threads.submit(compiler.constraint, params).result(timeout=10)
        finally:
            may_end.set()
        other.result()


def test_many_patterns_apart_from_each_other_are_enforced(compiler):
    apart = {"type": "object", "properties": {str(i): one for i, one in enumerate(texts_of(13))}}
    within = {"$defs": {"a": apart}, "allOf": [{"$ref": "#/$defs/a"}], "description": "as pydantic writes it"}
    for schema in (apart, within):
        compiler.check(StructuredOutputsParams(json=schema))


def texts_of(number: int) -> list[dict]:
    return [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{i}}}z"} for i in range(number)]


REFUSED = [
    ({"json": {"allOf": texts_of(20)}}, "has the keyword 'pattern' at /allOf/12, which is one of 20; beside allOf"),
    ({"json": {"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"allOf": texts_of(20)}}}}, "is one of 20"),
    ({"json": {"$ref": "#"}}, "structured.json cannot be enforced"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "structured.json cannot be enforced"),
    ({"json": {"type": "string", "pattern": "("}}, "structured.json cannot be enforced: regex parse error"),
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum (2) is greater than maximum (1)"),
    ({"json": {"$ref": "http://a.b/c"}}, "http://a.b/c"),
    ({"json": {"$ref": "#/$defs/no"}}, "Pointer '/$defs/no' does not exist"),
    ({"json": {"enum": []}}, "Unsatisfiable schema"),
    ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
    ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}}, "oneOf"),
    ({"regex": "("}, "structured.regex cannot be enforced"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ({"grammar": "nothing"}, "structured.grammar cannot be enforced"),
    ({"json": {"type": "null"}, "whitespace_pattern": "("}, "structured.json cannot be enforced"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused_with_the_reason(compiler, fields, message):
    with pytest.raises(RequestError) as caught:
        compiler.check(StructuredOutputsParams(**fields))
    assert message in str(caught.value) and caught.value.param.startswith("structured."), str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_llguidance_the_command_that_installs_it_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tokenizer, {1}, WIDTH)
    with pytest.raises(RequestError, match=r"pip install 'mmvllm\[structured\]'"):
        compiler.check(StructuredOutputsParams(regex="a"))
    compiler.check(None)


def test_a_checkpoint_without_an_end_is_told_so(tokenizer):
    with pytest.raises(RequestError, match="needs an end-of-sequence token"):
        GrammarCompiler(tokenizer, {WIDTH}, WIDTH).check(StructuredOutputsParams(regex="a"))


def write_and_validate(compiler, tokenizer, width: int, seeds: range) -> int:
    """Write a completion of a random schema for each seed; returns how many were finished."""
    num_finished = 0
    for seed in seeds:
        schema = SchemaMaker(seed).schema()
        try:
            params = StructuredOutputsParams(json=schema)
        except RequestError as error:  # of an excluded integer, where schemas are combined
            assert "beside another bound less than 1 away" in str(error)
            continue
        text, is_finished = write(compiler, params, tokenizer, width, seed)
        if is_finished:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            num_finished += 1
    return num_finished


@pytest.mark.slow
def test_what_is_finished_validates(compiler, tokenizer):
    assert write_and_validate(compiler, tokenizer, WIDTH, range(100)) > 90


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_finished_validates_for_a_thousand_schemas(name):
    tokenizer = tokenizer_of(name)
    width = len(tokenizer) + 100
    seeds = range(1000) if name == "bundled" else range(1000, 1100)
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, width)
    assert write_and_validate(compiler, tokenizer, width, seeds) > 0.9 * len(seeds)
