"""Compiles grammars of untrusted senders first in processes whose time, memory and stack are limited.

llguidance limits neither what an expression takes to compile nor how deeply it recurses, which ends a process. What
`mmvllm/structured/grammar_cost.py` refuses is the part of it that can be told from the text. A process that has read
the tokenizer forks for each grammar, so that one which ends its process costs no more than its own time.
"""

import json
import os
import resource
import signal
import warnings
from collections.abc import Sequence
from typing import Any

from mmvllm.config import MiB
from mmvllm.errors import RequestError, RequestFailed
from mmvllm.processes.pool import WorkerDied, WorkerPool, WorkerTimeout
from mmvllm.sampling.grammar_matcher import TakesLonger, compile_grammar, refused
from mmvllm.structured.params import StructuredOutputsParams
from mmvllm.utils.memory_limit import memory_limit

NUM_PROCESSES = 3
# CPU time. Grammars that people write take up to 0.05 s; those that take longer are tried apart from the others.
QUICK_SECONDS, MOST_SECONDS = 0.1, 2.0
MAX_MASK_SECONDS = 0.05  # other requests of a step wait for its masks
WALL_SECONDS = 30.0  # the engine has priority
MAX_BYTES = 128 * MiB  # grammars that people write take up to 10 MiB
DEFAULT_STACK_BYTES = 2 * MiB  # of a thread, where the stack of a process has no limit


class GrammarTrial:
    """Tries whether grammars can be compiled, in processes of which one starts now; safe for several threads.

    Args:
        description: the JSON of a fast tokenizer.
        vocab_size: width of the masks.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, description: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self._pool = WorkerPool(NUM_PROCESSES, _start, (description, vocab_size, eos_token_ids))
        self._pool.start()

    def check(self, params: StructuredOutputsParams, is_quick: bool = False) -> None:
        """Raise RequestError for a grammar that cannot be enforced, or takes too much to compile.

        Raises TakesLonger for one that `is_quick` leaves too little time, and RequestFailed if the process fails.
        """
        seconds = QUICK_SECONDS if is_quick else MOST_SECONDS
        try:
            refusal, end = self._pool.run(_try, params, seconds, timeout=WALL_SECONDS)
        except (WorkerDied, WorkerTimeout) as caught:  # which need not be due to the grammar
            if is_quick:
                raise TakesLonger from None
            raise RequestFailed(f"the grammar could not be compiled ({caught}); try again later") from None
        if is_quick and end == signal.SIGPROF.name:
            raise TakesLonger
        if end:
            limits = f"{MOST_SECONDS:g} s, {MAX_BYTES // MiB} MiB or {_stack_bytes() // MiB} MiB of stack"
            raise refused(params, f"compiling it takes more than {limits}; simplify it ({end})")
        if refusal is not None:
            message, param = refusal
            raise RequestError(message, param=param)

    def close(self) -> None:
        self._pool.close()


def _stack_bytes() -> int:
    """Half of what a thread has for recursion, at most 4 MiB."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return (DEFAULT_STACK_BYTES if limit == resource.RLIM_INFINITY else min(limit, 8 * MiB)) // 2


# What follows runs in the processes.

_tokenizer: Any = None
_eos_token_ids: Sequence[int] = ()


def _start(description: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    global _tokenizer, _eos_token_ids
    from llguidance import LLTokenizer

    _tokenizer = LLTokenizer(description, n_vocab=vocab_size, eos_token=eos_token_ids)
    _eos_token_ids = eos_token_ids


def _try(params: StructuredOutputsParams, seconds: float) -> tuple[list[str | None] | None, str]:
    """Compile a grammar in a fork; the text and the `param` of its error, and how the fork ended, "" if by itself."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Of forks beside threads, whose locks this one does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _compile_and_exit(params, seconds, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return json.loads(answer), ""
    return None, signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _compile_and_exit(params: StructuredOutputsParams, seconds: float, writer: int) -> None:
    import resource

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where llguidance would tell how it ends
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_stack_bytes(), most))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        refusal = None
        try:
            with memory_limit(MAX_BYTES):
                compile_grammar(_tokenizer, _eos_token_ids, params, MAX_MASK_SECONDS)
        except RequestError as error:
            refusal = str(error), error.param
        os.write(writer, json.dumps(refusal).encode())
        os._exit(0)
    except BaseException:  # a fork must not go on with the work of its parent
        os._exit(1)
