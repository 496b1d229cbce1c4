"""A server whose engine has released its memory."""

import asyncio

import httpx

from mmvllm.async_llm import AsyncLLM
from tests.helpers.async_engines import wait_until
from tests.helpers.server import CHAT, ENGINE, chat, data_uri, image_part, serving


def test_a_released_server_is_ready_says_so_and_answers_as_before():
    engine = AsyncLLM(**ENGINE, release_after=0.3)
    try:
        with serving(engine) as running:
            request = chat(image_part(data_uri()), "Describe this image.", max_tokens=12)
            first = httpx.post(running.url + CHAT, json=request, timeout=60).json()
            wait_until(lambda: engine.stats().num_released, "released")
            assert running.get("/health").json()["status"] == "ok"
            assert running.get("/health/ready").status_code == 200
            lines = running.get("/metrics").text.splitlines()
            assert {"mmvllm_engine_released 1.0", "mmvllm_ready 1.0"} <= {*lines}
            again = httpx.post(running.url + CHAT, json=request, timeout=60).json()
            assert again["choices"] == first["choices"] and first["choices"][0]["message"]["content"]
    finally:
        asyncio.run(engine.shutdown(drain=False))
