"""Engines whose completions are written out beforehand."""

from mmvllm.scheduler.scheduler import Scheduler

_append = Scheduler._append


def script(monkeypatch, tokenizer, text: str) -> list[int]:
    """Let every completion in this process be this text with its special tokens, and then end; return its tokens."""
    token_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def append(scheduler, seq, _, *others) -> None:
        _append(scheduler, seq, token_ids[min(seq.num_completion_tokens, len(token_ids) - 1)], *others)

    monkeypatch.setattr(Scheduler, "_append", append)
    return token_ids
