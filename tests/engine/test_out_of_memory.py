"""A batch that runs out of memory is computed again in smaller parts; no request is lost, and the limit recovers."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.sampling.sampler import AsyncSamplerOutput
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, noise_image

pytestmark = pytest.mark.thinned

TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
THREE = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=3)
IMAGES = [noise_image(91, 64, 1), noise_image(60, 133, 2)]
OVERSIZED = noise_image(140, 140, 3)
REQUESTS = [
    (ask("Count the shapes."), GREEDY),
    (ask(IMAGES[0], "Describe this image."), THREE),
    (ask("First: ", IMAGES[1], " then: ", IMAGES[0], " what changed?"), GREEDY),
    (ask(IMAGES[0], "Describe this image."), GREEDY),
    (ask("And now?"), SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True)),
]
TOO_LARGE = torch.OutOfMemoryError("tried to allocate 8 GiB")

with_and_without_launching_ahead = pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])


@pytest.fixture
def make(checkpoint, make_llm):
    def make(ahead=False, **options):
        return make_llm(checkpoint, **{"kvcache_block_size": 4, "async_scheduling": ahead} | options)

    return make


@pytest.fixture
def expected(make):
    return completions(make())


def add(llm, requests) -> list[str]:
    ids = []
    for request, params in requests:
        prompt = llm.processor(request)
        ids.append(llm.engine.add_request(prompt, params))
    return ids


def finish(llm) -> dict:
    """Outputs by request id; the invariants of the scheduler hold after every step."""
    outputs = {}
    while not llm.engine.is_finished():
        outputs |= {output.request_id: output for output in llm.engine.step()[0]}
        llm.engine.scheduler.check()
        assert len(llm.engine.scheduler.running) <= llm.engine.scheduler.seq_limit
    assert_idle(llm)
    assert llm.engine._ahead is None
    return outputs


def completions(llm, requests=REQUESTS) -> list[list[list[int]]]:
    """Tokens of every completion. All requests are added before the first step, and none may fail."""
    ids = add(llm, requests)
    outputs = finish(llm)
    assert [outputs[request_id].error for request_id in ids] == [None] * len(ids)
    return [[completion.token_ids for completion in outputs[request_id].completions] for request_id in ids]


def limit_memory(llm, too_much, error=TOO_LARGE, after=False) -> list[int]:
    """Raise `error` for batches with `too_much(batch)`, before or after they run; returns the sizes of all batches."""
    run, sizes = llm.engine.model_runner.run, []

    def limited(batch, *rest):
        sizes.append(batch.num_seqs)
        if too_much(batch):
            if after:
                run(batch, *rest)
            raise error
        return run(batch, *rest)

    llm.engine.model_runner.run = limited
    return sizes


def more_than(limit: int):
    return lambda inputs: inputs.num_seqs > limit


def has_oversized(batch) -> bool:
    return any(item.grid == (1, 10, 10) for item in batch.new_mm_items)


def once(too_much):
    """Return a condition that holds only the first time `too_much` does."""
    calls = []
    return lambda batch: too_much(batch) and not calls and not calls.append(None)


@with_and_without_launching_ahead
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_seqs", [1, 2, 3])
def test_completions_equal_those_of_a_run_with_enough_memory(num_seqs, caching, after, ahead, make, expected):
    llm = make(ahead, enable_prefix_caching=caching, max_num_seqs=7)
    sizes = limit_memory(llm, more_than(num_seqs), after=after)
    assert completions(llm) == expected
    assert max(sizes) == 5  # the first sequence of each request, in the first step


@pytest.mark.thinned(2)
@with_and_without_launching_ahead
@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("at", range(TOKENS))
def test_out_of_memory_in_each_step(where, at, ahead, make, expected, monkeypatch):
    llm = make(ahead)
    owner = llm.engine.model_runner if where == "run" else AsyncSamplerOutput
    original, calls = getattr(owner, where), []

    def failing(*args):
        calls.append(None)
        if len(calls) == at + 1:
            raise TOO_LARGE
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    assert completions(llm) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def allocate_on_the_cpu():
    return torch.empty(1 << 60, dtype=torch.uint8)


def allocate_in_python():
    return bytearray(1 << 62)


def allocate_on_a_gpu():
    raise TOO_LARGE


@pytest.mark.parametrize("allocate", [allocate_on_the_cpu, allocate_in_python, allocate_on_a_gpu])
def test_out_of_memory_errors_of_every_kind_are_recognized(allocate, make, expected, monkeypatch, caplog):
    llm = make()
    run = llm.engine.model_runner.run

    def limited(batch, *rest):
        if batch.num_seqs > 2:
            allocate()
        return run(batch, *rest)

    monkeypatch.setattr(llm.engine.model_runner, "run", limited)
    assert completions(llm) == expected
    assert "a step of 5 sequences ran out of memory; they are recomputed, and at most 2 run at once" in caplog.text


@with_and_without_launching_ahead
def test_another_error_fails_the_requests_of_the_batch(ahead, make, expected):
    llm = make(ahead)
    limit_memory(llm, once(more_than(1)), RuntimeError("a kernel has no result"))
    ids = add(llm, REQUESTS)
    outputs = finish(llm)
    assert all("a kernel has no result" in outputs[request_id].error for request_id in ids)
    assert llm.engine.scheduler.seq_limit == llm.engine.config.max_num_seqs
    assert completions(llm) == expected


@with_and_without_launching_ahead
@pytest.mark.parametrize("error", [TOO_LARGE, MemoryError()])
def test_a_request_that_fails_alone_ends_with_an_error(error, ahead, make):
    llm = make(ahead)
    sizes = limit_memory(llm, lambda batch: True, error)
    ids = add(llm, REQUESTS)
    outputs = finish(llm)
    assert all(type(error).__name__ in outputs[request_id].error for request_id in ids)
    assert sizes == [5, 2, 1, 1, 1, 1, 1]


@pytest.mark.thinned(3)
@with_and_without_launching_ahead
@pytest.mark.parametrize("place", range(len(REQUESTS) + 1))
def test_a_request_with_an_oversized_image_fails_alone(place, ahead, make, expected):
    llm = make(ahead)
    sizes = limit_memory(llm, has_oversized)
    oversized = (ask(OVERSIZED, "Describe this image."), GREEDY)
    ids = add(llm, [*REQUESTS[:place], oversized, *REQUESTS[place:]])
    outputs = finish(llm)
    failed = outputs.pop(ids.pop(place))
    assert "tried to allocate 8 GiB" in failed.error and failed.finish_reason == "error"
    assert [[c.token_ids for c in outputs[request_id].completions] for request_id in ids] == expected
    assert 1 in sizes


@with_and_without_launching_ahead
def test_the_limit_recovers_by_one_after_recovery_steps(ahead, make, monkeypatch):
    monkeypatch.setattr("mmvllm.scheduler.scheduler.RECOVERY_STEPS", 3)
    llm = make(ahead, max_num_seqs=4)
    limits, running = [], []
    limit_memory(llm, once(more_than(1)))
    llm.engine.on_step = lambda stats: (
        limits.append(llm.engine.scheduler.seq_limit) or running.append(stats.num_running)
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    completions(llm, [(ask(text), params) for text in "abcdef"])
    assert limits[:10] == [2, 2, 2, 3, 3, 3, 4, 4, 4, 4] and max(limits) == 4
    assert running[:2] == [0, 2] and running[9] == 4


def test_each_out_of_memory_error_halves_the_batch(make):
    llm = make(max_num_seqs=64)
    sizes = limit_memory(llm, more_than(2))
    completions(llm, [(ask("Count the shapes."), GREEDY)] * 12)
    assert sizes[:4] == [12, 6, 3, 1]


def test_two_failed_steps_in_flight_halve_the_batch_once(make, expected, monkeypatch, caplog):
    """The second step was launched before the failure of the first was known, and fails too."""
    llm, calls = make(ahead=True), []
    limit_memory(llm, lambda batch: calls.append(None) or len(calls) == 2)
    monkeypatch.setattr(
        AsyncSamplerOutput, "tokens", lambda sampled: monkeypatch.undo() or (_ for _ in ()).throw(TOO_LARGE)
    )
    assert completions(llm) == expected
    assert caplog.text.count("ran out of memory") == 1


def test_steps_are_launched_ahead_while_sequences_wait_for_memory(make):
    llm = make(ahead=True)
    limit_memory(llm, once(more_than(1)))
    add(llm, [REQUESTS[0]] * 4)
    for _ in range(2):  # the first is rolled back, the second has half of its sequences
        llm.engine.step()
    scheduler = llm.engine.scheduler
    assert len(scheduler.running) == len(scheduler.waiting) == 2 and llm.engine._ahead is not None
    finish(llm)


@pytest.mark.parametrize("stored", [0, 1])
def test_images_count_as_encoded_only_if_they_are(stored, make, expected):
    """Memory runs out after `stored` images of a step: those are kept, the others are encoded again."""
    llm = make(enable_prefix_caching=False)

    class LimitedRows(dict):
        """Rows by digest; storing the next after `stored` ones fails once."""

        def __setitem__(self, digest, rows):
            if len(self) == stored and not self.has_failed:
                self.has_failed = True
                raise TOO_LARGE
            super().__setitem__(digest, rows)

        has_failed = False

    llm.engine.model_runner._encoder_outputs = LimitedRows()
    encoded, encode = [], llm.engine.model_runner._encode_own

    def watched(items):
        encoded.extend(item.digest for item in items)
        encode(items)

    llm.engine.model_runner._encode_own = watched
    assert completions(llm) == expected
    assert len(set(encoded)) == 2 and len(encoded) == 4 - stored


def test_an_abort_before_the_failure_of_a_launched_step_is_known(make, expected):
    """A step of two requests that was launched ahead has failed; one is aborted before that is known."""
    llm = make(ahead=True)
    calls = []
    limit_memory(llm, lambda batch: calls.append(None) or len(calls) == 3)
    kept, aborted = add(llm, [REQUESTS[2], REQUESTS[0]])
    for _ in range(2):
        llm.engine.step()
    assert llm.engine._ahead.error is TOO_LARGE
    llm.engine.abort_request(aborted)
    assert finish(llm)[kept].completions[0].token_ids == expected[2][0]


def test_a_long_prompt_is_not_restarted_forever(make, monkeypatch):
    """One image per step, no prefix cache: if prefill steps raised the limit, the prompt would be preempted again."""
    monkeypatch.setattr("mmvllm.scheduler.scheduler.RECOVERY_STEPS", 2)
    llm = make(enable_prefix_caching=False, max_vision_patches=1, encoder_cache_bytes=24 * 64 * 4)
    sizes = limit_memory(llm, more_than(1))
    add(llm, [(ask(*(noise_image(91, 64, seed) for seed in range(6))), GREEDY), REQUESTS[0]])
    for _ in range(100):
        llm.engine.step()
    assert llm.engine.is_finished() and 2 in sizes
