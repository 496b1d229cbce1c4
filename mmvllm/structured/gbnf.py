"""Converts grammars in GBNF, the notation of llama.cpp and of vLLM's examples, to Lark."""

import re

from mmvllm.errors import RequestError

MAX_CHARACTERS = 16_384  # takes a tenth of a second to convert
_IS_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_IS_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def as_lark(grammar: str, param: str) -> str:
    """Convert a GBNF grammar, whose first rule is `root`, to Lark; return a Lark grammar unchanged.

    Raises RequestError if the GBNF grammar cannot be converted.
    """
    if not _IS_GBNF.search(grammar) or _IS_LARK.search(grammar):
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise RequestError(f"{param} needs llguidance: pip install 'mmvllm[structured]'", param=param) from None
    if len(grammar) > MAX_CHARACTERS:
        reason = f"must have at most {MAX_CHARACTERS} characters in GBNF, got {len(grammar)}; write it in Lark"
        raise RequestError(f"{param} {reason}", param=param)
    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, grammar))
    except RecursionError:
        reason = "it is nested too deeply"
    except IndexError:
        reason = "it ends with a backslash"
    except Exception as error:  # the converter raises this class itself
        reason = str(error)
    raise RequestError(f"{param} cannot be read as GBNF: {reason}", param=param)


def _character(escape: re.Match) -> str:
    r"""Rewrite an escape for the converter, which does not know escapes such as \u00e4."""
    code = int(escape[1] or escape[2] or "0", 16)
    is_character = 0 < code <= 0x10FFFF and not 0xD800 <= code < 0xE000
    if not is_character:
        return escape[0]
    return chr(code) if code >= 0xA0 else f"\\x{code:02x}"
