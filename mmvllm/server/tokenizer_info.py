"""What a server says of its tokenizer."""

import json
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from mmvllm.server.responses import TokenizerInfo

_OF_ADDED = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


def tokenizer_info(tokenizer: PreTrainedTokenizerBase) -> TokenizerInfo:
    """The tokenizer's class, configuration and chat template, without the places of its files."""
    kept = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(("_file", "_path"))}
    config = json.loads(json.dumps(kept, default=_plain))
    own = {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
    return TokenizerInfo(**config | tokenizer.special_tokens_map | own)


def _plain(value: Any) -> Any:
    """An added token as an object; any other value that JSON has not, as text."""
    return {name: getattr(value, name) for name in _OF_ADDED} if isinstance(value, AddedToken) else str(value)
