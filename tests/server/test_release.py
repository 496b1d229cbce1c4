"""A server whose engine has released its memory."""

import httpx
import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.models.folder import BUNDLED
from tests.helpers.engine.async_engines import wait_until
from tests.helpers.engine.data_parallel import DATA_PARALLEL
from tests.helpers.models.adapters import make_adapter
from tests.helpers.serving.server import CHAT, ENGINE, chat, data_uri, image_part, serving


@pytest.mark.network
@pytest.mark.spawns
def test_a_released_server_is_ready_says_so_and_answers_as_before():
    engine = AsyncLLM(**ENGINE, release_after=0.3)
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


@pytest.mark.network
@pytest.mark.spawns
@pytest.mark.parametrize("engines", [ENGINE, DATA_PARALLEL], ids=["one", "two"])
def test_adapters_are_served_after_a_release(tmp_path, engines):
    """Those that were read before it, and new ones, which are read while the engine is released."""
    folders = [
        str(make_adapter(tmp_path / str(seed), BUNDLED, seed, target_modules="all-linear", spread=0.3))
        for seed in (1, 2)
    ]
    engine = AsyncLLM(**engines, release_after=0.3, enable_lora=True)
    with serving(engine, lora_modules={"first": folders[0]}, allow_lora_updating=True) as running:

        def text(model: str) -> str:
            request = chat("Describe the shapes.", max_tokens=12, ignore_eos=True, temperature=0) | {"model": model}
            answer = httpx.post(running.url + CHAT, json=request, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        first = text("first")
        wait_until(lambda: engine.stats().num_released == max(1, len(engine.health().engines)), "released")
        body = {"lora_name": "second", "lora_path": folders[1]}
        loaded = httpx.post(running.url + "/v1/load_lora_adapter", json=body, timeout=60)
        assert loaded.status_code == 200, loaded.text
        assert text("first") == first
        assert len({first, text("second"), text("bundled")}) == 3
