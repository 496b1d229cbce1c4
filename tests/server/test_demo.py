"""The demo page and the API on the same engine."""

import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.needs import needs
from tests.helpers.serving.pages import get, post
from tests.helpers.serving.server import CHAT, ENGINE, chat, error_of, serving

pytest.importorskip("gradio")


@pytest.fixture(scope="module")
@needs("network")
def with_demo():
    with serving(AsyncLLM(**ENGINE), demo=True, api_keys=("secret",), max_body_bytes=1000) as running:
        yield running


@pytest.mark.spawns
def test_the_root_redirects_to_the_page_which_needs_no_key(with_demo):
    answer = get(f"{with_demo.url}/", follow_redirects=True)
    assert answer.status_code == 200 and str(answer.url) == f"{with_demo.url}/demo/"
    assert "gradio" in answer.text


def test_the_api_still_needs_a_key_and_returns_openai_errors(with_demo):
    assert post(f"{with_demo.url}{CHAT}", json=chat("Hello")).status_code == 401
    with_key = {"Authorization": "Bearer secret"}
    body = chat("Hello", max_tokens=1)
    assert post(f"{with_demo.url}{CHAT}", json=body, headers=with_key).status_code == 200
    assert error_of(get(f"{with_demo.url}/v1/nothing", headers=with_key))


def test_uploads_have_the_size_limit_of_images_not_of_bodies(with_demo):
    files = {"files": ("a.png", b"x" * 5000)}
    assert post(f"{with_demo.url}/demo/gradio_api/upload", files=files).status_code == 200


def test_the_page_is_for_its_own_origin(with_demo):
    for origin, status in (("https://other.example", 403), (with_demo.url, 200)):
        for url in (f"{with_demo.url}/demo/", f"{with_demo.url}/demo/config"):
            answer = get(url, headers={"Origin": origin})
            assert answer.status_code == status
            assert not [name for name in answer.headers if name.startswith("access-control-allow")]
    for site in ("cross-site", "same-site"):  # another host, another port of this one
        across = get(f"{with_demo.url}/demo/gradio_api/startup-events", headers={"Sec-Fetch-Site": site})
        assert (across.status_code, across.text) == (403, "Open the page itself")
    for site in ("same-origin", "none"):
        own = get(f"{with_demo.url}/demo/gradio_api/startup-events", headers={"Sec-Fetch-Site": site})
        assert own.status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert get(f"{with_demo.url}/demo/", headers=link).status_code == 200
    assert get(f"{with_demo.url}/demo/logout").status_code == 404


@pytest.mark.spawns
def test_without_the_option_there_is_no_page(running):
    assert running.get("/").status_code == running.get("/demo/").status_code == 404
