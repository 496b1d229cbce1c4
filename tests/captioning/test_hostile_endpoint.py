"""Captions from an endpoint whose answers are made to take memory or to end the job, or that has a wrong proxy."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from mmvllm.captioning import EndpointOptions, caption_images
from mmvllm.errors import ArgumentError
from tests.helpers.captioning import many
from tests.helpers.endpoints import as_json, failed, fake_endpoint, said

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def folder(tmp_path) -> Path:
    return many(tmp_path / "images", 1)


@pytest.mark.network
@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip"])
def test_an_answer_that_is_compressed_is_not_read(folder, coding):
    """A few bytes would be gigabytes."""
    answer = (200, {"Content-Encoding": coding}, gzip.compress(bytes(10**7)))
    with fake_endpoint(lambda body, _: answer) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=0))
    assert record["error"] == f"the endpoint failed: its answer is compressed ({coding}), which was not asked for"
    assert fake.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.network
@pytest.mark.parametrize("number", [300_000_000, 2**31 - 1, 2**31, -1, 10**30, 1e400, "x", [5]])
@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens"])
def test_a_number_of_tokens_takes_no_memory_and_may_be_wrong(folder, tmp_path, number, name):
    (_, _, data) = said("a")
    answer = as_json(200, json.loads(data) | {"usage": {name: number}})
    output = tmp_path / "out.parquet"
    with fake_endpoint(lambda body, _: answer) as fake:
        options = EndpointOptions(fake.url, max_retries=0)
        tracemalloc.start()
        (record,) = caption_images(folder / "000.png", endpoint=options, output=output)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 50_000_000
    if isinstance(number, int) and 0 <= number < 2**31:
        assert (record["error"], record[name]) == (None, number)
    else:
        assert record["error"] == "the endpoint failed: its answer is not a chat completion"


@pytest.mark.network
@pytest.mark.parametrize("when", ["Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Dec 99999999999999999999 23:59:59 GMT"])
def test_a_time_to_wait_that_cannot_be_read_is_none(folder, when):
    with fake_endpoint(lambda body, number: said("a") if number else failed(503, Retry_After=when)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["caption"] == "a"


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "nothing://user:pa55word99@127.0.0.1", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_a_sentence(folder, monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ArgumentError, match="endpoint cannot be reached") as refused:
        caption_images(folder, endpoint="http://localhost:9")
    assert "pa55word99" not in str(refused.value)
