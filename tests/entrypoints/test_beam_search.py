"""Beam search equals transformers' in every family, and does not depend on how its beams are computed."""

from functools import partial

import pytest

from mmvllm import LLM, BeamSearchParams, SamplingParams
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.models.parity import REQUESTS
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST, every_family

TOKENS = 12
OFTEN = tuple(range(0, 400, 2))  # about half of a random model's tokens end a hypothesis
BEAMS = SamplingParams(beam_width=4, n=4, max_tokens=TOKENS, stop_token_ids=OFTEN[::4], length_penalty=2.0)
NAMES = ("text", "one", "two apart", "three")
WAYS = [
    pytest.param({"async_scheduling": False}, id="plain"),
    pytest.param({"async_scheduling": True}, id="ahead"),
    pytest.param({"async_scheduling": True, "tensor_parallel_size": 2}, id="2 ranks", marks=pytest.mark.slow),
]
every_way = pytest.mark.parametrize("make_llm", WAYS, indirect=True)


@pytest.fixture
def make_llm(request, make_llm, monkeypatch):
    use_rank_threads(monkeypatch)
    return partial(make_llm, kvcache_block_size=4, **getattr(request, "param", {"async_scheduling": False}))


def found(output) -> list[tuple[list[int], float]]:
    return [(completion.token_ids, completion.score) for completion in output.completions]


def assert_equal(got: list[tuple[list[int], float]], want: list[tuple[list[int], float]]) -> None:
    assert [token_ids for token_ids, _ in got] == [token_ids for token_ids, _ in want]
    assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=1e-4)


def assert_equals_transformers(llm, hf, request: dict, params: SamplingParams, **options) -> None:
    eos = params.end_ids(llm.engine.output_processor._eos_token_ids)
    options |= {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    options |= {"eos_token_id": sorted(eos) or None}
    want = hf.beams(request, params.beam_width, params.max_tokens, **options)
    assert_equal(found(llm.generate_multimodal([request], params)[0]), want)
    assert_idle(llm)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_beams_equal_transformers_in_every_family(shape, checkpoints, reference, make_llm):
    llm, hf = make_llm(checkpoints(shape)), reference(shape)
    for name in ("text", "two apart"):
        assert_equals_transformers(llm, hf, REQUESTS[name], BEAMS)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", RICHEST[:1])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0])
def test_options_equal_transformers(length_penalty, early_stopping, shape, checkpoints, reference, make_llm):
    llm, hf = make_llm(checkpoints(shape)), reference(shape)
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "max_tokens": TOKENS}
    for width, end_ids in ((2, OFTEN), (5, OFTEN[::5]), (3, ())):
        params = SamplingParams(beam_width=width, n=width, stop_token_ids=end_ids, **options)
        assert_equals_transformers(llm, hf, REQUESTS["one"], params)


@pytest.mark.parametrize("shape", RICHEST[:1])
def test_logits_processors_equal_transformers(shape, checkpoints, reference, make_llm):
    llm, hf = make_llm(checkpoints(shape)), reference(shape)
    params = {"beam_width": 3, "n": 3, "max_tokens": TOKENS}
    with_penalty = SamplingParams(**params, repetition_penalty=1.3)
    assert_equals_transformers(llm, hf, REQUESTS["one"], with_penalty, repetition_penalty=1.3)
    with_minimum = SamplingParams(**params, stop_token_ids=OFTEN, min_tokens=5)
    assert_equals_transformers(llm, hf, REQUESTS["one"], with_minimum, min_new_tokens=5)
    assert_equals_transformers(llm, hf, REQUESTS["one"], SamplingParams(**params, ignore_eos=True))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The hypotheses of each request alone, without caches."""
    made = {}
    for name in NAMES:
        llm = LLM(checkpoint, dtype="float32", device="cpu", enable_prefix_caching=False, skip_warmup=True)
        made[name] = found(llm.generate_multimodal([REQUESTS[name]], BEAMS)[0])
        llm.exit()
    return made


def assert_as_expected(llm, expected) -> None:
    outputs = llm.generate_multimodal([REQUESTS[name] for name in NAMES], BEAMS)
    for name, output in zip(NAMES, outputs, strict=True):
        assert_equal(found(output), expected[name])
    assert_idle(llm)


@pytest.mark.slow
@every_way
@every_family
@pytest.mark.parametrize("caching", [True, False])
def test_together_cold_and_cached(caching, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, enable_prefix_caching=caching)
    assert_as_expected(llm, expected)
    assert_as_expected(llm, expected)


@pytest.mark.thinned(2)
@every_way
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(block_size, checkpoint, make_llm, expected):
    assert_as_expected(make_llm(checkpoint, kvcache_block_size=block_size), expected)


@pytest.mark.thinned(1)
@every_way
@pytest.mark.parametrize("max_num_seqs", [4, 5, 9])
@pytest.mark.parametrize("budget", [1, 3, 30])
def test_searches_that_budgets_divide(budget, max_num_seqs, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    assert_as_expected(llm, expected)


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("spare_blocks", [0, 1, 4])
def test_few_blocks(spare_blocks, caching, checkpoint, make_llm, expected):
    """Even where there are blocks for a single beam only, the search is completed."""
    prompts = [make_llm(checkpoint).processor(REQUESTS[name]) for name in NAMES]
    num_blocks = -(-(max(len(prompt.token_ids) for prompt in prompts) + TOKENS) // 4) + spare_blocks
    llm = make_llm(checkpoint, num_kvcache_blocks=num_blocks, enable_prefix_caching=caching)
    assert_as_expected(llm, expected)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("which", [0, -1, None])
def test_preemption_at_each_step(which, caching, checkpoint, make_llm, expected):
    """The first beam is preempted, or the last one, or all."""
    llm = make_llm(checkpoint, enable_prefix_caching=caching, max_num_batched_tokens=30)
    engine, scheduler = llm.engine, llm.engine.scheduler
    prompt, step, steps = llm.processor(REQUESTS["two apart"]), 0, 1
    while step < steps:
        engine.add_request(prompt, BEAMS)
        steps, outputs = 0, []
        while not engine.is_finished():
            outputs += engine.step()[0]
            if steps == step and scheduler.running:
                scheduler.preempt_all() if which is None else scheduler.preempt(scheduler.running[which])
            scheduler.check()
            steps += 1
        assert_equal(found(outputs[0]), expected["two apart"])
        step += 1
    assert step >= TOKENS


@pytest.mark.thinned(1)
@every_way
def test_beams_among_other_requests(checkpoint, make_llm, expected):
    """Greedy and seeded requests, and several completions, are what they are alone."""
    llm = make_llm(checkpoint, max_num_seqs=6, max_num_batched_tokens=40)
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        BEAMS,
        SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=3, n=3, repetition_penalty=1.2),
        BEAMS,
    ]
    alone = [llm.generate_multimodal([REQUESTS[name]], own)[0] for name, own in zip(NAMES, params, strict=True)]
    together = llm.generate_multimodal([REQUESTS[name] for name in NAMES], params)
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
    assert_equal(found(together[1]), expected["one"])
    assert_idle(llm)


def test_beams_by_the_names_of_vllm(make_llm, checkpoint):
    llm = make_llm(checkpoint)
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, ignore_eos=True, temperature=0.0)
    same = SamplingParams(beam_width=3, n=3, max_tokens=5, length_penalty=0.5, ignore_eos=True)
    prompts = ["Hello", [5, 6]]
    for made, want in zip(llm.beam_search(prompts, params), llm.generate(prompts, same), strict=True):
        assert len(made.sequences) == 3
        for one, completion in zip(made.sequences, want.completions, strict=True):
            assert one.tokens == [*want.prompt_token_ids, *completion.token_ids]
            assert one.text == llm.tokenizer.decode(one.tokens)
            assert (one.cum_logprob, one.finish_reason) == (completion.cumulative_logprob, completion.finish_reason)
    for width in (0, -1, "2"):
        with pytest.raises(ValueError, match=f"beam_width must be .*, got {width!r}"):
            llm.beam_search("Hello", BeamSearchParams(beam_width=width, max_tokens=5))
    with pytest.raises(ValueError, match="BeamSearchParams does not support temperature=1"):
        BeamSearchParams(beam_width=2, max_tokens=5, temperature=1)


@every_way
@pytest.mark.parametrize(
    ("number", "keys"),
    [(0, {}), (3, {}), (20, {"n": 2, "stop_token_ids": OFTEN}), (3, {"beam_width": 1, "n": 1})],
    ids=["chosen", "top", "often", "one"],
)
def test_log_probabilities_are_those_of_the_hypothesis_as_a_prompt(number, keys, checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    params = SamplingParams(**{"beam_width": 4, "n": 4, "max_tokens": TOKENS, "logprobs": number, **keys})
    (output,) = llm.generate("One star.", params, use_tqdm=False)
    plain = SamplingParams(**{"beam_width": 4, "n": 4, "max_tokens": TOKENS, **keys})
    assert_equal(found(output), found(llm.generate("One star.", plain, use_tqdm=False)[0]))
    for completion in output.completions:
        prompt = {"prompt_token_ids": output.prompt_token_ids + completion.token_ids}
        (read,) = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=number), use_tqdm=False)
        wanted = read.prompt_logprobs[output.num_prompt_tokens :]
        own = sum(next(iter(one.values())) for one in completion.logprobs)
        assert own == pytest.approx(completion.cumulative_logprob)
        for got, want in zip(completion.logprobs, wanted, strict=True):
            assert [*got] == [*want] and [*got.values()] == pytest.approx([*want.values()], abs=1e-4)
            assert [one.rank for one in got.values()] == [one.rank for one in want.values()]
            assert all(one.decoded_token is not None for one in got.values())
