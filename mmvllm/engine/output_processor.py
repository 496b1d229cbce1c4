"""Why a sequence ends, what a request returns, and what is new of a completion while it is generated."""

import time
from dataclasses import dataclass

from mmvllm.engine.sequence import FinishReason, Sequence, SequenceGroup
from mmvllm.outputs import CompletionOutput, Delta, RequestOutput


class OutputProcessor:
    """Token ids -> text, finish reasons and outputs."""

    def __init__(self, tokenizer, eos_token_ids: frozenset[int]):
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids

    def finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Why a sequence ends with the token that was just appended, or None; call it once for each token."""
        params, token_id = seq.sampling_params, seq.last_token
        completes_stop_string = seq.completion_text is not None and seq.completion_text.append(token_id)
        if seq.num_completion_tokens >= params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.EOS
            if token_id in params.stop_token_ids or completes_stop_string:
                return FinishReason.STOP
        return FinishReason.LENGTH if seq.num_tokens >= seq.max_num_tokens else None

    def completion(self, seq: Sequence) -> CompletionOutput:
        """The completion of a sequence that has finished."""
        stop_at = (
            seq.completion_text.stop_at if seq.completion_text and seq.finish_reason is FinishReason.STOP else None
        )
        wants_logprobs = seq.sampling_params.logprobs is not None
        return CompletionOutput(
            text=self._tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True)
            if stop_at is None
            else seq.completion_text.text[:stop_at],
            token_ids=seq.completion_token_ids,
            finish_reason=seq.finish_reason.value,
            cumulative_logprob=seq.cumulative_logprob if wants_logprobs else None,
            logprobs=seq.logprobs if wants_logprobs else None,
        )

    def output(self, group: SequenceGroup) -> RequestOutput:
        """The output of a request that has finished, in whatever way."""
        first = group.first_seq
        return RequestOutput(
            request_id=group.request_id,
            completions=[self.completion(seq) for seq in group.seqs],
            prompt_token_ids=first.prompt_token_ids,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            num_image_tokens=first.num_media_tokens("image"),
            num_video_tokens=first.num_media_tokens("video"),
            error=group.error,
            arrival_time=first.arrival_time,
            first_token_time=first.first_token_time,
            finish_time=time.time(),
        )


class DeltaStream:
    """Follows a request that keeps the text of its completions while they are generated (`follow_text`)."""

    def __init__(self, group: SequenceGroup, processor: OutputProcessor):
        self.group, self._processor = group, processor
        self._cursors = [_Cursor(seq, index) for index, seq in enumerate(group.seqs)]

    def deltas(self) -> list[Delta]:
        """What is new since the last call; all that is left, with the request's output, once it has finished."""
        output = self.group.output
        cursors = [cursor for cursor in self._cursors if not cursor.has_ended]
        deltas = [self._delta(cursor, output if cursor is cursors[-1] else None) for cursor in cursors]
        return [delta for delta in deltas if delta is not None]

    def _delta(self, cursor: "_Cursor", output: RequestOutput | None) -> Delta | None:
        if not cursor.seq.is_finished:
            return cursor.delta()
        finished = self.group.output
        completion = self._processor.completion(cursor.seq) if finished is None else finished.completions[cursor.index]
        return cursor.last_delta(completion, output)


@dataclass(slots=True)
class _Cursor:
    """One sequence, and how much of it has been returned."""

    seq: Sequence
    index: int
    has_ended: bool = False  # whether its last delta has been returned
    num_sent: int = 0
    num_sent_chars: int = 0

    def delta(self) -> Delta | None:
        """What is new of a completion that is not finished; None if there is no settled text."""
        text = self.seq.completion_text
        settled = text.num_settled
        return self._take(text.text[:settled]) if settled > self.num_sent_chars else None

    def last_delta(self, completion: CompletionOutput, output: RequestOutput | None) -> Delta:
        self.has_ended = True
        return self._take(completion.text, completion.finish_reason, output)

    def _take(self, text: str, finish_reason: str | None = None, output: RequestOutput | None = None) -> Delta:
        seq, start = self.seq, self.num_sent
        token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
        logprobs = None if seq.sampling_params.logprobs is None else seq.logprobs[start:]
        new = text[self.num_sent_chars :]
        self.num_sent, self.num_sent_chars = start + len(token_ids), len(text)
        return Delta(seq.request_id, self.index, new, token_ids, logprobs, finish_reason, output, seq.num_prompt_tokens)
