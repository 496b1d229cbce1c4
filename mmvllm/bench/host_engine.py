"""An engine whose model launches nothing: a step consists of the host's work and the sampler's arithmetic."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.inputs import EngineInput
from mmvllm.models.folder import BUNDLED
from mmvllm.sampling import sampler
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.step_inputs import StepInputs
from mmvllm.utils.stopwatch import Stopwatch
from mmvllm.worker.model_runner import ModelRunner

MAX_BATCHED_TOKENS = 8192  # a prompt that arrives is computed in one step
SAMPLING = {
    "greedy": {},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
}
SHIFTS = 16  # steps until the logits repeat
# The KV cache is allocated, although nothing is written to it: a decoder of one small layer keeps it small.
SMALL = {"intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
HEAD_DIM = 32
MROPE_SECTION = [8, 4, 4]  # half of HEAD_DIM


@dataclass(frozen=True, slots=True)
class HostCase:
    """The workload of a measurement; in each "mixed" step, a prompt arrives and a request finishes."""

    sequences: int
    context: int  # tokens of each prompt
    sampling: str  # key of SAMPLING
    kind: str  # "decode" or "mixed"

    def params(self, index: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, **SAMPLING[self.sampling])


def write_checkpoint(folder: Path, vocab_size: int, max_model_len: int, num_heads: int = 1) -> None:
    """Write the bundled model's files without weights, for a small decoder, another vocabulary and long contexts."""
    shutil.copytree(BUNDLED, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "hidden_size": HEAD_DIM * num_heads}
    text |= SMALL | sizes | {"vocab_size": vocab_size, "max_position_embeddings": max_model_len}
    text["rope_parameters"] |= {"mrope_section": MROPE_SECTION}
    config["vision_config"] |= {"hidden_size": sizes["hidden_size"], "depth": 1}
    (folder / "config.json").write_text(json.dumps(config))


def engine_options(max_num_seqs: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the engine; the user's arguments take precedence."""
    return {
        "load_format": "dummy",
        "skip_warmup": True,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "cpu_kvcache_bytes": 1 << 40,  # no limit: there are as many blocks as the sequences can use
    } | given


class StandIn:
    """Replaces an engine's model and returns prepared logits of text tokens, which differ from step to step.

    Without `arithmetic`, it also replaces the sampler's kernels, which are only launches on a GPU.
    """

    def __init__(self, engine: LLMEngine, arithmetic: bool):
        vocab_size, device = engine.model_config.vocab_size, engine.model_runner.device
        self.token_ids = text_ids(engine.tokenizer, vocab_size)
        generator = torch.Generator().manual_seed(0)
        logits = torch.full((engine.config.max_num_seqs + SHIFTS, vocab_size), -1e4)
        logits[:, self.token_ids] = 3 * torch.randn(len(logits), len(self.token_ids), generator=generator)
        self._logits, self._num_runs = logits.to(device), 0
        self._token_ids = self._logits.argmax(dim=-1)
        self._rng = np.random.default_rng(0)
        self._runner = engine.model_runner
        self._runner.run = self.run
        self._runner.worker_group.call(launch_nothing)
        self._kernels = {} if arithmetic else {name: getattr(sampler, name) for name in self._launches()}
        for name, launch in self._launches().items() if self._kernels else ():
            setattr(sampler, name, launch)

    def run(self, inputs: StepInputs, watch: Stopwatch) -> Tensor:
        """Copy what a step of the model copies, and return logits (R, V) of the rows to sample."""
        self._runner.send(inputs, watch)
        batch, self._runner.samples = self._runner.input_batch.batch(inputs)
        watch.mark("copy")
        self._num_runs += 1
        logits = self._rows(self._logits, len(batch.logits_indices))
        watch.mark("launch")
        return logits

    def close(self) -> None:
        """Restore the sampler's kernels."""
        for name, kernel in self._kernels.items():
            setattr(sampler, name, kernel)

    def _launches(self) -> dict[str, Callable]:
        """Return the replacements of the sampler's kernels."""
        return {
            "argmax": lambda logits: self._rows(self._token_ids, len(logits)),
            "sample": lambda logits, *_: self._rows(self._token_ids, len(logits)),
            "penalize": lambda logits, *_: logits,
            "count_tokens": lambda *_: None,
        }

    def _rows(self, prepared: Tensor, number: int) -> Tensor:
        shift = self._num_runs % SHIFTS
        return prepared[shift : shift + number]

    def prompt(self, num_tokens: int) -> EngineInput:
        """Return text that shares no prefix with any other."""
        return EngineInput(self._rng.choice(self.token_ids, num_tokens).tolist())


def launch_nothing(runner: ModelRunner) -> None:
    """Replace the model on other ranks, where a step only copies its inputs and exchanges tokens."""

    def run(inputs: StepInputs, watch: Stopwatch) -> None:
        _, runner.samples = runner.input_batch.batch(inputs)

    runner.run = run


def text_ids(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the tokens of the vocabulary that are whole characters, like nearly all tokens of a completion."""
    texts = tokenizer.batch_decode([[token_id] for token_id in range(min(len(tokenizer), vocab_size))], True)
    return [token_id for token_id, text in enumerate(texts) if text and "\ufffd" not in text]
