"""Chats whose prompt ends elsewhere, and chat templates of requests."""

import pytest

from tests.helpers.serving.server import CHAT, TOKENIZE, answered, chat, chunks_of, make_app, user
from tests.server.refusals import refusal

BEGUN = [user("How many stars are there?"), {"role": "assistant", "content": "There are "}]
CONTINUED = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}{{ mood }}"


def prompt_of(app, engine, **body) -> str:
    return engine.tokenizer.decode(answered(app, TOKENIZE, body)["tokens"])


def test_the_model_continues_the_final_message(app, engine):
    begun = "<|im_start|>assistant\nThere are "
    assert prompt_of(app, engine, **CONTINUED).endswith(begun)
    assert prompt_of(app, engine, messages=BEGUN, continue_final_message=True).endswith(begun)
    assert prompt_of(app, engine, messages=BEGUN[:1], add_generation_prompt=False).endswith("are there?<|im_end|>\n")
    assert prompt_of(app, engine, messages=BEGUN, add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    answer = answered(app, CHAT, chat(**CONTINUED, max_tokens=3, return_token_ids=True))
    assert answer["prompt_token_ids"] == answered(app, TOKENIZE, CONTINUED)["tokens"]


@pytest.mark.parametrize(
    "content", ["There are ", [{"type": "text", "text": "There "}, {"type": "text", "text": "are "}]]
)
def test_an_echo_is_the_text_of_the_final_message(app, content):
    begun = {**CONTINUED, "messages": [BEGUN[0], {"role": "assistant", "content": content}]}
    body = chat(**begun, max_tokens=3, n=2, temperature=0, ignore_eos=True)
    plain = [choice["message"]["content"] for choice in answered(app, CHAT, body)["choices"]]
    echoed = [choice["message"]["content"] for choice in answered(app, CHAT, body | {"echo": True})["choices"]]
    assert echoed == ["There are " + text for text in plain] and all(plain)
    texts = ["", ""]
    for choice in (chunk["choices"][0] for chunk in chunks_of(app, CHAT, body | {"echo": True})):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == echoed


def test_a_request_may_have_a_template_if_it_is_trusted(engine):
    app = make_app(engine, trust_request_chat_template=True)
    body = {"messages": [user({"type": "text", "text": "Hi"})], "chat_template": TEMPLATE}
    assert prompt_of(app, engine, **body, chat_template_kwargs={"mood": "calm"}) == "user: Hi\ncalm"
    assert answered(app, CHAT, chat(**body, max_tokens=2))["choices"][0]["message"]["content"]
    for template, words in (
        ("{% for %}", "cannot render"),
        ("{{ ''.__class__.mro() }}" * 2, "unsafe"),
        ("x" * 65_537, "65536"),
    ):
        error = refusal(app, CHAT, chat("Hi", chat_template=template))
        assert error["param"] in ("messages", "chat_template") and words in error["message"]
