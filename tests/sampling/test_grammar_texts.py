"""What a grammar takes, and allows, token by token."""

import time

import numpy as np
import pytest

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from mmvllm.processors.chat.tool_grammar import calls_or_json_grammar, free_text_grammar, tool_call_grammar
from mmvllm.sampling import grammar as engine_grammar
from mmvllm.sampling import grammar_matcher
from mmvllm.sampling.constraints import ConstraintFailed
from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.scheduler.sequence import Sequence
from mmvllm.structured.params import StructuredOutputsParams
from tests.helpers.media.hostile import ambiguous_schema
from tests.helpers.models.tokenizers import tokenizer_of

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("bundled")


@pytest.fixture
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))


class Text:
    """A completion that a grammar restricts."""

    def __init__(self, compiler: GrammarCompiler, **fields):
        self._seq = Sequence([0], SamplingParams(structured=fields), request_id="", block_size=4)
        self._constraint = compiler.constraint(self._seq.sampling_params.structured)

    def following(self) -> set[int]:
        allowed = np.full(self._constraint._mask.shape, 0xFFFFFFFF, np.uint32)
        self._constraint.restrict(self._seq, allowed)
        return {*np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()}

    def write(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            assert token_id in self.following()
            self._seq.append_token(token_id)


def names(number: int, body: str) -> str:
    rules = "\n".join(f"t{i}: {body}" for i in range(number))
    return f'start: "!" | "#" s "~"\ns: {" | ".join(f"t{i}" for i in range(number))}\n{rules}'


AMBIGUOUS = {
    "many rules": names(190, "s s s | /[a-z ]/"),
    "some rules": names(60, "s s s | /[a-z ]/"),
    "nothing": 'start: "#" s "~"\ns: s s | /[a-z ]/ | ""',
    "a nested grammar": names(190, "s s s | /[a-z ]/")
    .replace('"#" s "~"', '"#" y "~"')
    .replace("s: ", "y: %lark { s: ", 1)
    .replace("\nt0:", "\nstart: s\nt0:", 1)
    + "\n}",
    "levels": "\n".join(
        [
            'start: "!" | "#" s0 "~"',
            *(f"s{i}: {' | '.join(f't{i}x{j}' for j in range(30))}" for i in range(3)),
            *(f"t{i}x{j}: s{i + 1} s{i + 1} s{i + 1} | /[a-z ]/" for i in range(3) for j in range(30)),
            "s3: /[a-z ]/",
        ]
    ),
    "repetitions": 'start: "#" ((("a"+)+ "b"?)+)+ "~"',
}


@pytest.mark.parametrize("grammar", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_no_token_of_an_ambiguous_grammar_takes_long(grammar, compiler, tokenizer):
    """Without a limit one takes minutes, in which the interpreter does nothing else."""
    text, longest = Text(compiler, grammar=grammar), 0.0
    for token_id in tokenizer.encode("#" + "a" * 60):
        begin = time.process_time()
        try:
            text.write([token_id])
        except ConstraintFailed as error:
            assert "items" in str(error)
            break
        finally:
            longest = max(longest, time.process_time() - begin)
    assert longest < 2


def test_calls_of_functions_are_not_ambiguous(compiler, tokenizer):
    """Objects with many optional properties have as many rules to follow, of which one is right."""
    properties = {f"property{i}": {"type": "string"} for i in range(100)}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]
    call = '<tool_call>\n{"name": "f", "arguments": {"property7": "a"}}\n</tool_call>'
    for grammar in (
        tool_call_grammar(tools, tokenizer, parallel=True),
        free_text_grammar(tools, tokenizer),
        calls_or_json_grammar(tools, tokenizer, {"type": "object"}, True),
    ):
        Text(compiler, grammar=grammar).write(tokenizer.encode(call))
        with pytest.raises(RequestError, match="items"):
            Text(compiler, grammar=f"{grammar}\n").write(tokenizer.encode(call))


LONG = "red circle " * 15


def strings(number: int) -> dict:
    properties = {f"f{i}": {"type": "string", "maxLength": 200 + i} for i in range(number)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_texts_of_earlier_requests_use_nothing_up(compiler, tokenizer, monkeypatch):
    """All requests with a grammar share the states of its lexer, whose number is limited."""
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_lexer_states", 900)
    renewed, renew = [], compiler.renewed
    monkeypatch.setattr(compiler, "renewed", lambda *given: (renewed.append(1), renew(*given))[1])
    for i in [*range(12), 0, 1]:
        Text(compiler, json=strings(12)).write(tokenizer.encode(f'{{"f{i}": "{LONG}"}}'))
    assert 0 < len(renewed) < 10


def test_a_text_that_is_too_much_by_itself_fails(compiler, tokenizer, monkeypatch):
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_lexer_states", 300)
    text = Text(compiler, json=strings(12))
    with pytest.raises(ConstraintFailed, match="too many states"):
        text.write(tokenizer.encode("{" + ", ".join(f'"f{i}": "{LONG}"' for i in range(12)) + "}"))


def test_a_text_whose_masks_take_too_long_ends(compiler, tokenizer, monkeypatch):
    """All requests of a step wait for them."""
    fields = {"json": ambiguous_schema(40), "whitespace_pattern": ""}
    text = Text(compiler, **fields)
    text.write(tokenizer.encode("[[[["))  # the grammar is trusted
    compiler.distrust()
    person = {"type": "object", "properties": {"name": {"type": "string"}}}
    with monkeypatch.context() as patch:
        patch.setattr(engine_grammar, "MAX_EXCESS_SECONDS", 60.0)
        Text(compiler, json=person).write(tokenizer.encode('{"name": "red"}'))
    monkeypatch.setattr(engine_grammar, "MAX_EXCESS_SECONDS", 1e-3)
    monkeypatch.setattr(engine_grammar, "SECONDS_PER_TOKEN", 1e-6)
    with pytest.raises(ConstraintFailed, match=r"finding its tokens took 0\.001 s more than it may; simplify"):
        Text(compiler, **fields).write(tokenizer.encode("[[[["))


def test_quick_masks_save_no_time_for_slow_ones():
    time = engine_grammar.MaskTime()
    for _ in range(1000):
        time.add(0.0)
    time.add(0.1)
    assert time.excess == pytest.approx(0.1 - engine_grammar.SECONDS_PER_TOKEN)
    for _ in range(1000):
        time.add(engine_grammar.SECONDS_PER_TOKEN / 2)
    assert time.excess == 0.0


def test_the_completions_of_a_request_share_the_time_of_masks(shared_llm):
    params = SamplingParams(structured={"regex": "a+"}, n=3)
    shared_llm.add_request("a", params, request_id="of masks")
    group = shared_llm.engine.scheduler.groups["of masks"]
    times = {id(seq.constraints[-1]._mask_time) for seq in group.seqs}
    shared_llm.abort_request("of masks")
    assert len(group.seqs) == 3 and len(times) == 1


@pytest.mark.parametrize("terminal", ["~/b/", "~/(?s:.*)b/", '~("a"|"b")'])
def test_a_complement_is_of_texts(terminal, compiler, tokenizer):
    """It also matches what control tokens are marked with: a completion could end where it is not complete."""
    special, end = {*tokenizer.all_special_ids}, {tokenizer.eos_token_id}
    text = Text(compiler, grammar=f"start: T\nT: {terminal}")
    text.write(tokenizer.encode("abc"))
    assert text.following() & special == end
    text = Text(compiler, grammar=f"start: T\nT: {terminal}")
    text.write(tokenizer.encode("b"))
    assert text.following() & special == set()
    unfinished = Text(compiler, grammar='start: T "z"\nT: ~/b/ & /[^z]*/')
    unfinished.write(tokenizer.encode("ac"))
    assert not unfinished.following() & special
    unfinished.write(tokenizer.encode("z"))
    assert unfinished.following() & special == end


def test_a_complement_excludes_control_tokens():
    with pytest.raises(RequestError, match=r"has a complement \(~\) and control tokens \(<\[ID\]>\)") as caught:
        StructuredOutputsParams(grammar="start: <[5]> T\nT: ~/b/")
    assert caught.value.param == "structured.grammar"
    StructuredOutputsParams(grammar='start: <[5]> "a"~2..3 /~/')
