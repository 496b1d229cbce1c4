"""Limits on waiting requests and prepared bytes, positions in the queue, and statistics."""

import asyncio
import threading

import numpy as np
import pytest

from mmvllm.entrypoints import request_queue
from mmvllm.entrypoints.request_queue import NUM_WORKERS, PreparationQueue, slowest_media
from mmvllm.errors import EngineBusy
from tests.helpers.engine.async_engines import (
    LONG,
    QUESTION,
    SHORT,
    async_test,
    collect,
    reached,
    wait_until,
)
from tests.helpers.engine.requests import ask, noise_image


@async_test
async def test_requests_beyond_max_waiting_are_refused_and_queue_positions_are_reported(make_engine):
    engine = make_engine(max_num_seqs=1, max_waiting=2)
    streams = [engine.generate(QUESTION, LONG, name) for name in ("a", "b", "c")]
    tasks = [asyncio.create_task(anext(streams[0]))]
    await tasks[0]
    for stream, name in zip(streams[1:], "bc", strict=True):
        tasks.append(asyncio.create_task(anext(stream)))
        await reached(lambda name=name: name in engine._streams, "admitted")
    assert [engine.position(name) for name in ("a", "b", "c", "d")] == [0, 1, 2, None]
    with pytest.raises(EngineBusy, match="3 requests are being served or waiting"):
        await collect(engine, QUESTION, SHORT)
    assert engine.num_refused == 1
    await streams[0].aclose()
    (deltas, _), *_ = await asyncio.gather(collect(engine, QUESTION, SHORT), engine.abort("b"), engine.abort("c"))
    assert len(deltas[-1].output.token_ids) == 6
    await asyncio.gather(*tasks)


@async_test
async def test_a_queue_position_is_consistent_while_requests_begin(make_engine):
    engine = make_engine(max_num_seqs=1)

    class Beginning:  # has begun from the second look on
        looks = 0

        @property
        def has_begun(self) -> bool:
            self.looks += 1
            return self.looks > 1

    engine._streams["it"] = Beginning()
    assert engine.position("it") in (0, 1)
    del engine._streams["it"]


@pytest.mark.slow
@async_test
async def test_prepared_bytes_are_bounded_and_all_requests_complete(make_engine, monkeypatch):
    monkeypatch.setattr(request_queue, "MAX_BYTES", 1)
    engine = make_engine(max_num_seqs=2)
    results = await asyncio.gather(*(collect(engine, ask(noise_image(60, 60, i), "?"), SHORT) for i in range(12)))
    assert all(len(deltas[-1].output.token_ids) == 6 for deltas, _ in results)


@async_test
async def test_text_requests_do_not_wait_for_the_byte_limit_of_images(make_engine, monkeypatch):
    monkeypatch.setattr(request_queue, "MAX_BYTES", 1)
    monkeypatch.setattr(request_queue, "NUM_WORKERS", 1)  # each worker may prepare one image beyond the limit
    engine = make_engine(max_num_seqs=1)
    running = engine.generate(ask("continue"), LONG)
    await anext(running)
    requests = [QUESTION, ask(noise_image(70, 70), "?"), ask(noise_image(70, 70), "?"), ask("text")]
    tasks = [asyncio.create_task(collect(engine, r, SHORT, request_id=f"r{i}")) for i, r in enumerate(requests)]
    await reached(lambda: "r3" in engine._streams and engine._streams["r3"].is_prepared, "prepared")
    assert engine.stats().num_preparing >= 1  # the first image may be prepared; the others exceed the limit
    tasks[2].cancel()
    await reached(lambda: "r2" not in engine._streams, "cancelled")
    assert engine._preparation.num_queued <= 1
    await running.aclose()
    for task in (tasks[0], tasks[1], tasks[3]):
        assert len((await task)[0][-1].output.token_ids) == 6


@pytest.mark.parametrize("slow, quick", [("video", "image"), ("image", "video"), ("video", None), ("image", None)])
def test_media_of_one_kind_do_not_wait_for_those_of_the_other(slow, quick):
    may_end, done, lock = threading.Event(), [], threading.Condition()
    queue = PreparationQueue(lock, lambda: 0)
    with lock:
        for number in range(3 * NUM_WORKERS):
            queue.submit(number, lambda: may_end.wait(60), slow)
        queue.submit("quick", lambda: done.append("quick"), quick)
    wait_until(lambda: done, "prepared")
    with lock:
        assert queue.num_queued == 2 * NUM_WORKERS
        queue.discard(3 * NUM_WORKERS - 1)
        assert queue.num_queued == 2 * NUM_WORKERS - 1
    may_end.set()
    wait_until(lambda: queue.num_queued == 0, "begun")
    queue.shutdown()


@pytest.mark.parametrize(
    "request_, media",
    [
        ("text", None),
        ([1, 2], None),
        (ask("text"), None),
        (ask(noise_image(70, 70), "?"), "image"),
        (ask({"type": "video", "video": "a.mp4"}, "?"), "video"),
        (ask(noise_image(70, 70), {"type": "video", "video": "a.mp4"}, "?"), "video"),
        ({"prompt": 5}, None),
        ({"prompt": "a", "multi_modal_data": {"image": noise_image(70, 70)}}, "image"),
        ({"prompt": "a", "multi_modal_data": {"video": np.zeros((2, 8, 8, 3), np.uint8), "image": None}}, "video"),
        ({"text": "a", "images": [], "videos": None}, None),
        ({"text": "a", "images": "a.png", "videos": ["a.mp4"]}, "video"),
        ({"messages": [{"content": [{"image": "a.png", "video": None}]}, 5, {"content": 5}, {}]}, "image"),
        ({"messages": 5, "multi_modal_data": 5}, None),
        ({"messages": [{"role": "assistant", "tool_calls": 5, "content": [5, {"type": "image_url"}]}]}, "image"),
    ],
)
def test_the_slowest_media_of_a_request(request_, media):
    assert slowest_media(request_) == media


@async_test
async def test_images_of_waiting_requests_do_not_count_as_cache_hits(make_engine):
    engine = make_engine(max_num_seqs=1)
    running = engine.generate(ask(noise_image(60, 60, 9), "continue"), LONG)
    await anext(running)
    tasks = [asyncio.create_task(collect(engine, ask(noise_image(60, 60, i), "?"), SHORT)) for i in range(4)]
    await reached(lambda: engine.stats().num_waiting == 4, "waiting")
    assert engine.stats().image_hit_rate == 0.0
    await running.aclose()
    await asyncio.gather(*tasks)
    assert engine.stats().image_hit_rate == 0.0 and engine.stats().num_images == 5


@async_test
async def test_statistics_count_requests_tokens_and_images(make_engine):
    engine = make_engine()
    assert engine.stats().prefix_hit_rate is None and engine.stats().image_hit_rate is None
    for _ in range(2):
        await collect(engine, QUESTION, SHORT)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_output_tokens) == (2, 12)
    assert (stats.num_images, stats.num_encoded_images, stats.image_hit_rate) == (2, 1, 0.5)
    assert 0 < stats.num_cached_tokens < stats.num_prompt_tokens and 0 < stats.prefix_hit_rate < 1
    assert stats.output_tokens_per_s > 0 and stats.prompt_tokens_per_s > 0
    assert (stats.num_preparing, stats.num_waiting, stats.num_running, stats.kv_usage) == (0, 0, 0, 0.0)
    stream = engine.generate(QUESTION, LONG)
    await anext(stream)
    assert engine.stats().num_running == 1 and 0 < engine.stats().kv_usage <= 1
    await stream.aclose()
