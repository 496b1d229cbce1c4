"""Greedy tokens of prompts with clips do not depend on batching, chunking, caching or preemption."""

from functools import partial

import pytest

from mmvllm import LLM, SamplingParams
from mmvllm.errors import RequestError
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, digests_of, frames, noise_image, ranges_of
from tests.helpers.models.shapes import every_family

pytestmark = [every_family, pytest.mark.thinned]
both_ways = pytest.mark.parametrize("make_llm", [False, True], ids=["plain", "ahead"], indirect=True)

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
IMAGE, CLIP = noise_image(91, 64, 1), frames(6, 84, 56, 2)
# Two temporal patches of CLIP and a new one; three equal ones; more temporal patches than rows or columns.
SHARING, STILL, LONG = CLIP[2:] + frames(2, 84, 56, 3), CLIP[:1] * 6, frames(12, 56, 56, 4)
REQUESTS = {
    "text": ask("Count the shapes."),
    "clip": ask(CLIP, "What?"),
    "mixed": ask(IMAGE, SHARING, "and ", CLIP, "?", mm_processor_kwargs={"fps": 5}),
    "still": ask("So: ", STILL),
    "long": ask(LONG, "?"),
}


@pytest.fixture
def make_llm(request, make_llm):
    """LLM(...) that exits after the test; where the test is marked `both_ways`, once with steps launched ahead."""
    return partial(make_llm, async_scheduling=getattr(request, "param", False))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of each request alone, with one prefill of the whole prompt and without caches."""
    tokens = {}
    for name, request in REQUESTS.items():
        llm = LLM(checkpoint, dtype="float32", device="cpu", enable_prefix_caching=False, skip_warmup=True)
        tokens[name] = llm.generate_multimodal([request], GREEDY)[0].token_ids
        llm.exit()
    return tokens


def run(llm, names=tuple(REQUESTS)) -> dict:
    """Tokens of the named requests; the engine must be idle afterwards."""
    outputs = llm.generate_multimodal([REQUESTS[name] for name in names], GREEDY)
    assert_idle(llm)
    return {name: output.token_ids for name, output in zip(names, outputs, strict=True)}


def count_encoded(llm) -> list[int]:
    """The number of patches of each ViT call from now on."""
    calls, vit = [], llm.engine.model_runner.model.visual
    vit.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    return calls


def patches_of(llm, *names: str) -> int:
    """Patches of the temporal patches and images of some requests, each content once."""
    items = [item for name in names for item in llm.processor(REQUESTS[name]).mm_items]
    return sum({item.digest: item.num_patches for item in items}.values())


@pytest.mark.thinned(1)
@both_ways
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 7}, {"kvcache_block_size": 5}], ids=str
)
@pytest.mark.parametrize("order", [1, -1])
def test_batches(order, options, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, **options)
    for _ in range(2):  # cold, then from the caches
        assert run(llm, tuple(REQUESTS)[::order]) == expected


@pytest.mark.slow
@pytest.mark.thinned(2)
def test_every_token_budget(checkpoint, make_llm, expected):
    """Chunks end at every position of the prompt, inside each temporal patch and between them."""
    llm = make_llm(checkpoint, enable_prefix_caching=False, kvcache_block_size=4)
    for budget in range(1, len(llm.processor(REQUESTS["clip"]).token_ids) + 2):
        llm.engine.scheduler.max_num_batched_tokens = budget
        assert run(llm, ("clip",))["clip"] == expected["clip"], f"budget {budget}"


@pytest.mark.thinned(1)
def test_prefix_hits_of_every_length(checkpoint, make_llm, expected):
    """One block per token; the cache holds the first k tokens, so hits end inside and between temporal patches."""
    llm = make_llm(checkpoint, kvcache_block_size=1)
    blocks, prompt = llm.engine.scheduler.block_manager, llm.processor(REQUESTS["clip"])
    run(llm, ("clip",))
    inside = 0
    for hit in range(len(prompt.token_ids) - 1, -1, -1):
        for block, key in sorted(blocks.keys.items(), key=lambda item: blocks.cached[item[1]][1])[hit:]:
            del blocks.cached[key], blocks.keys[block]
        [output] = llm.generate_multimodal([REQUESTS["clip"]], GREEDY)
        assert output.num_cached_tokens == hit
        assert output.token_ids == expected["clip"], f"hit of {hit} tokens"
        inside += any(at < hit < at + length for at, length in ranges_of(prompt))
    assert inside >= 6


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_at_each_step(caching, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, enable_prefix_caching=caching, kvcache_block_size=4, max_num_batched_tokens=4)
    engine, prompt, step, steps = llm.engine, llm.processor(REQUESTS["clip"]), 0, 0
    while step <= steps:
        engine.add_request(prompt, GREEDY, cache_salt=str(step))
        steps, outputs = 0, []
        while not engine.is_finished():
            outputs += engine.step()[0]
            if steps == step and engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[0])
                engine.scheduler.check()
            steps += 1
        assert [output.token_ids for output in outputs] == [expected["clip"]], f"preempted after step {step}"
        step += 1
    assert step > 12


def largest_item(llm) -> int:
    """Rows of the largest image or temporal patch."""
    return max(item.num_tokens for request in REQUESTS.values() for item in llm.processor(request).mm_items)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("budget", [5, 4096])
def test_an_encoder_cache_with_room_for_one_temporal_patch(budget, checkpoint, make_llm, expected):
    """Clips are longer than the cache: their parts are encoded one after the other, while the prompt is computed."""
    probe = make_llm(checkpoint)
    room = largest_item(probe) * probe.engine.encoder_cache.bytes_per_embed
    options = {"encoder_cache_bytes": room, "max_num_batched_tokens": budget, "enable_prefix_caching": False}
    llm = make_llm(checkpoint, **options)
    for _ in range(2):
        assert run(llm) == expected


@pytest.mark.thinned(2)
def test_a_temporal_patch_that_does_not_fit_is_refused(checkpoint, make_llm):
    probe = make_llm(checkpoint)
    rows = probe.processor(REQUESTS["clip"]).mm_items[0].num_tokens
    room = (rows - 1) * probe.engine.encoder_cache.bytes_per_embed
    llm = make_llm(checkpoint, encoder_cache_bytes=room)
    message = (
        rf"video 0: a temporal patch has {rows} tokens, .* encoder_cache_bytes is {room}; raise it or lower max_pixels"
    )
    with pytest.raises(RequestError, match=message) as error:
        llm.generate_multimodal([REQUESTS["clip"]], GREEDY)
    assert error.value.video_index == 0 and error.value.limit == room
    with pytest.raises(RequestError, match=r"video 1: a temporal patch has") as error:
        llm.generate_multimodal([ask(frames(4, 56, 56), CLIP)], GREEDY)
    assert error.value.video_index == 1


@pytest.mark.thinned(2)
@both_ways
@pytest.mark.parametrize("patches", [1, 30])
def test_a_clip_is_encoded_in_parts(patches, checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, max_vision_patches=patches, enable_prefix_caching=False)
    encoded = count_encoded(llm)
    assert run(llm) == expected
    assert max(encoded) <= max(patches, 4 * largest_item(llm))
    assert sum(encoded) == patches_of(llm, *REQUESTS)


def test_the_prompt_is_computed_up_to_what_is_encoded(checkpoint, make_llm):
    """The first step encodes one temporal patch and computes all tokens before the second one."""
    llm = make_llm(checkpoint, max_vision_patches=1)
    prompt = llm.processor(REQUESTS["clip"])
    llm.engine.add_request(prompt, GREEDY)
    for item in prompt.mm_items[1:]:
        llm.engine.step()
        [seq] = llm.engine.scheduler.running
        assert seq.num_computed_tokens == item.offset
    while not llm.engine.is_finished():
        llm.engine.step()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("caching", [True, False])
def test_two_questions_about_one_clip_encode_it_once(caching, checkpoint, make_llm):
    llm = make_llm(checkpoint, enable_prefix_caching=caching)
    encoded, other = count_encoded(llm), ask("Is it ", CLIP, " a bar?")
    first = llm.generate_multimodal([REQUESTS["clip"], other], GREEDY)
    second = llm.generate_multimodal([ask(CLIP, "Which colour?"), other], GREEDY)
    assert sum(encoded) == patches_of(llm, "clip")
    assert second[1].token_ids == first[1].token_ids


def test_equal_frames_are_encoded_once(checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    encoded = count_encoded(llm)
    assert run(llm, ("still",))["still"] == expected["still"]
    assert sum(encoded) == llm.processor(REQUESTS["still"]).mm_items[0].num_patches


@both_ways
def test_frames_that_clips_share_are_encoded_once(checkpoint, make_llm, expected):
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    encoded = count_encoded(llm)
    assert run(llm, ("mixed",))["mixed"] == expected["mixed"]
    items = llm.processor(REQUESTS["mixed"]).mm_items
    shared = {item.digest for item in items[1:4]} & {item.digest for item in items[4:]}
    assert len(shared) == 2 and sum(encoded) == patches_of(llm, "mixed")


@pytest.mark.thinned(2)
def test_another_rate_shares_nothing(checkpoint, make_llm):
    """Where the rate is in the positions, a hit would be wrong; the text before the clip is shared."""
    llm = make_llm(checkpoint, kvcache_block_size=1)
    slow, fast = (ask(CLIP, "What?", mm_processor_kwargs={"fps": fps}) for fps in (1, 8))
    alone = [make_llm(checkpoint).generate_multimodal([one], GREEDY)[0].token_ids for one in (slow, fast)]
    outputs = [llm.generate_multimodal([one], GREEDY)[0] for one in (slow, fast)]
    assert [output.token_ids for output in outputs] == alone
    assert outputs[1].num_cached_tokens <= ranges_of(llm.processor(fast))[0][0]
    assert not {*digests_of(llm.processor(slow))} & {*digests_of(llm.processor(fast))}


@pytest.mark.thinned(2)
@both_ways
@pytest.mark.parametrize("clip", [CLIP, LONG], ids=["short", "long"])
def test_a_second_turn_continues_from_the_cache(clip, checkpoint, make_llm):
    """Tokens of a completion have the same positions as in the next turn's prompt, also after a long clip."""
    warm, cold = make_llm(checkpoint, kvcache_block_size=1), make_llm(checkpoint, enable_prefix_caching=False)
    question = ask(clip, "And?")
    [first] = warm.generate_multimodal([question], GREEDY)
    ids = [*warm.processor(question).token_ids, *first.token_ids, 30, 31]
    second = {"prompt_token_ids": ids, "videos": [clip]}
    [got], [want] = (llm.generate_multimodal([second], GREEDY) for llm in (warm, cold))
    assert got.num_cached_tokens == len(ids) - 3 and got.token_ids == want.token_ids
