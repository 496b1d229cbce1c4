"""Decides when a sequence ends and which completions a request returns, and streams completions as deltas."""

import time
from collections.abc import Callable
from functools import cache, cached_property

from mmvllm.engine.boxes import BoxReader
from mmvllm.errors import RequestError
from mmvllm.grounding import BoxFormat
from mmvllm.outputs import CompletionOutput, Delta, LogprobsById, RequestOutput
from mmvllm.scheduler.beam_search import Candidate
from mmvllm.scheduler.detokenizer import Pieces, TokenDecoder, pieces_of, special_ids, token_bytes
from mmvllm.scheduler.prompt_logprobs import PoolingState, PromptLogprobs
from mmvllm.scheduler.sampler_output import token_logprobs
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus

MAX_HELD = 64  # tokens held until their text is settled, if log-probabilities are dropped after a delta
# A completion repeats itself if the tokens at its end have a period p: each equals the token p positions before. vLLM's
# `repetition_detection` ends completions in the same way, but compares all patterns again with every token. Here a
# search also returns how many more tokens any repetition needs at least. There is no search before that, so nearly
# every token costs only a comparison of two numbers.
MAX_REPEATED_PERIOD = 64  # tokens of a repeated pattern
MIN_REPEATS = 4
MIN_REPEATED_TOKENS = 64  # of the whole repetition; shorter ones are often intended, such as a row of zeros or dashes


class OutputProcessor:
    """Turns token ids into text, finish reasons and outputs."""

    def __init__(self, tokenizer, eos_token_ids: frozenset[int], box_format: BoxFormat | None = None):
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._boxes = BoxReader(tokenizer, box_format)
        self._num_tokens = 0  # see `take_num_tokens`
        self._text_of = cache(lambda token_id: token_bytes(tokenizer, token_id).decode(errors="replace"))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return special_ids(self._tokenizer)

    def take_num_tokens(self) -> int:
        """Return the number of tokens that all sequences have generated since the last call."""
        taken, self._num_tokens = self._num_tokens, 0
        return taken

    def finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Return why a sequence ends with the token that was just appended, or None; call it once for each token."""
        self._num_tokens += 1
        return self._last_reason(seq)

    def _last_reason(self, seq: Sequence) -> FinishReason | None:
        params, token_ids, text = seq.sampling_params, seq.token_ids, seq.completion_text
        token_id, is_longest = token_ids[-1], len(token_ids) >= seq.max_num_tokens
        if text is None and token_id not in self._eos_token_ids and not params.stop_token_ids:  # nearly always
            return FinishReason.LENGTH if is_longest else self._repetition(seq)
        completes_stop_string = text is not None and text.append(token_id)
        if seq.num_completion_tokens >= params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.EOS
            if token_id in params.stop_token_ids or completes_stop_string:
                return FinishReason.STOP
        return FinishReason.LENGTH if is_longest else self._repetition(seq)

    def _repetition(self, seq: Sequence) -> FinishReason | None:
        """Return REPETITION if the sequence repeats itself and must end for that."""
        num_tokens, params = seq.num_completion_tokens, seq.sampling_params
        if not params.stop_on_repetition or num_tokens < max(seq.next_repetition_check, params.min_tokens):
            return None
        missing = tokens_until_repetition(seq.token_ids, seq.num_prompt_tokens)
        seq.next_repetition_check = num_tokens + missing
        return None if missing else FinishReason.REPETITION

    def delta_stream(self, group: SequenceGroup) -> "DeltaStream":
        """Return a stream that follows a request."""
        return DeltaStream(group, self, pieces_of(self._tokenizer, group.sampling_params.skip_special_tokens))

    def completion(self, seq: Sequence, index: int, keeps_logprobs: bool = True) -> CompletionOutput:
        """Return the completion of a finished sequence, perhaps without log-probabilities that deltas have."""
        is_stopped = seq.finish_reason is FinishReason.STOP
        found = seq.completion_text.found_stop if seq.completion_text and is_stopped else None
        wants_logprobs, token_ids = seq.sampling_params.num_logprobs is not None, seq.completion_token_ids
        if not seq.sampling_params.detokenize:
            text = ""
        elif found is None:
            text = self._decoded_text(seq)
        else:
            stop, start = found
            end = start + len(stop) if seq.sampling_params.include_stop_str_in_output else start
            text = seq.completion_text.text[:end]
        return CompletionOutput(
            text=text,
            token_ids=token_ids,
            finish_reason=seq.finish_reason.value,
            cumulative_logprob=seq.cumulative_logprob if wants_logprobs or seq.score is not None else None,
            logprobs=self.decoded(seq.logprobs) if wants_logprobs and keeps_logprobs else None,
            boxes=self._boxes.read(text, token_ids, seq.mm_items),
            score=seq.score,
            stop_reason=found[0] if found else token_ids[-1] if is_stopped else None,
            index=index,
        )

    def _decoded_text(self, seq: Sequence) -> str:
        """Return the text of a completion that no stop string ended; a special token may end it like a stop string."""
        params, token_ids = seq.sampling_params, seq.completion_token_ids
        if params.skip_special_tokens or params.include_stop_str_in_output:
            return self._tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        has_ended = seq.finish_reason in (FinishReason.EOS, FinishReason.STOP) and token_ids[-1] in self._special_ids
        return self._tokenizer.decode(token_ids[:-1] if has_ended else token_ids, skip_special_tokens=False)

    def decoded(self, logprobs: list[LogprobsById | None]) -> list[LogprobsById | None]:
        """Add the texts of tokens; a partial character becomes U+FFFD."""
        for found in filter(None, logprobs):
            for token_id, logprob in found.items():
                if logprob.decoded_token is None:
                    logprob.decoded_token = self._text_of(token_id)
        return logprobs

    def output(self, group: SequenceGroup) -> RequestOutput:
        """Return the output of a request that has finished, failed or been aborted."""
        first, prompt_outputs = group.first_seq, group.first_seq.prompt_outputs  # the sequence that computed the prompt
        if group.sampling_params.chooses_at_end:
            choose(group, self._last_reason)
        if group.beams is not None:
            self._num_tokens += sum(seq.num_completion_tokens for seq in group.seqs)
        return RequestOutput(
            request_id=group.request_id,
            completions=[self.completion(seq, index, group.keeps_logprobs) for index, seq in enumerate(group.seqs)],
            prompt=group.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=self.decoded(prompt_outputs.logprobs)
            if isinstance(prompt_outputs, PromptLogprobs)
            else None,
            embedding=prompt_outputs.vector if isinstance(prompt_outputs, PoolingState) else None,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            num_image_tokens=first.num_media_tokens("image"),
            num_video_tokens=first.num_media_tokens("video"),
            num_preemptions=sum(seq.num_preemptions for seq in group.seqs),
            error=None if group.error is None else str(group.error),
            exception=group.error if isinstance(group.error, RequestError) else None,
            arrival_time=first.arrival_time,
            first_token_time=first.first_token_time,
            finish_time=time.time(),
            **_stages(first, group.preparation),
        )


def _stages(first: Sequence, preparation: tuple[float, float] | None) -> dict[str, float | None]:
    """Return when a request reached the stages before its first token; `first` has computed the prompt."""
    begun, prepared = preparation or (None, None)
    encoding_start, encoding_time = _encoding(first)
    return {
        "preparation_start_time": begun,
        "preparation_end_time": prepared,
        "first_scheduled_time": first.first_scheduled_time,
        "encoding_start_time": encoding_start,
        "encoding_time": encoding_time,
    }


def _encoding(seq: Sequence) -> tuple[float | None, float | None]:
    """Return when the sequence's items were first encoded, and the seconds of the ViT."""
    try:
        seconds = [encoding.seconds() for encoding in seq.encodings]
    except RuntimeError:  # the device is lost
        return None, None
    if not seconds or None in seconds:
        return None, None
    return seq.encodings[0].start_time, sum(seconds)


class DeltaStream:
    """A stream of a request's new output; tokens are decoded only when deltas are requested.

    If the completions are chosen at the end, each has a single delta with the whole completion.
    """

    def __init__(self, group: SequenceGroup, processor: OutputProcessor, pieces: Pieces):
        self.group, self._processor, self._pieces = group, processor, pieces
        # For completions whose last delta has not been returned; None while the completions are not known.
        self._cursors = None if group.sampling_params.chooses_at_end else self._all_cursors()
        self._first = group.first_seq  # computes the prompt, and may not be among the chosen sequences
        has_prompts = isinstance(self._first.prompt_outputs, PromptLogprobs)
        n = group.sampling_params.n
        self._without_prompt = {*range(n)} if has_prompts else set()  # indexes of completions whose first delta is due

    def _all_cursors(self) -> list["_Cursor"]:
        return [
            _Cursor(seq, index, TokenDecoder(self._pieces), self._processor, self.group.keeps_logprobs)
            for index, seq in enumerate(self.group.seqs)
        ]

    def deltas(self) -> list[Delta]:
        """Return the output since the last call; once the request has finished, all that is left and its output."""
        if self._cursors is None:
            if self.group.output is None:
                return []
            self._cursors = self._all_cursors()
        deltas = []
        for cursor in self._cursors:  # `_last_delta` replaces the list
            delta = self._last_delta(cursor) if cursor.seq.status is SequenceStatus.FINISHED else cursor.delta()
            if delta is not None:
                deltas.append(delta)
                if self._without_prompt:
                    self._add_prompt(delta)
        return deltas

    def _add_prompt(self, delta: Delta) -> None:
        if delta.index in self._without_prompt:
            self._without_prompt.remove(delta.index)
            delta.prompt_token_ids = self._first.prompt_token_ids
            delta.prompt_logprobs = self._processor.decoded(self._first.prompt_outputs.logprobs)

    def _last_delta(self, cursor: "_Cursor") -> Delta:
        output = self.group.output
        completion = (
            self._processor.completion(cursor.seq, cursor.index, self.group.keeps_logprobs)
            if output is None
            else output.completions[cursor.index]
        )
        self._cursors = [other for other in self._cursors if other is not cursor]
        return cursor.last_delta(completion, None if self._cursors else output)


class _Cursor:
    """One sequence, and how much of its completion has been decoded and returned."""

    __slots__ = ("_decoder", "_drops", "_end", "_held", "_num_chars", "_num_sent", "_processor", "index", "seq")

    def __init__(
        self, seq: Sequence, index: int, decoder: TokenDecoder, processor: OutputProcessor, keeps_logprobs: bool
    ):
        """`decoder` is used unless the engine searches for stop strings and therefore keeps the text."""
        self.seq, self.index, self._decoder, self._processor = seq, index, decoder, processor
        self._drops = not keeps_logprobs and seq.sampling_params.num_logprobs is not None
        self._end = seq.num_prompt_tokens  # end of the tokens that have been decoded
        self._held: list[int] = []  # decoded tokens whose text is not settled
        self._num_chars = self._num_sent = 0  # returned characters of the text, and returned log-probabilities

    def delta(self) -> Delta | None:
        """Return the new output of an unfinished completion; None if there is no settled text."""
        seq = self.seq
        if not seq.sampling_params.detokenize:
            return None
        new = seq.token_ids[self._end :]
        self._end += len(new)
        text = self._decoder.decode(new) if seq.completion_text is None else seq.completion_text.take()
        if not text and not (self._drops and len(self._held) >= MAX_HELD):
            self._held += new
            return None
        return self._delta(new, text, None, None)

    def last_delta(self, completion: CompletionOutput, output: RequestOutput | None) -> Delta:
        text = completion.text[self._num_chars :]
        delta = self._delta(self.seq.token_ids[self._end :], text, completion.finish_reason, output)
        delta.boxes, delta.stop_reason = completion.boxes, completion.stop_reason
        return delta

    def _delta(self, new: list[int], text: str, finish_reason: str | None, output: RequestOutput | None) -> Delta:
        """Return the delta of the tokens held so far and of new ones."""
        seq, self._num_chars = self.seq, self._num_chars + len(text)
        token_ids = self._held + new if self._held else new
        self._held.clear()
        logprobs = None
        if seq.sampling_params.num_logprobs is not None:
            end = self._num_sent + len(token_ids)
            logprobs = self._processor.decoded(seq.logprobs[self._num_sent : end])
            if self._drops:
                del seq.logprobs[:end]
            else:
                self._num_sent = end
        return Delta(
            seq.request_id, self.index, text, token_ids, logprobs, finish_reason, output, seq.num_prompt_tokens
        )


def choose(group: SequenceGroup, finish_reason: Callable[[Sequence], FinishReason | None]) -> None:
    """Reduce a finished request to the completions that are returned, best first, and set their scores.

    `finish_reason` returns why a sequence ended with its last token.
    """
    n = group.sampling_params.n
    if group.beams is None:
        group.seqs = _ranked(group.seqs)[:n]
    else:
        _write_hypotheses(group, finish_reason)
        group.seqs = group.seqs[:n]


def _ranked(seqs: list[Sequence]) -> list[Sequence]:
    """Sort by log-probability per token, like OpenAI's `best_of`; sequences that an abort left empty are last."""
    begun = [seq for seq in seqs if seq.num_completion_tokens]
    for seq in begun:
        seq.score = seq.cumulative_logprob / seq.num_completion_tokens
    begun.sort(key=lambda seq: seq.score, reverse=True)
    return begun + [seq for seq in seqs if not seq.num_completion_tokens]


def _logprobs_of(token_id: int, ranked: list[Candidate], number: int) -> LogprobsById:
    token_ids, values = [one.token_id for one in ranked], [one.logprob for one in ranked]
    index = token_ids.index(token_id)
    return token_logprobs(token_id, values[index], index + 1, values[:number], token_ids[:number])


def _write_hypotheses(group: SequenceGroup, finish_reason: Callable[[Sequence], FinishReason | None]) -> None:
    """Write the search's hypotheses to the sequences; a search that an abort ended may have fewer of them."""
    hypotheses = group.beams.search.hypotheses()
    for seq in group.seqs:
        seq.token_ids = seq.prompt_token_ids
    for seq, hypothesis in zip(group.seqs, hypotheses, strict=False):
        seq.token_ids += hypothesis.token_ids
        seq.cumulative_logprob, seq.score = hypothesis.cumulative_logprob, hypothesis.score
        pairs = zip(hypothesis.token_ids, hypothesis.ranked, strict=False)
        seq.logprobs = [_logprobs_of(token_id, ranked, seq.sampling_params.logprobs) for token_id, ranked in pairs]
        if hypothesis.is_finished:
            seq.finish_reason = finish_reason(seq)


def repetition_length(period: int) -> int:
    """Return how many tokens of this period are a repetition, including the first pattern."""
    return max(MIN_REPEATED_TOKENS, MIN_REPEATS * period)


# Tokens that a repetition needs at least if nothing is repeated yet.
_LEAST_MISSING = min(repetition_length(period) - period for period in range(1, MAX_REPEATED_PERIOD + 1))


def tokens_until_repetition(token_ids: list[int], start: int) -> int:
    """Return how many more tokens, at least, make the end of `token_ids[start:]` a repetition; 0 if it is one."""
    recent = token_ids[max(start, len(token_ids) - MAX_REPEATED_PERIOD - 1) :]
    last, least = recent.pop() if recent else None, _LEAST_MISSING
    for period, token_id in enumerate(reversed(recent), 1):
        if token_id == last:  # other periods repeat no token
            needed = repetition_length(period) - period
            least = min(least, needed - _num_repeated(token_ids, start, period, needed))
    return least


def _num_repeated(token_ids: list[int], start: int, period: int, enough: int) -> int:
    """Count the last tokens that equal the token one period before them, up to `enough`."""
    end, first = len(token_ids) - 1, max(start + period, len(token_ids) - enough)
    at = end
    while at >= first and token_ids[at] == token_ids[at - period]:
        at -= 1
    return end - at
