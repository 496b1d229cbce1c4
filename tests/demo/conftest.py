"""Fixtures with served pages."""

from collections.abc import Iterator

import pytest

from mmvllm.media.policy import MediaPolicy
from tests.helpers.needs import needs
from tests.helpers.serving.pages import Site, served


@pytest.fixture(scope="module")
@needs("network")
def site() -> Iterator[Site]:
    """The bundled model, with at most three images and two videos of 500 KB per question."""
    pytest.importorskip("gradio")
    with served(policy=MediaPolicy(max_bytes=500_000, max_video_bytes=500_000), max_images=3) as site:
        yield site


@pytest.fixture(scope="module")
@needs("network")
def chatty_site(checkpoint) -> Iterator[Site]:
    """A random model, which gives long answers."""
    pytest.importorskip("gradio")
    with served(checkpoint) as site:
        yield site
