"""A batch that runs out of memory: nothing is lost, fewer run at once, and that passes."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.engine.sampler import Sampled
from tests.helpers.engines import assert_idle
from tests.helpers.requests import ask, noise_image

TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
THREE = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=3)
PICTURES = [noise_image(91, 64, 1), noise_image(60, 133, 2)]
OVERSIZED = noise_image(140, 140, 3)
REQUESTS = [
    (ask("Count the shapes."), GREEDY),
    (ask(PICTURES[0], "Describe this image."), THREE),
    (ask("First: ", PICTURES[1], " then: ", PICTURES[0], " what changed?"), GREEDY),
    (ask(PICTURES[0], "Describe this image."), GREEDY),
    (ask("And now?"), SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True)),
]
TOO_LARGE = torch.OutOfMemoryError("tried to allocate 8 GiB")

both_ways = pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])


@pytest.fixture
def make(checkpoint, make_llm):
    def make(ahead=False, **options):
        llm = make_llm(checkpoint, **{"kvcache_block_size": 4} | options)
        llm.engine._launches_ahead = ahead
        return llm

    return make


@pytest.fixture
def expected(make):
    return answers(make())


def add(llm, requests) -> list[str]:
    ids = []
    for request, params in requests:
        prompt = llm.processor(request)
        ids.append(llm.engine.add_request(prompt, params))
    return ids


def finish(llm) -> dict:
    """Outputs by request; the books balance after every step."""
    outputs = {}
    while not llm.engine.is_finished():
        outputs |= {output.request_id: output for output in llm.engine.step()[0]}
        llm.engine.scheduler.check()
        assert len(llm.engine.scheduler.running) <= llm.engine.scheduler.seq_limit
    assert_idle(llm)
    assert llm.engine._ahead is None
    return outputs


def answers(llm, requests=REQUESTS) -> list[list[list[int]]]:
    """Tokens of every answer to requests that all wait before the first step, and of which none may fail."""
    ids = add(llm, requests)
    outputs = finish(llm)
    assert [outputs[request_id].error for request_id in ids] == [None] * len(ids)
    return [[completion.token_ids for completion in outputs[request_id].completions] for request_id in ids]


def starve(llm, too_much, error=TOO_LARGE, after=False) -> list[int]:
    """Run out of memory where `too_much(batch)`, perhaps only after all was computed; the sizes that were tried."""
    run, sizes = llm.engine.model_runner.run, []

    def starved(batch, *rest):
        sizes.append(len(batch.query_lens))
        if too_much(batch):
            if after:
                run(batch, *rest)
            raise error
        return run(batch, *rest)

    llm.engine.model_runner.run = starved
    return sizes


def more_than(num_seqs: int):
    return lambda batch: len(batch.query_lens) > num_seqs


def has_oversized(batch) -> bool:
    return any(item.grid == (1, 10, 10) for item in batch.new_items)


def once(too_much):
    """The same, the first time alone."""
    calls = []
    return lambda batch: too_much(batch) and not calls and not calls.append(None)


@both_ways
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_seqs", [1, 2, 3])
def test_answers_are_those_of_an_undisturbed_run(num_seqs, caching, after, ahead, make, expected):
    llm = make(ahead, enable_prefix_caching=caching, max_num_seqs=7)
    sizes = starve(llm, more_than(num_seqs), after=after)
    assert answers(llm) == expected
    assert max(sizes) == 5  # all leaders in the first step


@both_ways
@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("at", range(TOKENS))
def test_a_want_of_memory_in_each_step(where, at, ahead, make, expected, monkeypatch):
    llm = make(ahead)
    owner = llm.engine.model_runner if where == "run" else Sampled
    original, calls = getattr(owner, where), []

    def failing(*args):
        calls.append(None)
        if len(calls) == at + 1:
            raise TOO_LARGE
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    assert answers(llm) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def allocate_on_the_cpu():
    return torch.empty(1 << 60, dtype=torch.uint8)


def allocate_in_python():
    return bytearray(1 << 62)


def allocate_on_a_gpu():
    raise TOO_LARGE


@pytest.mark.parametrize("allocate", [allocate_on_the_cpu, allocate_in_python, allocate_on_a_gpu])
def test_every_kind_of_want_of_memory_is_known(allocate, make, expected, monkeypatch, caplog):
    llm = make()
    run = llm.engine.model_runner.run

    def starved(batch, *rest):
        if len(batch.query_lens) > 2:
            allocate()
        return run(batch, *rest)

    monkeypatch.setattr(llm.engine.model_runner, "run", starved)
    assert answers(llm) == expected
    assert "a step of 5 sequences ran out of memory; they compute again, and at most 2 run at once" in caplog.text


@both_ways
def test_another_failure_ends_the_batch_with_errors(ahead, make, expected):
    llm = make(ahead)
    starve(llm, once(more_than(1)), RuntimeError("an illegal memory access was encountered"))
    ids = add(llm, REQUESTS)
    outputs = finish(llm)
    assert all("illegal memory access" in outputs[request_id].error for request_id in ids)
    assert llm.engine.scheduler.seq_limit == llm.engine.config.max_num_seqs
    assert answers(llm) == expected


@both_ways
@pytest.mark.parametrize("error", [TOO_LARGE, MemoryError()])
def test_when_nothing_ever_fits_each_request_fails_alone(error, ahead, make):
    llm = make(ahead)
    sizes = starve(llm, lambda batch: True, error)
    ids = add(llm, REQUESTS)
    outputs = finish(llm)
    assert all(type(error).__name__ in outputs[request_id].error for request_id in ids)
    assert sizes == [5, 2, 1, 1, 1, 1, 1]


@both_ways
@pytest.mark.parametrize("place", range(len(REQUESTS) + 1))
def test_an_oversized_picture_fails_and_its_neighbours_do_not(place, ahead, make, expected):
    llm = make(ahead)
    sizes = starve(llm, has_oversized)
    oversized = (ask(OVERSIZED, "Describe this image."), GREEDY)
    ids = add(llm, [*REQUESTS[:place], oversized, *REQUESTS[place:]])
    outputs = finish(llm)
    failed = outputs.pop(ids.pop(place))
    assert "tried to allocate 8 GiB" in failed.error and failed.finish_reason == "error"
    assert [[c.token_ids for c in outputs[request_id].completions] for request_id in ids] == expected
    assert 1 in sizes


@both_ways
def test_the_limit_grows_by_one_after_so_many_steps(ahead, make, monkeypatch):
    monkeypatch.setattr("mmvllm.engine.scheduler.RECOVERY_STEPS", 3)
    llm = make(ahead, max_num_seqs=4)
    limits, running = [], []
    starve(llm, once(more_than(1)))
    llm.engine.on_step = lambda stats: (
        limits.append(llm.engine.scheduler.seq_limit) or running.append(stats.num_running)
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers(llm, [(ask(text), params) for text in "abcdef"])
    assert limits[:10] == [2, 2, 2, 3, 3, 3, 4, 4, 4, 4] and max(limits) == 4
    assert running[:2] == [0, 2] and running[9] == 4


def test_a_second_want_of_memory_halves_what_was_tried(make):
    llm = make(max_num_seqs=64)
    sizes = starve(llm, more_than(2))
    answers(llm, [(ask("Count the shapes."), GREEDY)] * 12)
    assert sizes[:4] == [12, 6, 3, 1]


def test_two_steps_in_flight_halve_once(make, expected, monkeypatch, caplog):
    """The second was launched before it came out that the first had failed; it has failed too."""
    llm, calls = make(ahead=True), []
    starve(llm, lambda batch: calls.append(None) or len(calls) == 2)
    monkeypatch.setattr(Sampled, "tokens", lambda sampled: monkeypatch.undo() or (_ for _ in ()).throw(TOO_LARGE))
    assert answers(llm) == expected
    assert caplog.text.count("ran out of memory") == 1


def test_who_waits_for_memory_does_not_keep_others_from_being_launched_ahead(make):
    llm = make(ahead=True)
    starve(llm, once(more_than(1)))
    add(llm, [REQUESTS[0]] * 4)
    for _ in range(2):  # taken back, then half of it
        llm.engine.step()
    scheduler = llm.engine.scheduler
    assert len(scheduler.running) == len(scheduler.waiting) == 2 and llm.engine._ahead is not None
    finish(llm)


@pytest.mark.parametrize("stored", [0, 1])
def test_images_count_as_encoded_only_if_they_are(stored, make, expected):
    """Memory runs out among the pictures of a step: those before are kept, and the others are encoded again."""
    llm = make(enable_prefix_caching=False)

    class Starved(dict):
        """Rows by digest, of which only so many find memory at first."""

        def __setitem__(self, digest, rows):
            if len(self) == stored and not self.is_fed:
                self.is_fed = True
                raise TOO_LARGE
            super().__setitem__(digest, rows)

        is_fed = False

    llm.engine.model_runner._rows = Starved()
    encoded, encode = [], llm.engine.model_runner._encode

    def watched(items):
        encoded.extend(item.digest for item in items)
        encode(items)

    llm.engine.model_runner._encode = watched
    assert answers(llm) == expected
    assert len(set(encoded)) == 2 and len(encoded) == 4 - stored


def test_an_answer_aborted_while_its_step_is_taken_back(make, expected):
    """A step of two that was launched ahead has failed; when that comes out, one of the two has been aborted."""
    llm = make(ahead=True)
    calls = []
    starve(llm, lambda batch: calls.append(None) or len(calls) == 3)
    kept, aborted = add(llm, [REQUESTS[2], REQUESTS[0]])
    for _ in range(2):
        llm.engine.step()
    assert llm.engine._ahead.error is TOO_LARGE
    llm.engine.abort_request(aborted)
    assert finish(llm)[kept].completions[0].token_ids == expected[2][0]


def test_a_long_prompt_does_not_begin_for_ever(make, monkeypatch):
    """One picture a step and no prefix cache: were its steps to count, another would disturb it before it has ended."""
    monkeypatch.setattr("mmvllm.engine.scheduler.RECOVERY_STEPS", 2)
    llm = make(enable_prefix_caching=False, max_vision_patches=1, encoder_cache_bytes=24 * 64 * 4)
    sizes = starve(llm, more_than(1))
    add(llm, [(ask(*(noise_image(91, 64, seed) for seed in range(6))), GREEDY), REQUESTS[0]])
    for _ in range(100):
        llm.engine.step()
    assert llm.engine.is_finished() and 2 in sizes
