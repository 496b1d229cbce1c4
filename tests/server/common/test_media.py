"""Images and videos of chat requests: detail, sources, and the byte budget."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mmvllm.cli.media import OPTIONS
from mmvllm.entrypoints.request_queue import AdmissionWindow
from mmvllm.media.policy import MediaPolicy
from mmvllm.server.common import media
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.server import (
    CHAT,
    RESPONSES,
    SCENES,
    TOKENIZE,
    answered,
    call,
    chat,
    data_uri,
    image_part,
    make_app,
    png,
    user,
    video_part,
    video_uri,
)
from tests.helpers.serving.web import serving_files
from tests.server.refusals import check_refusal, refusal


@dataclass(frozen=True)
class Medium:
    """A file of an image or a video."""

    path: Path

    @property
    def kind(self) -> str:
        return "video_url" if self.path.suffix == ".mp4" else "image_url"

    def part(self, url: str | None = None) -> dict:
        """The part of a message with this URL, or with the data of the file."""
        if self.kind == "video_url":
            return video_part(url or video_uri(self.path))
        return image_part(url or data_uri(self.path))


@pytest.fixture(params=["image", "video"])
def medium(request, tmp_path) -> Medium:
    if request.param == "video":
        return Medium(make_clip(tmp_path / "a.mp4"))
    (tmp_path / "a.png").write_bytes(SCENES[0].read_bytes())
    return Medium(tmp_path / "a.png")


@pytest.mark.spawns
def test_detail_limits_the_tokens_of_an_image(engine):
    app = make_app(engine, max_pixels=28 * 28 * 36)
    uri = data_uri(png(600, 600))

    def tokens(*details: str | None, **keys) -> int:
        parts = [image_part(uri, **({} if detail is None else {"detail": detail})) for detail in details]
        usage = answered(app, CHAT, chat(*parts, "Hi", max_tokens=1, **keys))["usage"]
        return usage["prompt_tokens_details"]["image_tokens"]

    assert (tokens("high"), tokens("auto"), tokens(None), tokens("low")) == (49, 36, 36, 36)
    assert tokens("high", "auto") == 49 + 36
    assert tokens("auto", max_pixels=28 * 28 * 25) == 25 and tokens("low", "high", max_pixels=28 * 28 * 40) == 36 + 36


@pytest.mark.spawns
def test_local_media_are_read_from_the_allowed_folder_only(engine, medium):
    app = make_app(engine, media=MediaPolicy(allowed_local_path=medium.path.parent))
    local, sent = (chat(medium.part(url), "Describe it.") for url in (f"file://{medium.path}", None))
    assert answered(app, CHAT, local)["choices"] == answered(app, CHAT, sent)["choices"]
    error = refusal(app, CHAT, chat("a", medium.part("file:///etc/passwd"), "b"))
    assert error["param"] == f"messages[0].content[1].{medium.kind}.url"


@pytest.mark.network
@pytest.mark.spawns
def test_media_are_fetched_from_allowed_hosts_only(engine, medium):
    domains, local = (("127.0.0.1",), ("example.org",)), {"allowed_networks": ("127.0.0.1/32",)}
    allowed, other = (make_app(engine, media=MediaPolicy(allowed_domains=one, **local)) for one in domains)
    with serving_files(medium.path.parent) as url:
        body = chat(medium.part(f"{url}/{medium.path.name}"), max_tokens=1)
        answered(allowed, CHAT, body)
        check_refusal(other, CHAT, body, f"messages[0].content[0].{medium.kind}.url", "allowed_domains")


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
        return refusal(app, CHAT, chat(image_part(url), "Hi"))["message"]

    assert message().endswith(f" (see {field})")
    assert message(media_names=OPTIONS).endswith(f" (see {option})")


@pytest.mark.spawns
def test_fetched_media_count_towards_the_byte_budget(engine, medium):
    media, size = MediaPolicy(allowed_local_path=medium.path.parent), medium.path.stat().st_size
    part = medium.part(f"file://{medium.path}")
    app = make_app(engine, media=media, max_bodies_bytes=size + 1000)
    answered(app, CHAT, chat(part, max_tokens=1))
    assert refusal(app, CHAT, chat(part, part, max_tokens=1), 429)["code"] == "engine_busy"
    answered(app, CHAT, chat(part, max_tokens=1))


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
        assert refusal(app, path, body)["param"] == "input[0].content[0].image_url"
    body = {"messages": [user(image_part(part["image_url"]))]}
    assert refusal(app, TOKENIZE, body)["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("length", [8193, 10_000_000])
def test_a_url_is_short(engine, length):
    app = make_app(engine, media=MediaPolicy(allowed_domains=("*",)))
    for url in ("http://" + "é" * (length - 7), "file:/" + "a" * (length - 6)):
        message = refusal(app, CHAT, chat(image_part(url)))["message"]
        assert f"the URL must have at most 8192 characters, got {length}" in message and len(message) < 200


@pytest.mark.parametrize("length", [1000, 10_000_000])
def test_base64_without_its_header_is_told_what_is_missing(app, length):
    message = refusal(app, CHAT, chat(image_part("iVBORw0K" * (length // 8))))["message"]
    assert "data:image/png;base64,<data>" in message and len(message) < 400


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
