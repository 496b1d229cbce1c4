"""The tokenizer of a checkpoint folder."""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mmvllm.config import ModelConfig
from mmvllm.processors.chat.special_tokens import splitting
from mmvllm.utils.patterns import PatternError, check_repeats_no_choice
from mmvllm.utils.text import beginning_of, check_file_size, load_json, printable, read_text

# Files that transformers reads whole, for tokenizers of any class.
FILES = (
    *("*token*", "vocab.*", "merges.txt", "*.model", "*.spm", "tekken.json", "config.json"),
    *("chat_template*", "additional_chat_templates/*"),
)
MAX_ADDED_TOKEN = 1000  # characters; texts are searched for each added token


def load_tokenizer(folder: Path, chat_template: str | PathLike | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with `chat_template` (a file or a template), or the one of transformers' processor.

    Raises ValueError for a folder without a usable tokenizer, and for a template that cannot be read.
    """
    for file in (file for pattern in FILES for file in folder.glob(pattern)):
        check_file_size(file)
        _check_unmarked(file)
    try:
        with splitting():  # the normalizer is run on added tokens
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a broken or missing tokenizer file makes the library raise anything
        reason = beginning_of(printable(str(error), keeps="\n"), 2000)
        raise ValueError(f"{folder} has no tokenizer that transformers can load: {reason}") from error
    if not isinstance(most := tokenizer.model_max_length, int | float):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: model_max_length must be a number, got {most!r:.50}")
    if not tokenizer.encode("a", add_special_tokens=False):  # without files, transformers creates an empty tokenizer
        raise ValueError(
            f"{folder} has no tokenizer: tokenizer.json, or vocab.json and merges.txt, must be there; download it again"
        )
    try:
        for pattern in _expressions(tokenizer.backend_tokenizer):
            check_repeats_no_choice(pattern)
    except PatternError as error:
        raise ValueError(f"{folder} has a tokenizer that cannot be used: {error}") from None
    longest = max((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, default="")
    if len(longest) > MAX_ADDED_TOKEN:
        size = f"{len(longest)} characters, {longest!r:.30}; at most {MAX_ADDED_TOKEN} are accepted"
        raise ValueError(f"{folder} has a special token of {size}")
    template = _processor_template(folder) if chat_template is None else _given_template(chat_template)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def _check_unmarked(file: Path) -> None:
    """Raise ValueError for a text with a byte order mark, which transformers does not read or takes for a character."""
    if file.suffix in (".json", ".jinja", ".txt") and file.is_file():
        with file.open("rb") as content:
            if content.read(3).startswith((BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE)):
                raise ValueError(f"{file} begins with a byte order mark; save it as UTF-8 without one")


def _given_template(given: str | PathLike) -> str:
    if isinstance(given, str) and any(character in given for character in "{}\n"):
        return given
    try:
        return read_text(Path(given)).replace("\r\n", "\n")
    except (OSError, ValueError) as error:  # for example, it is not a text file
        raise ValueError(f"chat_template: {given} cannot be read ({error}); give a file or a Jinja template") from None


def _processor_template(folder: Path) -> str | None:
    """Return the template of older checkpoints, which transformers' processors prefer to the tokenizer's."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = load_json(file)["chat_template"]
        if isinstance(template, str):
            return template
        error: Exception = TypeError(f"the template is of type {type(template).__name__}")
    except (ValueError, KeyError, TypeError) as caught:
        error = caught
    raise ValueError(f"{file} is damaged: {error!r}; download it again")


def _expressions(backend: Tokenizer) -> Iterator[str]:
    """Yield all regular expressions that the tokenizers library matches texts with."""
    parts = [backend.normalizer, backend.pre_tokenizer, backend.decoder]
    parts = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while parts:
        part = parts.pop()
        if isinstance(part, dict) and "Regex" in part:
            yield part["Regex"]
        elif isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part


def eos_token_ids_of(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a completion, from the model's configs and the tokenizer."""
    return config.eos_token_ids | {tokenizer.eos_token_id} - {None}
