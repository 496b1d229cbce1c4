"""Random runs with aborts, preemptions and failures: invariants hold after every step, and nothing leaks."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmvllm import LLM, SamplingParams
from tests.helpers.engine.requests import ask, frames, noise_image

IMAGES = [noise_image(40, 56, 1), noise_image(91, 64, 2), noise_image(64, 91, 3)]
CLIP = frames(6, 56, 84)
PROMPTS = [
    ask("Count the shapes."),
    ask(IMAGES[0], "What?"),
    ask("So: ", IMAGES[1], " and ", IMAGES[2]),
    ask(IMAGES[2], IMAGES[0], IMAGES[2]),
    ask("Of ", CLIP, " and ", IMAGES[0], "?"),
    ask(CLIP[2:], "Then?"),  # shares temporal patches
]

ERRORS = [RuntimeError("illegal memory access"), torch.OutOfMemoryError("tried to allocate 8 GiB")]

request = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 9),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(-1, 1),  # priority
    st.sampled_from([None, "salt"]),
)
action = st.one_of(
    st.tuples(st.just("add"), request),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.tuples(st.sampled_from(["before", "after"]), st.sampled_from(ERRORS))),
)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    llm = LLM(checkpoint, dtype="float32", device="cpu", num_kvcache_blocks=64, skip_warmup=True)
    return llm, [llm.processor(prompt) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("launches_ahead", [False, True])
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    actions=st.lists(action, max_size=30),
    block_size=st.sampled_from([1, 4, 7]),
    spare_blocks=st.integers(0, 40),
    budget=st.sampled_from([1, 5, 17, 4096]),
    caching=st.booleans(),
)
def test_invariants_hold(launches_ahead, actions, block_size, spare_blocks, budget, caching, checkpoint, prompts):
    # Enough blocks for the longest request alone, and some more.
    longest = max(len(prompt.token_ids) for prompt in prompts[1]) + 9
    llm = LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        kvcache_block_size=block_size,
        num_kvcache_blocks=-(-longest // block_size) + spare_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        encoder_cache_bytes=12 * 64 * 4,
        enable_prefix_caching=caching,
        skip_warmup=True,
        async_scheduling=launches_ahead,
    )
    engine = llm.engine
    added, ended = set(), set()

    def step():
        outputs, _ = engine.step()
        engine.scheduler.check()
        for output in outputs:
            assert output.request_id not in ended, "a request must end once"
            ended.add(output.request_id)

    for kind, value in actions:
        if kind == "add":
            which, max_tokens, n, priority, salt = value
            params = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0)
            prompt = prompts[1][which]
            added.add(engine.add_request(prompt, params, priority=priority, cache_salt=salt))
        elif kind == "step":
            for _ in range(value):
                step()
        elif kind == "abort" and engine.scheduler.groups:
            request_id = sorted(engine.scheduler.groups)[value % len(engine.scheduler.groups)]
            assert engine.abort_request(request_id).finish_reason in ("aborted", "eos", "length")
            ended.add(request_id)
        elif kind == "preempt" and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[value % len(engine.scheduler.running)])
        elif kind == "fail" and not engine.is_finished():
            fail_once(engine, *value)
            step()
        engine.scheduler.check()
    while not engine.is_finished():
        step()
    assert ended == added
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    engine.encoder_cache.check(set())
    llm.exit()


def fail_once(engine, when: str, error: RuntimeError) -> None:
    """Make the next step fail, before or after it encodes images and writes KV."""
    run = engine.model_runner.run

    def failing(*arguments):
        engine.model_runner.run = run
        if when == "after":
            run(*arguments)
        raise error

    engine.model_runner.run = failing
