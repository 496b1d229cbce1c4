"""Pydantic models of /tokenize, /detokenize and /tokenizer_info, with vLLM's names."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from mmvllm.server.common.messages import Ignored, StrictModel
from mmvllm.server.common.protocol import ChatPrompt, PromptTokenIds


class TokenizeText(StrictModel):
    """POST /tokenize, with a text"""

    model: str | None = None
    prompt: str = Field(min_length=1)
    add_special_tokens: Ignored = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    """POST /tokenize, with a conversation"""

    model: str | None = None
    add_special_tokens: Ignored = None
    return_token_strs: bool | None = None


def _tag(body: Any) -> str:
    return "a chat" if isinstance(body, dict) and "messages" in body else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("a text")] | Annotated[TokenizeChat, Tag("a chat")], Discriminator(_tag)
]


class DetokenizeRequest(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: PromptTokenIds


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | dict[str, str] | None
