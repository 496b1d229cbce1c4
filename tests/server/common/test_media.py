"""Images of chat requests: detail, sources, and the byte budget."""

import asyncio

import httpx
import pytest

from mmvllm.cli.media import OPTIONS
from mmvllm.entrypoints.request_queue import AdmissionWindow
from mmvllm.media.policy import MediaPolicy
from mmvllm.server.common import media
from tests.helpers.serving.server import (
    CHAT,
    RESPONSES,
    SCENES,
    TOKENIZE,
    call,
    chat,
    data_uri,
    error_of,
    image_part,
    make_app,
    png,
    user,
)
from tests.helpers.serving.web import serving_files


@pytest.mark.spawns
def test_detail_limits_the_tokens_of_an_image(engine):
    app = make_app(engine, max_pixels=28 * 28 * 36)
    uri = data_uri(png(600, 600))

    def tokens(*details: str | None, **keys) -> int:
        parts = [image_part(uri, **({} if detail is None else {"detail": detail})) for detail in details]
        answer = call(app, "POST", CHAT, json=chat(*parts, "Hi", max_tokens=1, **keys)).json()
        return answer["usage"]["prompt_tokens_details"]["image_tokens"]

    assert (tokens("high"), tokens("auto"), tokens(None), tokens("low")) == (49, 36, 36, 36)
    assert tokens("high", "auto") == 49 + 36
    assert tokens("auto", max_pixels=28 * 28 * 25) == 25 and tokens("low", "high", max_pixels=28 * 28 * 40) == 36 + 36


@pytest.mark.spawns
def test_local_images_are_read_from_the_allowed_folder_only(engine, tmp_path):
    (tmp_path / "a.png").write_bytes(SCENES[0].read_bytes())
    app = make_app(engine, media=MediaPolicy(allowed_local_path=tmp_path))
    answer = call(app, "POST", CHAT, json=chat(image_part(f"file://{tmp_path}/a.png"), "Describe this image."))
    expected = call(app, "POST", CHAT, json=chat(image_part(data_uri(SCENES[0])), "Describe this image."))
    assert answer.status_code == 200 and answer.json()["choices"] == expected.json()["choices"]
    answer = call(app, "POST", CHAT, json=chat("a", image_part("file:///etc/passwd"), "b"))
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages[0].content[1].image_url.url"


@pytest.mark.network
@pytest.mark.spawns
@pytest.mark.parametrize("allowed", [True, False])
def test_images_are_fetched_from_allowed_hosts_only(engine, tmp_path, allowed):
    (tmp_path / "a.png").write_bytes(SCENES[0].read_bytes())
    domain = "127.0.0.1" if allowed else "example.org"
    media = MediaPolicy(allowed_domains=(domain,), allowed_networks=("127.0.0.1/32",))
    with serving_files(tmp_path) as url:
        part = image_part(f"{url}/a.png")
        answer = call(make_app(engine, media=media), "POST", CHAT, json=chat(part, max_tokens=1))
    assert answer.status_code == (200 if allowed else 400)
    if not allowed:
        assert error_of(answer)["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("url", "field", "option"),
    [
        ("http://example.org/a.png", "allowed_domains", "--allowed-media-domains"),
        ("file:///a.png", "allowed_local_path", "--allowed-local-media-path"),
        (data_uri(SCENES[0]), "max_bytes", "--max-image-bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_errors_name_the_option_of_the_command_and_in_python_the_field(engine, url, field, option):
    def message(**settings: object) -> str:
        app = make_app(engine, media=MediaPolicy(max_bytes=100), **settings)
        return error_of(call(app, "POST", CHAT, json=chat(image_part(url), "Hi")))["message"]

    assert message().endswith(f" (see {field})")
    assert message(media_names=OPTIONS).endswith(f" (see {option})")


@pytest.mark.spawns
def test_fetched_images_count_towards_the_byte_budget(engine, tmp_path):
    (tmp_path / "a.png").write_bytes(data := SCENES[0].read_bytes())
    media = MediaPolicy(allowed_local_path=tmp_path)
    part = image_part(f"file://{tmp_path}/a.png")
    app = make_app(engine, media=media, max_bodies_bytes=len(data) + 1000)
    assert call(app, "POST", CHAT, json=chat(part, max_tokens=1)).status_code == 200
    answer = call(app, "POST", CHAT, json=chat(part, part, max_tokens=1))
    assert answer.status_code == 429 and error_of(answer)["code"] == "engine_busy"
    assert call(app, "POST", CHAT, json=chat(part, max_tokens=1)).status_code == 200


@pytest.mark.spawns
def test_a_data_uri_does_not_wait_for_a_slow_host(engine, monkeypatch):
    real, is_asked = media.fetch, asyncio.Event()

    async def fetch(url, *limits):
        if url.startswith("data:"):
            return await real(url, *limits)
        is_asked.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(media, "fetch", fetch)
    transport = httpx.ASGITransport(make_app(engine))

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            slow = asyncio.create_task(client.post(CHAT, json=chat(*[image_part("http://slow/")] * 16)))
            await is_asked.wait()
            answer = await asyncio.wait_for(client.post(CHAT, json=chat(image_part(data_uri()), max_tokens=1)), 20)
            slow.cancel()
        return answer.status_code

    assert asyncio.run(ask()) == 200


@pytest.mark.spawns
def test_a_damaged_image_is_refused_wherever_a_prompt_is_made(app):
    part = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="}
    body = {"input": [{"role": "user", "content": [part]}]}
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        answer = call(app, "POST", path, json=body)
        assert answer.status_code == 400 and error_of(answer)["param"] == "input[0].content[0].image_url"
    answer = call(app, "POST", TOKENIZE, json={"messages": [user(image_part(part["image_url"]))]})
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("length", [8193, 10_000_000])
def test_a_url_is_short(engine, length):
    app = make_app(engine, media=MediaPolicy(allowed_domains=("*",)))
    for url in ("http://" + "é" * (length - 7), "file:/" + "a" * (length - 6)):
        error = error_of(call(app, "POST", CHAT, json=chat(image_part(url))))
        assert (
            f"the URL must have at most 8192 characters, got {length}" in error["message"]
            and len(error["message"]) < 200
        )


@pytest.mark.parametrize("length", [1000, 10_000_000])
def test_base64_without_its_header_is_told_what_is_missing(app, length):
    error = error_of(call(app, "POST", CHAT, json=chat(image_part("iVBORw0K" * (length // 8)))))
    assert "data:image/png;base64," in error["message"] and len(error["message"]) < 400


def test_a_slow_host_does_not_delay_images_from_others():
    class Request:
        pass

    async def fetch(turns: media.FetchTurns, url: str, request: Request) -> None:
        async with turns.turn(url, request):
            await asyncio.sleep(60 if "slow" in url.lower() else 0)

    async def run(slow: list[str], slow_requests: list[Request]) -> None:
        turns = media.FetchTurns(4)
        tasks = [asyncio.create_task(fetch(turns, url, one)) for url in slow for one in slow_requests]
        await asyncio.sleep(0)
        other = Request()
        fast = asyncio.gather(*(fetch(turns, f"https://{i % 2}.example/a", other) for i in range(6)))
        await asyncio.wait_for(fast, 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run_all() -> None:
        ends = ("/{}", ":81/{}", "?{}", "#{}", ":81?{}")
        urls = [f"http://{login}SLOW.example{end.format(i)}" for i in range(4) for login in ("", "a@") for end in ends]
        await run(urls, [Request() for _ in range(9)])
        await run([f"http://slow{i}.example/a" for i in range(16)], [Request()])  # one request, many host names

    asyncio.run(run_all())


def test_no_image_is_fetched_for_a_request_over_capacity(engine, monkeypatch):
    monkeypatch.setattr(engine, "admission", AdmissionWindow(0))
    monkeypatch.setattr(media, "fetch", None)
    assert call(make_app(engine), "POST", CHAT, json=chat(image_part(data_uri()))).status_code == 429


def test_fetching_images_counts_towards_the_timeout(engine, monkeypatch):
    async def never(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(media, "fetch", never)
    answer = call(make_app(engine, request_timeout=0.05), "POST", CHAT, json=chat(image_part(data_uri())))
    assert answer.status_code == 504 and "after 0.05 seconds" in error_of(answer)["message"]
