"""The beam search of one request, apart from its model: candidates in; beams, and at the end hypotheses, out.

The rules are transformers' (generation/utils.py, `_beam_search`): all candidates of all beams are ranked by
the sum of their log-probabilities. Those among the first `width` that end are finished hypotheses, of which the `width`
best are kept, by the sum over length ** length_penalty; the `width` best that do not end are the next beams.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]


class Candidate(NamedTuple):
    """A token that may follow a beam, and its log-probability after the logits processors."""

    token_id: int
    logprob: float


class Continuation(NamedTuple):
    """The next beam: an earlier one, by its number, and a token."""

    beam: int
    token_id: int


class Hypothesis(NamedTuple):
    """The tokens of a completion, with the one that ended it if it is finished."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float  # cumulative_logprob / length ** length_penalty
    is_finished: bool
    ranked: list[list[Candidate]]  # with `keeps_candidates`: what each token was chosen among, best first


@dataclass(frozen=True, slots=True, eq=False)
class _Beam:
    """The last token of a beam; `parent` has the tokens before it."""

    parent: "_Beam | None" = None
    token_id: int = -1
    length: int = 0
    logprob: float = 0.0
    ranked: list[Candidate] | None = None  # that the token is one of

    def path(self) -> "list[_Beam]":
        """The beams of all tokens, in their order."""
        found, beam = [], self
        while beam.parent is not None:
            found.append(beam)
            beam = beam.parent
        return found[::-1]


class BeamSearch:
    """The running beams, best first, and the finished hypotheses, best first.

    Args:
        width: number of beams, and of hypotheses.
        max_length: tokens of a hypothesis; the last one ends it.
        end_ids: tokens that end a hypothesis.
        early_stopping: False ends the search when no running beam, at its present length, would score better than the
            worst of `width` hypotheses; "never" assumes `max_length` where that is better; True ends it as soon as
            there are `width` hypotheses.
        keeps_candidates: hypotheses have the candidates of each token.
    """

    def __init__(
        self,
        width: int,
        *,
        max_length: int,
        end_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        keeps_candidates: bool = False,
    ):
        self.width, self.max_length, self.end_ids = width, max_length, frozenset(end_ids)
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.keeps_candidates = keeps_candidates
        self.is_done = False
        self._running, self._finished = [_Beam()], []

    @property
    def num_candidates(self) -> int:
        """How many candidates of each beam are enough, however many of them end: all `end_ids` may rank first."""
        return self.width + len(self.end_ids)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """Add a token to each beam; return the next beams, or nothing once the search is done.

        `candidates` has the most likely tokens of each running beam, best first, in the order of the beams.
        """
        ranked = [
            (beam.logprob + logprob, number, token_id)
            for number, (beam, found) in enumerate(zip(self._running, candidates, strict=True))
            for token_id, logprob in found
        ]
        ranked.sort(key=lambda one: -one[0])
        running, continuations = [], []
        for rank, (logprob, number, token_id) in enumerate(ranked):
            parent = self._running[number]
            own = candidates[number] if self.keeps_candidates else None
            beam = _Beam(parent, token_id, parent.length + 1, logprob, own)
            if beam.length >= self.max_length or token_id in self.end_ids:
                if rank < self.width:
                    self._finished.append(beam)
            elif len(running) < self.width:
                running.append(beam)
                continuations.append(Continuation(number, token_id))
        self._finished = sorted(self._finished, key=self._score, reverse=True)[: self.width]
        self._running = running
        self.is_done = not running or (len(self._finished) == self.width and not self._goes_on())
        return [] if self.is_done else continuations

    def hypotheses(self) -> list[Hypothesis]:
        """At most `width`, best first: those that are finished, then, before the end, the running beams."""
        found = [self._hypothesis(beam, True) for beam in self._finished]
        if not self.is_done:
            found += [self._hypothesis(beam, False) for beam in self._running]
        return found[: self.width]

    def _goes_on(self) -> bool:
        """Whether a running beam could still become a better hypothesis than the worst of `width`."""
        if self.early_stopping is True:
            return False
        best = self._running[0]
        longest = self.max_length if self.early_stopping == "never" and self.length_penalty > 0 else best.length
        return best.logprob / longest**self.length_penalty > self._score(self._finished[-1])

    def _score(self, beam: _Beam) -> float:
        return beam.logprob / max(1, beam.length) ** self.length_penalty

    def _hypothesis(self, beam: _Beam, is_finished: bool) -> Hypothesis:
        path = beam.path()
        ranked = [one.ranked for one in path] if self.keeps_candidates else []
        return Hypothesis([one.token_id for one in path], beam.logprob, self._score(beam), is_finished, ranked)
