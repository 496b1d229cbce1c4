"""The tokenizer of a checkpoint folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mmvllm.config import ModelConfig
from mmvllm.patterns import check_repeats_no_group
from mmvllm.text import load_json

MAX_ADDED_TOKEN = 1000  # characters: texts are searched for each of these tokens


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """With the chat template, which older checkpoints have in a file of its own; raises ValueError without one."""
    _check_expressions(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a broken or missing tokenizer file makes the library raise anything
        raise ValueError(f"{folder} has no tokenizer that transformers can load: {error}") from error
    longest = max((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, default="")
    if len(longest) > MAX_ADDED_TOKEN:
        size = f"{len(longest)} characters, {longest!r:.30}; at most {MAX_ADDED_TOKEN} are accepted"
        raise ValueError(f"{folder} has a special token of {size}")
    template = folder / "chat_template.json"
    if tokenizer.chat_template is None and template.is_file():
        try:
            tokenizer.chat_template = load_json(template)["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{template} is damaged: {error!r}; download it again") from None
    return tokenizer


def _check_expressions(file: Path) -> None:
    """Raise ValueError for an expression that the tokenizers library might match for ever, for every text."""
    if not file.is_file():
        return
    try:
        parts = load_json(file)
        for pattern in _expressions([parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
            check_repeats_no_group(pattern)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be used: {error}") from None


def _expressions(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from [part["Regex"]] if isinstance(part.get("Regex"), str) else _expressions([*part.values()])
    elif isinstance(part, list):
        for each in part:
            yield from _expressions(each)


def eos_token_ids_of(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a completion: those of the model's configs, and the tokenizer's own."""
    return config.eos_token_ids | {tokenizer.eos_token_id} - {None}
