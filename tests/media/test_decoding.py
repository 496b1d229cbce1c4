"""Images decoded in worker processes equal the policy's, and so do its errors."""

import sys
from collections.abc import Iterator

import pytest
from PIL import Image

from mmvllm.errors import ImageError
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaError, MediaPolicy
from tests.helpers.media import tasks
from tests.helpers.media.images import encode, noise

pytestmark = pytest.mark.spawns

POLICY = MediaPolicy(max_bytes=100_000, max_pixels=20_000)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(POLICY)
    yield decoder
    decoder.close()


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF"])
def test_pixels_are_those_of_the_policy(decoder, channels, file_format):
    data = encode(Image.fromarray(noise(61, 47, channels)), file_format)
    with decoder.session() as load:
        image = load.image(data)
    assert (image.mode, image.size) == ("RGB", (61, 47))
    assert image.tobytes() == POLICY.load(data).tobytes()


@pytest.mark.parametrize(
    "data", [b"no image", b"", encode(Image.new("RGB", (200, 200))), encode(Image.new("RGB", (50, 50)), "BMP")]
)
def test_errors_are_those_of_the_policy(decoder, data):
    with pytest.raises(ImageError) as expected:
        POLICY.load(data)
    with decoder.session() as load, pytest.raises(ImageError) as caught:
        load.image(data)
    assert str(caught.value) == str(expected.value)
    assert caught.value.__dict__ == expected.value.__dict__


@pytest.mark.parametrize("source", ["/etc/passwd", bytes(100_001)])
def test_a_source_that_the_policy_does_not_allow_is_refused(decoder, source):
    with decoder.session() as load, pytest.raises(MediaError):
        load.image(source)


def test_processes_that_decode_do_not_load_torch(decoder):
    assert "torch" not in decoder._pool.run(tasks.loaded_modules)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_memory_over_the_limit_is_a_sentence(decoder, monkeypatch):
    monkeypatch.setattr("mmvllm.media.decoding._decode", tasks.need_memory)
    with decoder.session() as load, pytest.raises(ImageError, match="takes too much memory to decode; shrink it"):
        load.image(b"")


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["WEBP", "AVIF", "JPEG", "PNG"])
def test_memory_that_a_format_takes_before_it_is_decoded_is_there(file_format):
    decoder, data = MediaDecoder(MediaPolicy()), encode(Image.new("RGB", (8000, 8000)), file_format)
    with decoder.session() as load:
        assert load.image(data).size == (8000, 8000)
    decoder.close()


def test_an_image_that_ends_its_process_is_refused(decoder, monkeypatch):
    monkeypatch.setattr("mmvllm.media.decoding._decode", tasks.crash_on)
    with decoder.session() as load, pytest.raises(ImageError, match=r"its worker process died: .* SIGSEGV"):
        load.image(b"")
