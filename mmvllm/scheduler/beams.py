"""The sequences of a beam search: which of them goes on as which beam."""

from typing import Any, Generic, Protocol, TypeVar

from mmvllm.scheduler.beam_search import BeamSearch, Candidate


class BeamSequence(Protocol):
    """What a search reads and writes of a `Sequence`."""

    seq_id: int
    token_ids: list[int]
    forked_from: Any


S = TypeVar("S", bound=BeamSequence)


class Beams(Generic[S]):
    """A sequence for each beam. A beam of which nothing follows leaves its sequence to one of which two beams follow.

    The candidates of a beam are kept until all beams have theirs: budgets may divide them among several steps,
    and a beam that is preempted meanwhile need not compute them again.
    """

    def __init__(self, search: BeamSearch, seqs: list[S]):
        """The first of `search.width` sequences computes the prompt."""
        self.search, self._seqs = search, seqs
        self._beams = seqs[:1]  # the sequences of the search's running beams, in their order
        self._candidates: dict[int, list[Candidate]] = {}  # by sequence id

    def holds(self, seq: S) -> bool:
        """Whether a sequence has its candidates and waits for the other beams."""
        return seq.seq_id in self._candidates

    def hold(self, seq: S, candidates: list[Candidate]) -> bool:
        """Keep a beam's candidates; return whether all beams have theirs."""
        self._candidates[seq.seq_id] = candidates
        return len(self._candidates) == len(self._beams)

    def advance(self) -> tuple[list[S], list[S]]:
        """Go on with the next beams: those whose sequence stays what it was, with a token more, and the others.

        The others are the sequences that are `forked_from` the former.
        """
        parents = self._beams
        following = self.search.advance([self._candidates[seq.seq_id] for seq in parents])
        self._candidates.clear()
        stay = {number: parents[number] for number, _ in following}
        token_ids = {number: list(parent.token_ids) for number, parent in stay.items()}
        staying = list(stay.values())
        free = [seq for seq in self._seqs if seq not in staying]
        self._beams, moved = [], []
        for number, token_id in following:
            seq = stay.pop(number, None)
            if seq is None:
                seq = free.pop(0)
                seq.token_ids, seq.forked_from = list(token_ids[number]), parents[number]
                moved.append(seq)
            else:
                seq.forked_from = None
            seq.token_ids.append(token_id)
            self._beams.append(seq)
        return staying, moved
