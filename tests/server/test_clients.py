"""Multi-turn chats about media through LiteLLM, LangChain and the `openai` client, as an application would use them.

They need the extra `clients`: python -m pytest -m clients tests/server/test_clients.py
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from tests.helpers.media.images import encode
from tests.helpers.serving.server import SCENES, chat, data_uri, image_part, video_part, video_uri

pytestmark = pytest.mark.clients

Ask = Callable[[list, bool], tuple[str, Any]]  # (messages, streams) -> text, the assistant message for the history


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Without downloads and telemetry of the clients."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def openai_client(running) -> Iterator[Ask]:
    def ask(messages: list, streams: bool) -> tuple[str, dict]:
        if streams:
            with client.chat.completions.stream(model="bundled", messages=messages, temperature=0) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            completion = client.chat.completions.create(model="bundled", messages=messages, temperature=0)
            message = completion.choices[0].message
        return message.content, message.model_dump()

    with running.client() as client:
        yield ask


@pytest.fixture
def litellm_client(running) -> Ask:
    import litellm

    litellm.telemetry = False

    def ask(messages: list, streams: bool) -> tuple[str, dict]:
        options = {"model": "openai/bundled", "api_base": f"{running.url}/v1", "api_key": "none", "temperature": 0}
        response = litellm.completion(messages=messages, stream=streams, **options)
        if streams:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        message = response.choices[0].message
        return message.content, message.model_dump()

    return ask


@pytest.fixture
def langchain_client(running) -> Ask:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="bundled", base_url=f"{running.url}/v1", api_key="none", temperature=0, max_retries=0)

    def ask(messages: list, streams: bool) -> tuple[str, object]:
        if not streams:
            message = model.invoke(messages)
            return message.content, message
        chunks = list(model.stream(messages))
        message = sum(chunks[1:], chunks[0])
        return message.content, message

    return ask


@pytest.fixture(scope="module", params=["image", "video"])
def turns(request) -> list[dict]:
    """Two questions; the first is marked for prompt caching, as users of LiteLLM do."""
    frames = [Image.open(scene).convert("RGB") for scene in SCENES[:2]]
    clip = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=1000)
    part = image_part(data_uri()) if request.param == "image" else video_part(video_uri(clip), fps=1)
    text = {"type": "text", "text": "Describe this."} | {"cache_control": {"type": "ephemeral"}}
    return [{"role": "user", "content": [part, text]}, {"role": "user", "content": "How many stars are there?"}]


@pytest.fixture(scope="module")
def expected(running, turns) -> list[str]:
    """The texts of both turns, with plain messages as the history."""
    messages, texts = [], []
    with running.client() as client:
        for turn in turns:
            messages.append(turn)
            completion = client.chat.completions.create(**chat(messages=messages))
            texts.append(completion.choices[0].message.content)
            messages.append({"role": "assistant", "content": texts[-1]})
    return texts


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", ["openai_client", "litellm_client", "langchain_client"])
def test_a_conversation_about_an_image_or_a_video(request, client, streams, turns, expected):
    ask, messages, texts = request.getfixturevalue(client), [], []
    for turn in turns:
        messages.append(turn)
        text, message = ask(messages, streams)
        texts.append(text)
        messages.append(message)
    assert texts == expected
