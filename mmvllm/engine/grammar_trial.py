"""Compiles grammars of untrusted senders first in a process, whose time, memory and stack are limited.

llguidance limits neither what an expression takes to compile nor how deeply it recurses, which ends a process. What
`mmvllm/grammar_cost.py` refuses is the part of it that can be told from the text, without a process that is lost.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import ceil
from time import process_time
from typing import Any

from mmvllm.config import MiB
from mmvllm.engine.grammar_matcher import compile_grammar, refused
from mmvllm.memory_limit import memory_limit, return_freed_memory
from mmvllm.structured import StructuredOutputsParams
from mmvllm.workers import WorkerDied, WorkerPool, WorkerTimeout

CPU_SECONDS = 2  # grammars that people write take up to 0.2 s
WALL_SECONDS = 30.0  # the engine has priority
MAX_BYTES = 128 * MiB  # grammars that people write take up to 10 MiB
DEFAULT_STACK_BYTES = 2 * MiB  # of a thread, where the stack of a process has no limit


class GrammarTrial:
    """Tries whether grammars can be compiled, in a process that starts now; safe for several threads.

    Args:
        description: the JSON of a fast tokenizer.
        vocab_size: width of the masks.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, description: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self._pool = WorkerPool(1, _start, (description, vocab_size, eos_token_ids))
        self._pool.start()

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise RequestError for a grammar that cannot be enforced, or takes too much to compile."""
        try:
            self._pool.run(_try, params, timeout=WALL_SECONDS)
        except (WorkerDied, WorkerTimeout) as error:
            limits = f"{CPU_SECONDS} s, {MAX_BYTES // MiB} MiB or {_stack_bytes() // MiB} MiB of stack"
            raise refused(params, f"compiling it takes more than {limits}; simplify it ({error})") from None

    def close(self) -> None:
        self._pool.close()


def _stack_bytes() -> int:
    """Half of what a thread has for recursion, at most 4 MiB."""
    with suppress(ImportError):  # not on Windows
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
        return (DEFAULT_STACK_BYTES if limit == resource.RLIM_INFINITY else min(limit, 8 * MiB)) // 2
    return DEFAULT_STACK_BYTES // 2


# What follows runs in the process.

_tokenizer: Any = None
_eos_token_ids: Sequence[int] = ()


def _start(description: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    global _tokenizer, _eos_token_ids
    from llguidance import LLTokenizer

    _tokenizer = LLTokenizer(description, n_vocab=vocab_size, eos_token=eos_token_ids)
    _eos_token_ids = eos_token_ids
    threading.stack_size(_stack_bytes())


def _try(params: StructuredOutputsParams) -> None:
    _limit_cpu_time()
    done: Future[None] = Future()
    with memory_limit(MAX_BYTES):
        thread = threading.Thread(target=_settle, args=(done, params))
        thread.start()
        thread.join()
    return_freed_memory()
    done.result()


def _settle(done: Future[None], params: StructuredOutputsParams) -> None:
    try:
        compile_grammar(_tokenizer, _eos_token_ids, params)
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)


def _limit_cpu_time() -> None:
    """Have the system end this process after `CPU_SECONDS` more."""
    with suppress(ImportError):  # not on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(process_time()) + CPU_SECONDS, most))
