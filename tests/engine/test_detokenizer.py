"""Text while it forms: whole characters, a beginning of the offline text at any time, and stop strings held back."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mmvllm.engine.detokenizer import AnswerText, token_bytes
from mmvllm.models.weights import BUNDLED

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


def follow(tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> AnswerText:
    """Append the tokens one by one; at every prefix the text is a beginning of the offline text."""
    answer = AnswerText(tokenizer, stop)
    for end, token_id in enumerate(token_ids, 1):
        answer.append(token_id)
        offline = tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        assert offline.startswith(answer.text)
        if not offline.endswith("�"):
            assert answer.text == offline
    return answer


@pytest.mark.parametrize("text", TEXTS)
def test_every_prefix_of_a_text_is_the_offline_text_less_half_a_character(tokenizer, text):
    token_ids = tokenizer(text)["input_ids"]
    assert follow(tokenizer, token_ids).text == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_tokens_special_ones_and_broken_bytes_included(tokenizer, data):
    ids = st.one_of(st.integers(0, 255), st.integers(0, len(tokenizer) - 1), st.sampled_from(tokenizer.all_special_ids))
    follow(tokenizer, data.draw(st.lists(ids, max_size=30)))


def test_special_tokens_are_not_decoded_again_with_every_one_that_follows(bundled):
    """An answer that is to ignore its end may have thousands of them."""
    answer = AnswerText(bundled)
    answer._stream = None  # which would keep them
    for _ in range(10):
        assert not answer.append(bundled.eos_token_id)
    assert (answer.text, answer.num_settled) == ("", 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
def test_any_text_comes_back_whole_and_by_its_bytes(tokenizer, text):
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    answer = follow(tokenizer, token_ids)
    assert whole.endswith("�") or answer.text == whole
    if not set(token_ids) & set(tokenizer.added_tokens_decoder):
        assert b"".join(token_bytes(tokenizer, token_id) for token_id in token_ids).decode() == whole


def test_bytes_of_half_a_character_and_of_special_tokens(tokenizer):
    token_ids = tokenizer("🦩", add_special_tokens=False)["input_ids"]
    parts = [token_bytes(tokenizer, token_id) for token_id in token_ids]
    assert len(parts) > 1 and b"".join(parts) == "🦩".encode()
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
    assert token_bytes(tokenizer, len(tokenizer) + 1000) == b""


def settled_by_trying(text: str, stop: list[str]) -> int:
    """The longest beginning that no stop string beginning at or after it could reach into."""
    held = [size for size in range(len(text)) for s in stop if s.startswith(text[size:]) and len(s) > len(text) - size]
    return min(held, default=len(text))


def test_long_stop_strings_cost_no_more_with_every_token(bundled):
    num_looks = 0

    class Watched(str):
        def startswith(self, *args) -> bool:
            nonlocal num_looks
            num_looks += 1
            return super().startswith(*args)

    answer = AnswerText(bundled, [Watched("b" * 5000)])
    for token_id in bundled("a", add_special_tokens=False)["input_ids"] * 300:
        answer.append(token_id)
        assert answer.num_settled == len(answer.text)
    assert num_looks == 300


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text("ab\n", max_size=12), stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_what_could_begin_a_stop_string_is_not_settled(bundled, text, stop):
    answer = AnswerText(bundled, stop)
    sent = 0
    for token_id in bundled(text, add_special_tokens=False)["input_ids"]:
        found = answer.append(token_id)
        if found:
            assert answer.text[answer.stop_at :].startswith(tuple(stop))
            assert sent <= answer.stop_at  # nothing of the stop string had been let go
            return
        assert answer.num_settled == settled_by_trying(answer.text, stop)
        sent = answer.num_settled
    assert not any(s in text for s in stop)
