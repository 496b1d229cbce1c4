"""Incremental text: whole characters, always a prefix of the offline text; possible stop strings are held back."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream, Metaspace
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mmvllm.models.folder import BUNDLED
from mmvllm.scheduler.detokenizer import CompletionText, TokenDecoder, pieces_of, special_ids, token_bytes

METADATA = os.environ.get("MMVLLM_CHECKPOINT_METADATA")
FOLDERS = [BUNDLED] + [Path(METADATA, name) for name in ("Qwen2-VL-2B-Instruct", "Qwen2.5-VL-7B-Instruct") if METADATA]
TEXTS = [
    "plain ascii, twice  spaced\n\nand indented\n    so",
    "emoji 👩‍👩‍👧‍👦 👍🏽 🇨🇭 ☕️ end",
    "汉字和假名かなカナ、한국어 ไทย हिन्दी",
    "combining e\u0301 a\u030a, RTL שלום مرحبا, math ∑∫√, zero\u200bwidth",
    "a replacement � that was written as such",
]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def tokenizer(request):
    return AutoTokenizer.from_pretrained(request.param)


@pytest.fixture(scope="module")
def bundled():
    return AutoTokenizer.from_pretrained(BUNDLED)


def follow(tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> CompletionText:
    """Append the tokens one by one; at every step the text is a prefix of the offline text."""
    completion = CompletionText(tokenizer, stop)
    for end, token_id in enumerate(token_ids, 1):
        completion.append(token_id)
        offline = tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        assert offline.startswith(completion.text)
        if not offline.endswith("�"):
            assert completion.text == offline
    return completion


@pytest.mark.parametrize("text", TEXTS)
def test_incremental_text_equals_offline_text_except_for_incomplete_characters(tokenizer, text):
    token_ids = tokenizer(text)["input_ids"]
    assert follow(tokenizer, token_ids).text == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.thinned(1)
@settings(max_examples=150)
@given(data=st.data())
def test_random_tokens_including_special_ones_and_invalid_bytes(tokenizer, data):
    ids = st.one_of(st.integers(0, 255), st.integers(0, len(tokenizer) - 1), st.sampled_from(tokenizer.all_special_ids))
    follow(tokenizer, data.draw(st.lists(ids, max_size=30)))


def test_special_tokens_are_not_decoded_again_with_each_token(bundled):
    """A completion with ignore_eos may have thousands of them."""
    completion = CompletionText(bundled)
    for _ in range(10):
        assert not completion.append(bundled.eos_token_id)
    assert (completion.text, completion.num_settled) == ("", 0)
    assert completion._decoder._stream is None  # the stream would keep them


@pytest.mark.thinned(1)
@settings(max_examples=150)
@given(data=st.data())
def test_the_text_is_that_of_a_stream_that_sees_every_token(tokenizer, data):
    """Although most tokens are looked up; bytes that are no character are shown without waiting for the next one."""
    ids = st.one_of(st.integers(0, 255), st.integers(0, len(tokenizer) + 100))
    decoder, stream = TokenDecoder(pieces_of(tokenizer)), DecodeStream(skip_special_tokens=True)
    special = special_ids(tokenizer)
    text = expected = ""
    for token_id in data.draw(st.lists(ids, max_size=40)):
        text += decoder.step(token_id)
        added = None if token_id in special else stream.step(tokenizer.backend_tokenizer, token_id)
        expected += added or ""
        assert text[: len(expected)] == expected and set(text[len(expected) :]) <= {"�"}


def test_bytes_that_are_no_character_cost_the_same_however_many_precede_them(bundled):
    """A stream of the tokenizer decodes them again with each token: 2.7 ms a token after 20,000 of them."""
    [continuation] = [token_id for token_id in range(256) if token_bytes(bundled, token_id) == b"\x80"]
    completion = CompletionText(bundled)
    for length in range(1, 50):
        completion.append(continuation)
        assert completion.take() == "�" and completion.num_settled == length


@pytest.mark.parametrize("token", ["日", "Ġq", "éa", "<|x|>"])
def test_an_added_token_has_the_text_that_the_tokenizer_gives_it(token):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens([token])
    ids = [tokenizer.convert_tokens_to_ids(token), *tokenizer("a", add_special_tokens=False)["input_ids"]]
    text = tokenizer.decode(ids)
    assert follow(tokenizer, ids).text == text
    assert b"".join(token_bytes(tokenizer, token_id) for token_id in ids).decode(errors="replace") == text


def test_tokens_are_not_looked_up_where_their_text_depends_on_what_stands_before():
    backend = Tokenizer(WordLevel({"[UNK]": 0, "▁a": 1, "▁b": 2}, unk_token="[UNK]"))
    backend.decoder = Metaspace()
    decoder = TokenDecoder(pieces_of(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert [decoder.decode([1]), decoder.decode([2, 1])] == ["a", " b a"]


@settings(max_examples=100)
@given(text=st.text(max_size=30))
def test_any_text_is_restored_from_its_tokens_and_from_their_bytes(tokenizer, text):
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    completion = follow(tokenizer, token_ids)
    assert whole.endswith("�") or completion.text == whole
    if not set(token_ids) & set(tokenizer.added_tokens_decoder):
        assert b"".join(token_bytes(tokenizer, token_id) for token_id in token_ids).decode() == whole


def test_token_bytes_of_incomplete_characters_and_of_special_tokens(tokenizer):
    token_ids = tokenizer("🦩", add_special_tokens=False)["input_ids"]
    parts = [token_bytes(tokenizer, token_id) for token_id in token_ids]
    assert len(parts) > 1 and b"".join(parts) == "🦩".encode()
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
    assert token_bytes(tokenizer, len(tokenizer) + 1000) == b""


def settled_by_brute_force(text: str, stop: list[str]) -> int:
    """Length of the longest prefix that no stop string can overlap, by trying every start."""
    held = [size for size in range(len(text)) for s in stop if s.startswith(text[size:]) and len(s) > len(text) - size]
    return min(held, default=len(text))


def test_the_cost_of_long_stop_strings_does_not_grow_with_the_text(bundled):
    num_calls = 0

    class Watched(str):
        def startswith(self, *args) -> bool:
            nonlocal num_calls
            num_calls += 1
            return super().startswith(*args)

    completion = CompletionText(bundled, [Watched("b" * 5000)])
    for token_id in bundled("a", add_special_tokens=False)["input_ids"] * 300:
        completion.append(token_id)
        assert completion.num_settled == len(completion.text)
    assert num_calls == 300


@settings(max_examples=300)
@given(text=st.text("ab\n", max_size=12), stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_text_that_could_begin_a_stop_string_is_not_settled(bundled, text, stop):
    completion = CompletionText(bundled, stop)
    sent = 0
    for token_id in bundled(text, add_special_tokens=False)["input_ids"]:
        found = completion.append(token_id)
        if found:
            completed, at = completion.found_stop
            assert completed in stop and completion.text[at:].startswith(completed)
            assert sent <= at  # no part of the stop string was settled
            return
        assert completion.num_settled == settled_by_brute_force(completion.text, stop)
        sent = completion.num_settled
    assert not any(s in text for s in stop)
