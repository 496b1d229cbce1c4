"""Which answers of an endpoint are captions, and what becomes of them in files and in the summary."""

from pathlib import Path

import pytest

from mmvllm.captioning import EndpointOptions, caption_images
from mmvllm.cli.caption_output import summarize
from tests.helpers.captioning.command import many
from tests.helpers.serving.endpoints import fake_endpoint, said

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def folder(tmp_path) -> Path:
    return many(tmp_path / "images", 3)


@pytest.mark.network
@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ("stop", "eos"),
        ("STOP", "eos"),
        ("eos_token", "eos"),
        ("end_turn", "eos"),
        (None, "eos"),
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("repetition", "repetition"),
    ],
)
def test_a_complete_text_is_known_by_the_names_of_other_servers(given, recorded, folder):
    with fake_endpoint(lambda *_: said("a star", finish_reason=given)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert (record["caption"], record["finish_reason"], record["error"]) == ("a star", recorded, None)


@pytest.mark.network
@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_a_caption_of_several_lines_is_one_line_of_its_file(end, folder, tmp_path):
    text = f"A red  square.{end}  - A blue circle.{end}"
    options = {"format": "txt", "output_dir": tmp_path / "texts", "output": tmp_path / "o.jsonl", "overwrite": True}
    with fake_endpoint(lambda *_: said(text)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, **options)
        file = tmp_path / "texts" / "000.txt"
        assert file.read_bytes() == b"A red  square. - A blue circle.\n"
        assert record["caption"] == text.strip()
        list(caption_images(folder / "000.png", endpoint=fake.url, keep_line_breaks=True, **options))
    assert file.read_bytes().decode() == f"{text.strip()}\n"


@pytest.mark.network
@pytest.mark.parametrize("options", [{}, {"prefix": "a photo of ", "trigger_word": "sks"}, {"prompts": ["a", "b"]}])
def test_captions_for_which_nothing_was_written_are_counted(options, folder):
    texts = iter(["", "a star", " \n", "", "two", "three"])
    with fake_endpoint(lambda *_: said(next(texts))) as fake:
        job = caption_images(folder, endpoint=EndpointOptions(fake.url, concurrency=1), limit=3, **options)
        assert [record["error"] for record in job] == [None] * 3
    number = 3 if "prompts" in options else 2
    assert summarize(job)["empty"] == f"{number} (the model wrote nothing)"
