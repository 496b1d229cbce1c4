"""The rules of beam search give the hypotheses of transformers, for a model that is a table."""

import random

import pytest
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from mmvllm.scheduler.beam_search import BeamSearch, Candidate

VOCAB, PROMPT, MAX_LENGTH = 24, [3, 1, 4], 9


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits of the next token by the length of the text and its last token."""

    config_class = PretrainedConfig
    _is_stateful = True  # nothing is cached

    def __init__(self, seed: int):
        super().__init__(PretrainedConfig(vocab_size=VOCAB))
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(len(PROMPT) + MAX_LENGTH, VOCAB, VOCAB, generator=generator)
        self.table = torch.nn.Parameter(logits)

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.table[input_ids.shape[1] - 1, input_ids[:, -1:]])

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}

    def candidates(self, token_ids: list[int], number: int) -> list[Candidate]:
        best = self.table[len(PROMPT) + len(token_ids) - 1, (PROMPT + token_ids)[-1]].log_softmax(-1).topk(number)
        return [Candidate(*pair) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def searched(model: TableModel, search: BeamSearch) -> list[tuple[list[int], float]]:
    beams = [[]]
    while not search.is_done:
        found = [model.candidates(token_ids, search.num_candidates) for token_ids in beams]
        beams = [[*beams[number], token_id] for number, token_id in search.advance(found)]
    return [(token_ids, score) for token_ids, _, score, *_ in search.hypotheses()]


def generated(model: TableModel, width: int, end_ids: list[int], **options) -> list[tuple[list[int], float]]:
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        **{"max_new_tokens": MAX_LENGTH, "do_sample": False, "use_cache": False, "eos_token_id": end_ids or None},
        **{"pad_token_id": VOCAB - 1, "num_beams": width, "num_return_sequences": width},
        **{"return_dict_in_generate": True, "output_scores": True, **options},
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    texts = [ids[len(PROMPT) :][:length] for ids, length in zip(out.sequences.tolist(), lengths, strict=True)]
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


@pytest.mark.thinned(5)
@torch.inference_mode()
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_hypotheses_and_scores_equal_transformers(length_penalty, early_stopping):
    choose = random.Random(f"{length_penalty}{early_stopping}")
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for seed in range(12):
        width = choose.choice([2, 3, 4, 7])
        end_ids = choose.sample(range(VOCAB), choose.choice([0, 1, 2, 5, 12]))
        model = TableModel(seed)
        search = BeamSearch(width, max_length=MAX_LENGTH, end_ids=end_ids, **options)
        got, want = searched(model, search), generated(model, width, end_ids, **options)
        assert [token_ids for token_ids, _ in got] == [token_ids for token_ids, _ in want], f"{seed}: {width} {end_ids}"
        assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=1e-5)


def test_one_beam_is_greedy():
    model = TableModel(5)
    (token_ids, _), *others = searched(model, BeamSearch(1, max_length=MAX_LENGTH, end_ids=[]))
    assert not others
    for i, token_id in enumerate(token_ids):
        assert token_id == model.candidates(token_ids[:i], 1)[0].token_id


def test_hypotheses_before_the_end_are_the_finished_ones_and_the_running_beams():
    search = BeamSearch(2, max_length=5, end_ids=[9], length_penalty=1.0)
    assert search.hypotheses() == [([], 0.0, 0.0, False, [])]
    assert search.advance([[Candidate(1, -1.0), Candidate(9, -2.0), Candidate(2, -3.0)]]) == [(0, 1), (0, 2)]
    assert search.hypotheses() == [([9], -2.0, -2.0, True, []), ([1], -1.0, -1.0, False, [])]
    assert not search.is_done
    ends = [Candidate(9, -0.5), Candidate(3, -4.0)]
    assert search.advance([ends, ends]) == []
    assert search.is_done
    assert search.hypotheses() == [([1, 9], -1.5, -0.75, True, []), ([2, 9], -3.5, -1.75, True, [])]


def test_a_search_ends_where_nothing_follows():
    search = BeamSearch(2, max_length=5, end_ids=[])
    assert search.advance([[]]) == [] and search.is_done
    assert search.hypotheses() == []
