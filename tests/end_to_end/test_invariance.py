"""Greedy tokens of every family do not depend on batching, chunking, caching or preemption."""

from functools import partial
from math import prod

import pytest

from mmvllm import LLM, SamplingParams
from tests.helpers.engine.engines import assert_idle, run_at_once
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.engine.requests import ask, grids_of, noise_image, patches_of, ranges_of
from tests.helpers.models.shapes import every_family

pytestmark = [every_family, pytest.mark.thinned]
WAYS = [
    pytest.param({"async_scheduling": False}, id="plain"),
    pytest.param({"async_scheduling": True}, id="ahead"),
    pytest.param({"async_scheduling": True, "tensor_parallel_size": 2}, id="2 ranks", marks=pytest.mark.slow),
]
both_ways = pytest.mark.parametrize("make_llm", WAYS[:2], indirect=True)
every_way = pytest.mark.parametrize("make_llm", WAYS, indirect=True)

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
A, B, C = noise_image(91, 64, 1), noise_image(60, 133, 2), noise_image(200, 77, 3)
REQUESTS = {
    "text": ask("Count the shapes."),
    "one": ask(A, "Describe this image."),
    "two apart": ask("First: ", B, " then: ", C, " what changed?"),
    "three": ask(C, A, "and", B, "?"),
}


@pytest.fixture
def make_llm(request, make_llm, monkeypatch):
    """LLM(...) that exits after the test; where the test is marked `every_way`, in each of the `WAYS`."""
    use_rank_threads(monkeypatch)
    return partial(make_llm, **getattr(request, "param", {"async_scheduling": False}))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of each request alone, with one prefill of the whole prompt and without caches."""
    tokens = {}
    for name, request in REQUESTS.items():
        llm = LLM(checkpoint, dtype="float32", device="cpu", enable_prefix_caching=False, skip_warmup=True)
        tokens[name] = llm.generate_multimodal([request], GREEDY)[0].token_ids
        llm.exit()
    return tokens


def run(llm, names=tuple(REQUESTS), **keys) -> dict:
    """Outputs of the named requests; the engine must be idle afterwards."""
    outputs = llm.generate_multimodal([{**REQUESTS[name], **keys} for name in names], GREEDY)
    assert_idle(llm)
    return dict(zip(names, outputs, strict=True))


def tokens(outputs: dict) -> dict:
    return {name: output.token_ids for name, output in outputs.items()}


def count_encoded(llm) -> list[int]:
    """The number of patches of each ViT call from now on."""
    calls, vit = [], llm.engine.model_runner.model.visual
    vit.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    return calls


@pytest.mark.thinned(2)
@every_way
@pytest.mark.parametrize("order", [1, -1])
def test_batch_order(order, checkpoint, make_llm, expected):
    assert tokens(run(make_llm(checkpoint), tuple(REQUESTS)[::order])) == expected


@pytest.mark.thinned(1)
def test_after_a_warm_up(checkpoint, make_llm, expected):
    assert tokens(run(make_llm(checkpoint, skip_warmup=False))) == expected


@pytest.mark.thinned(2)
@every_way
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_max_num_seqs(max_num_seqs, checkpoint, make_llm, expected):
    assert tokens(run(make_llm(checkpoint, max_num_seqs=max_num_seqs))) == expected


@pytest.mark.essential(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_every_token_budget(name, checkpoint, make_llm, expected):
    """Chunks end at every position of the prompt, inside images too, and in mixed steps."""
    llm = make_llm(checkpoint, enable_prefix_caching=False, kvcache_block_size=4)
    length = len(llm.processor(REQUESTS[name]).token_ids)
    for budget in range(1, length + 2):
        llm.engine.scheduler.max_num_batched_tokens = budget
        assert run(llm, (name,))[name].token_ids == expected[name], f"budget {budget} of {length}"


@pytest.mark.thinned(2)
@every_way
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 30, 61])
def test_token_budgets_with_several_requests(budget, checkpoint, make_llm, expected):
    assert tokens(run(make_llm(checkpoint, max_num_batched_tokens=budget))) == expected


@pytest.mark.thinned(3)
@every_way
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 16, 64])
def test_prefix_cold_and_hit(block_size, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, kvcache_block_size=block_size)
    encoded = count_encoded(llm)
    assert tokens(run(llm)) == expected
    cold = len(encoded)
    warm = run(llm)
    assert tokens(warm) == expected
    for name, output in warm.items():  # whole blocks of all tokens but the last come from the cache
        assert output.num_cached_tokens == (output.num_prompt_tokens - 1) // block_size * block_size, name
    if block_size == 1:
        assert len(encoded) == cold, "an image inside a prefix hit must not be encoded"


@pytest.mark.slow
def test_prefix_hits_of_every_length(checkpoint, make_llm, expected):
    """One block per token; the cache holds the first k tokens, so hits end before, inside, between and after images."""
    llm = make_llm(checkpoint, kvcache_block_size=1)
    blocks = llm.engine.scheduler.block_manager
    prompt = llm.processor(REQUESTS["two apart"])
    run(llm, ("two apart",))
    inside = 0
    for hit in range(len(prompt.token_ids) - 1, -1, -1):
        forget_prefixes_longer_than(blocks, hit)
        output = run(llm, ("two apart",))["two apart"]
        assert output.num_cached_tokens == hit
        assert output.token_ids == expected["two apart"], f"hit of {hit} tokens"
        inside += any(at < hit < at + length for at, length in ranges_of(prompt))
    assert inside >= 8


def forget_prefixes_longer_than(blocks, num_blocks: int) -> None:
    """Drop cached blocks, the longest prefix first, as eviction does."""
    for block, key in sorted(blocks.keys.items(), key=lambda item: blocks.cached[item[1]][1])[num_blocks:]:
        del blocks.cached[key], blocks.keys[block]


@pytest.mark.essential(2)
@pytest.mark.slow
@every_way
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["text", "two apart"])
def test_preemption_at_each_step(name, caching, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, enable_prefix_caching=caching, kvcache_block_size=4, max_num_batched_tokens=9)
    engine = llm.engine
    prompt = llm.processor(REQUESTS[name])
    step = 0
    while True:
        engine.add_request(prompt, GREEDY)
        steps, outputs = 0, []
        while not engine.is_finished():
            outputs += engine.step()[0]
            if steps == step and engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[0])
                engine.scheduler.check()
            steps += 1
        assert [output.token_ids for output in outputs] == [expected[name]], f"preempted after step {step}"
        assert outputs[0].finish_reason == "length"
        step += 1
        if step > steps:
            break
    assert step > 12


def blocks_of(llm, name: str, block_size: int) -> int:
    """Blocks that a request with its completion needs."""
    return -(-(len(llm.processor(REQUESTS[name]).token_ids) + TOKENS) // block_size)


@pytest.mark.thinned(1)
@every_way
@pytest.mark.parametrize("spare_blocks", [0, 5, 9])
def test_preemption_when_blocks_run_out(spare_blocks, checkpoint, make_llm, expected):
    """The prompts fit together but their completions do not: the last sequences are preempted and resumed."""
    num_blocks = blocks_of(make_llm(checkpoint), "two apart", 4) + spare_blocks
    llm = make_llm(checkpoint, kvcache_block_size=4, num_kvcache_blocks=num_blocks, enable_prefix_caching=False)
    names = ["text", "one", "text", "one", "two apart", "text"]
    assert run_at_once(llm, [REQUESTS[name] for name in names]) == [expected[name] for name in names]
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm)


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("num_images", [1, 1.5, 2])
@pytest.mark.parametrize("budget", [5, 4096])
def test_encoder_cache_eviction(num_images, budget, checkpoint, make_llm, expected):
    """Space for the rows of one or two images: images are evicted and encoded again."""
    probe = make_llm(checkpoint)
    bytes_per_embed = probe.engine.encoder_cache.bytes_per_embed
    assert bytes_per_embed == 4 * probe.engine.model_runner.model.config.mm_embed_size
    largest = max(prod(grids_of(probe.processor(ask(x)))[0]) // 4 for x in (A, B, C))
    llm = make_llm(
        checkpoint,
        encoder_cache_bytes=int(largest * bytes_per_embed * num_images),
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    assert tokens(run(llm)) == expected
    assert tokens(run(llm)) == expected


@pytest.mark.thinned(2)
@every_way
@pytest.mark.parametrize("patches", [1, 30, 60, 100])
def test_vision_patch_budget(patches, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, max_vision_patches=patches, enable_prefix_caching=False)
    encoded = count_encoded(llm)
    assert tokens(run(llm)) == expected
    sizes = [len(pixels) for x in (A, B, C) for pixels in patches_of(llm.processor(ask(x)))]
    assert max(encoded) <= max(patches, *sizes)


@pytest.mark.thinned(2)
@both_ways  # only calls of rank 0 are counted
def test_an_image_is_encoded_once(checkpoint, make_llm, expected):
    """Requests with image A in the same and in later steps, with and without a common prefix: one ViT pass."""
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    encoded = count_encoded(llm)
    outputs = run(llm, ("one", "three", "one"))
    assert outputs["one"].token_ids == expected["one"] and outputs["three"].token_ids == expected["three"]
    run(llm, ("one",))
    patches = {len(patches_of(llm.processor(ask(x)))[0]) for x in (A, B, C)}
    assert sum(encoded) == sum(patches)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_share_the_blocks_of_the_prompt(block_size, caching, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, kvcache_block_size=block_size, enable_prefix_caching=caching)
    manager = llm.engine.scheduler.block_manager
    most_used, allocate = [], manager.allocate

    def watched(seq, num_tokens):
        copies = allocate(seq, num_tokens)
        most_used.append(manager.num_blocks - manager.num_free_blocks)
        return copies

    manager.allocate = watched
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=4)
    for name, request in REQUESTS.items():
        output = llm.generate_multimodal([{**request, "cache_salt": name}], params)[0]
        assert [completion.token_ids for completion in output.completions] == [expected[name]] * 4
        prompt_blocks = -(-output.num_prompt_tokens // block_size)
        completion_blocks = -(-TOKENS // block_size) + 2
        assert max(most_used) <= prompt_blocks + 4 * completion_blocks, "the prompt's blocks must be shared"
        most_used.clear()
        assert_idle(llm)


@pytest.mark.thinned(2)
@every_way
def test_n_completions_with_few_blocks(checkpoint, make_llm, expected):
    num_blocks = blocks_of(make_llm(checkpoint), "two apart", 4) + 1
    llm = make_llm(checkpoint, kvcache_block_size=4, num_kvcache_blocks=num_blocks, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=5)
    output = llm.generate_multimodal([REQUESTS["two apart"]], params)[0]
    assert [completion.token_ids for completion in output.completions] == [expected["two apart"]] * 5
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm)


@pytest.mark.thinned(2)
@every_way
def test_seeded_sampling_does_not_depend_on_the_batch(checkpoint, make_llm):
    llm = make_llm(checkpoint)
    names = list(REQUESTS)
    params = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.3, seed=8, top_k=50, max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=9, top_p=0.9, max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=7, min_p=0.02, max_tokens=TOKENS, ignore_eos=True),
    ]
    together = llm.generate_multimodal(list(REQUESTS.values()), params)
    for name, own, output in zip(names, params, together, strict=True):
        assert llm.generate_multimodal([REQUESTS[name]], own)[0].token_ids == output.token_ids
    changed = SamplingParams(temperature=0.9, seed=70, max_tokens=TOKENS, ignore_eos=True)
    assert llm.generate_multimodal([REQUESTS["text"]], changed)[0].token_ids != together[0].token_ids
