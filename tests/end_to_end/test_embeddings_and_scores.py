"""`LLM.embed`, `LLM.score` and `AsyncLLM.embed`: forms of requests, results and refusals."""

import asyncio

import numpy as np
import pytest
import torch

from mmvllm import AsyncLLM, EmbeddingOutput, RequestsAborted, SamplingParams
from mmvllm.pooling_params import PoolingParams
from tests.helpers.engine.async_engines import async_test
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.prompt_reads import REQUESTS, Expected
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.shapes import RICHEST, every_family

CHOICES = ["A circle.", " a square", [7, 8, 9], "A circle and a square"]


def test_every_form_of_a_request_has_a_vector(llm):
    ids = llm.tokenizer("Hello there")["input_ids"]
    forms = ["Hello there", ids, {"prompt": "Hello there"}, {"prompt_token_ids": np.array(ids)}, REQUESTS["two"]]
    *same, other = llm.embed(forms, use_tqdm=False)
    for output in same:
        np.testing.assert_allclose(output.embedding, same[0].embedding, atol=1e-6)
        assert output.num_prompt_tokens == len(ids) and output.num_image_tokens == 0
    assert other.num_image_tokens > 0 and np.linalg.norm(other.embedding) == pytest.approx(1, abs=1e-6)
    assert llm.embed("Hello there", use_tqdm=False)[0].embedding.shape == same[0].embedding.shape
    assert len(llm.embed(ids, use_tqdm=False)) == len(llm.embed(torch.tensor(ids), use_tqdm=False)) == 1
    assert llm.embed([], use_tqdm=False) == []


def test_dimensions_are_cut_before_the_norm(llm):
    whole = llm.embed("Hello", normalize=False, use_tqdm=False)[0].embedding
    cut = llm.embed("Hello", dimensions=7, use_tqdm=False)[0].embedding
    np.testing.assert_allclose(cut, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pooling": "cls"}, "pooling must be 'last' or 'mean', got 'cls'"),
        ({"normalize": 2}, "normalize must be True or False, got 2"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1, or None, got 0"),
        ({"dimensions": 1.5}, r"dimensions must be an integer.*, got 1\.5"),
        ({"dimensions": 4000}, "request 0: dimensions must be at most 64, the hidden size of the model, got 4000"),
        ({"requests": ""}, "request 0: prompt is empty"),
        ({"requests": 5}, "requests must be a request or a list of requests, got int"),
        ({"requests": {"prompt": "a", "sampling_params": {"n": 2}}}, "request 0: an embedding is not sampled"),
    ],
)
def test_a_wrong_argument_of_embed_is_named(keys, words, llm):
    assert llm.engine.model_config.hidden_size == 64
    with pytest.raises(ValueError, match=words):
        llm.embed(**{"requests": "Hello", "use_tqdm": False} | keys)


def test_a_bad_request_leaves_the_other_vectors_alone(llm):
    good, bad = llm.embed(["Hello", ""], on_error="return", use_tqdm=False)
    assert good.error is None and bad.embedding is None and "prompt is empty" in bad.error and bad.exception is not None


def expected_scores(reference, request: dict, token_ids: list[list[int]]) -> list[tuple[list[float], bool]]:
    found = []
    for own in token_ids:
        inputs = reference.inputs(request)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([own])], dim=1)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == reference.model.config.image_token_id).int()
        rows = reference.logprobs(inputs)[-len(own) :]
        is_greedy = rows.argmax(dim=-1).tolist() == own
        found.append((rows.gather(1, torch.tensor(own)[:, None]).squeeze(1).tolist(), is_greedy))
    return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 11, "async_scheduling": True}], ids=str)
@pytest.mark.parametrize("shape", RICHEST)
def test_scores_equal_transformers(shape, options, checkpoints, reference, make_llm):
    llm, hf = make_llm(checkpoints(shape), kvcache_block_size=4, **options), reference(shape)
    requests = [REQUESTS["text"], REQUESTS["two"]]
    likely = [hf.generate(request, 3) for request in requests]  # the most likely continuation of each
    lists = [[*CHOICES, greedy] for greedy in likely]
    for output, request, own in zip(llm.score(requests, lists, use_tqdm=False), requests, lists, strict=True):
        ids = [hf.tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in own]
        assert [score.token_ids for score in output.scores] == ids
        for score, (logprobs, is_greedy) in zip(output.scores, expected_scores(hf, request, ids), strict=True):
            np.testing.assert_allclose(score.logprobs, logprobs, atol=1e-4)
            assert score.logprob == pytest.approx(sum(score.logprobs)) and score.is_greedy is is_greedy
        assert output.scores[-1].is_greedy and not output.scores[2].is_greedy
        assert output.best == max(range(5), key=lambda i: output.scores[i].logprob)
    assert_idle(llm)


def test_a_prompt_is_computed_once_for_all_its_continuations(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]), kvcache_block_size=4)
    counts, encoded = [], []
    llm.engine.on_step = lambda stats: counts.append((stats.num_prefill_tokens, stats.num_images))
    output = llm.score(REQUESTS["two"], [[5, 6], [7], [8, 9, 10], [11] * 4, [12]], use_tqdm=False)[0]
    computed, encoded = map(sum, zip(*counts, strict=True))
    assert encoded == 2
    assert computed <= output.num_prompt_tokens + 2 + 4 * (4 + 4)


def test_the_same_continuations_serve_all_requests(llm):
    both = llm.score(["Hello", [5, 6, 7]], ["a", "b"], use_tqdm=False)
    assert [len(output.scores) for output in both] == [2, 2]
    alone = llm.score("Hello", ["a", "b"], use_tqdm=False)[0]
    np.testing.assert_allclose([s.logprob for s in both[0].scores], [s.logprob for s in alone.scores], atol=1e-4)


@pytest.mark.parametrize(
    ("requests", "continuations", "words"),
    [
        ("a", "b", "continuations must be a list of strings or token ids"),
        ("a", [], "continuations must be a list of strings or token ids"),
        ("a", [""], r"continuations\[0\] is empty; it needs at least one token"),
        ("a", ["b", 5], r"continuations\[1\] must be a string or a list of token ids.*, got 5"),
        ("a", [[True]], r"continuations\[0\]\[0\] must be a string.*, got True"),
        (["a", "b"], [["c"], []], r"continuations\[1\] must be a list of at least one string"),
        (["a", "b"], [["c"]], "continuations has 1 list for 2 requests; give one for each request"),
        ("a", ["b<|image_pad|>"], r"continuations\[0\] has the placeholder of an image or a video"),
        ("a", [[10**6]], r"continuations\[0\] has token ids outside \[0, "),
        ("", ["b"], "request 0: prompt is empty"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, ["b"], "request 0: sampling_params has no meaning for a score"),
        ("a", [[5] * 5000], "request 0: prompt has 500[0-9] tokens, the maximum context length is"),
    ],
)
def test_a_wrong_argument_of_score_is_named(requests, continuations, words, llm):
    with pytest.raises(ValueError, match=words):
        llm.score(requests, continuations, use_tqdm=False)


@pytest.mark.thinned(2)
@every_family
def test_embeddings_are_served_beside_completions(checkpoint, reference, request):
    """Each family in an AsyncLLM: vectors equal transformers'."""

    @async_test
    async def run():
        options = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
        async with AsyncLLM(checkpoint, **options) as engine:
            generation = engine.generate(REQUESTS["text"], SamplingParams(max_tokens=20, ignore_eos=True))
            deltas, *vectors = await asyncio.gather(
                collected(generation), *(engine.embed(REQUESTS["two"], pooling=pooling) for pooling in ("last", "mean"))
            )
            assert deltas[-1].output.completions[0].finish_reason == "length"
            expected = Expected.of(reference(request.node.callspec.params["checkpoint"]), REQUESTS["two"])
            for output, pooling in zip(vectors, ("last", "mean"), strict=True):
                assert isinstance(output, EmbeddingOutput) and output.num_prompt_tokens == len(expected.token_ids)
                np.testing.assert_allclose(output.embedding, expected.vector(PoolingParams(pooling=pooling)), atol=2e-5)
            await refusals(engine)

    run()


async def collected(stream) -> list:
    return [delta async for delta in stream]


async def refusals(engine: AsyncLLM) -> None:
    with pytest.raises(ValueError, match=r"dimensions must be at most.*, got 4000"):
        await engine.embed("Hello", dimensions=4000)
    with pytest.raises(ValueError, match=r"pooling must be .*, got 'max'"):
        await engine.embed("Hello", pooling="max")
    waiting = asyncio.create_task(engine.embed(ask(noise_image(90, 90, 4)), request_id="x"))
    await asyncio.sleep(0)
    await engine.abort("x")
    with pytest.raises(RequestsAborted, match="request 'x': aborted"):
        await waiting
