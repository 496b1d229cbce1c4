"""Device state: weights, KV cache and encoder outputs. Runs one batch at a time."""

import logging
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mmvllm.inputs import MultiModalItem
from mmvllm.kernels.normalize import normalize
from mmvllm.layers.attention import AttentionBackend
from mmvllm.lora.device_adapters import DeviceAdapters
from mmvllm.models.interface import Model
from mmvllm.processes.ranks import SINGLE, Operation, Ranks
from mmvllm.processors.images.processor import ImageProcessorConfig
from mmvllm.processors.videos.processor import VideoProcessorConfig
from mmvllm.sampling.prompt_logprobs import PromptOutputComputation, compute_logits_part, slice_sizes
from mmvllm.scheduler.step_inputs import StepInputs
from mmvllm.utils.stopwatch import Stopwatch
from mmvllm.utils.transfer import CopyStream, H2DCopier, current_device, to_device
from mmvllm.worker.cuda_graphs import Graphs
from mmvllm.worker.decode_graphs import DecodeGraphs
from mmvllm.worker.input_batch import InputBatch
from mmvllm.worker.memory import empty_kv_cache, num_graph_logits
from mmvllm.worker.mixed_graphs import MixedGraphs
from mmvllm.worker.vision_graphs import VisionGraphs
from mmvllm.worker.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_CPU_PATCHES = 1024  # in one ViT call: 8 images of 1024 took 5 % longer in one call than in eight (2 cores)


class ModelRunner:
    """Writes device tensors and nothing else.

    Args:
        num_blocks: KV blocks for sequences.
        max_num_seqs, max_model_len: sequences that run at once, and tokens of one.
        attention: the decoder's backend.
        use_graphs: whether `capture_graphs` will be called: padding rows of graphs write to one more block.
        worker_group: the other ranks, on rank 0.
        adapters: the slots for adapters of requests; None where these may have none.
        kv_dtype: what keys and values are stored in; by default `dtype`.
    """

    def __init__(
        self,
        model: Model,
        image_config: ImageProcessorConfig,
        video_config: VideoProcessorConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        attention: type[AttentionBackend],
        use_graphs: bool = False,
        ranks: Ranks = SINGLE,
        worker_group: WorkerGroup | None = None,
        adapters: DeviceAdapters | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        self.model, self.model_config = model, model.config
        self.device, self.dtype, self.attention, self.ranks = device, dtype, attention, ranks
        self.max_model_len = max_model_len
        self.worker_group, self.adapters = worker_group or WorkerGroup(), adapters
        configs = {"image": image_config, "video": video_config}
        self._tables = {modality: config.pixel_table().to(device, dtype) for modality, config in configs.items()}
        self._copier = H2DCopier(device, CopyStream(device) if device.type == "cuda" else None)
        self.num_blocks, self.block_size, self.use_graphs = num_blocks, block_size, use_graphs
        self.kv_dtype = kv_dtype or dtype
        self.kv_cache = empty_kv_cache(model.config, num_blocks + use_graphs, block_size, self.kv_dtype, device)
        max_blocks = -(-max_model_len // block_size)
        self.input_batch = InputBatch(max_num_seqs, max_blocks, block_size, self.kv_cache.shape[2] - 1, device)
        self.samples = torch.empty(2, 0, dtype=torch.int32, device=device)  # `StepInputs.samples` of the last step
        self.prompt_outputs: PromptOutputComputation | None = None  # of the last step, on rank 0
        self.graphs: tuple[MixedGraphs | DecodeGraphs, ...] = ()
        self.vision_graphs: VisionGraphs | None = None
        self._no_embeds = torch.empty(0, model.config.mm_embed_size, dtype=dtype, device=device)
        # (M, mm_embed_size) of each item in the encoder cache, by digest.
        self._encoder_outputs: dict[bytes, Tensor] = {}

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int, vision: bool = False) -> None:
        """Capture small steps of up to `max_num_seqs` sequences, for a runner made to use graphs, and the ViT."""
        start, shape = time.perf_counter(), (num_graph_logits(max_num_seqs), self.model_config.vocab_size)
        with current_device(self.device):
            logits = torch.empty(shape, dtype=self.dtype, device=self.device)
            graphs = Graphs(self.device)
            self.vision_graphs = VisionGraphs(graphs, self.model, self.dtype, self.device) if vision else None
            arguments = (graphs, self.model, self.kv_cache, self.input_batch, logits, max_num_seqs, max_model_len)
            self.graphs = (MixedGraphs(*arguments), DecodeGraphs(*arguments))  # those that take the most memory first
        number = sum(len(graphs.sizes) for graphs in (*self.graphs, self.vision_graphs) if graphs is not None)
        logger.info("captured %d CUDA graphs in %.2f s", number, time.perf_counter() - start)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, watch: Stopwatch) -> Tensor:
        """Encode the step's new items, then run the decoder -> logits (R, V), on rank 0."""
        fits_graphs = inputs.prompt_output_tokens is None and inputs.adapters is None
        graphs = next((graphs for graphs in self.graphs if fits_graphs and graphs.fits(inputs)), None)
        self.prompt_outputs = None
        if self.ranks.size > 1:
            operations = self._operations(inputs, graphs is not None)
            self.send(inputs, watch)
            self.ranks.expect(operations)  # at once: whatever fails from here on, the others are not left to wait
        for slot, adapter in inputs.new_adapters:
            self.adapters.write(slot, adapter)
        for digest in inputs.freed_digests:
            self._encoder_outputs.pop(digest, None)
        if inputs.block_copies:
            self._copy_blocks(inputs.block_copies)
        if inputs.new_mm_items:
            with watch.timing_vision():
                self._encode(inputs)
        mm_embeds = self._mm_embeds(inputs)
        if graphs is not None:
            logits, self.samples = graphs.run(inputs, mm_embeds)
            self.ranks.done_in_graph()
        else:
            batch, self.samples = self.input_batch.batch(inputs)
            watch.mark("copy")
            embeds = torch.cat(mm_embeds) if mm_embeds else self._no_embeds
            logits = self._logits(self.model.hidden_states(batch, embeds, self.kv_cache), inputs)
        watch.mark("decoder")
        return logits

    def _logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """Hidden states (R + Q, C) -> logits (R, V); the prompt outputs of the Q others are in `prompt_outputs`."""
        R = inputs.samples.shape[1]
        if inputs.prompt_output_tokens is not None:
            compute = PromptOutputComputation if self.ranks.rank == 0 else compute_logits_part
            self.prompt_outputs = compute(hidden[R:], inputs.prompt_output_tokens, self.model.logits)
        return self.model.logits(hidden[:R] if inputs.prompt_output_tokens is not None else hidden)

    def send(self, inputs: StepInputs, watch: Stopwatch) -> None:
        """Let the other ranks run the step, if there are any."""
        if self.ranks.size > 1:
            self.worker_group.send(inputs)
            watch.mark("send")

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, destination = to_device(torch.tensor(copies), self.device).T
        self.kv_cache[:, :, destination] = self.kv_cache[:, :, source]

    @torch.inference_mode()
    def append(self, token_ids: Tensor) -> None:
        """The tokens (R,) that rank 0 sampled from the last step's logits are what their sequences compute next."""
        if len(token_ids):
            self.ranks.broadcast(token_ids)
        self.input_batch.last_tokens[self.samples[0].long()] = token_ids

    def _mm_embeds(self, inputs: StepInputs) -> list[Tensor]:
        return [self._encoder_outputs[one.digest][one.first : one.last] for one in inputs.embed_slices]

    def has_encoder_output(self, digest: bytes) -> bool:
        """Whether an item's embeddings are on the devices of all ranks."""
        return digest in self._encoder_outputs and self.worker_group.has_encoder_output(digest)

    def keep_encoder_outputs(self, digests: Set[bytes]) -> None:
        """Free the embeddings of all items but `digests`; a failed step may not have freed what it should have."""
        for digest in self._encoder_outputs.keys() - digests:
            del self._encoder_outputs[digest]
        self.worker_group.keep_encoder_outputs(digests)

    def _operations(self, inputs: StepInputs, in_graph: bool) -> list[Operation]:
        """What the ranks exchange in this step."""
        encoded = [
            Operation("broadcast", (sum(item.num_tokens for item in items), self._no_embeds.shape[1]), self.dtype, rank)
            for rank, items in _by_encoder(inputs)
        ]
        num_samples = inputs.samples.shape[1]
        tokens = [Operation("broadcast", (num_samples,), torch.int64)] if num_samples else []
        decoder = self.model.operations(inputs.num_tokens, [*slice_sizes(inputs.prompt_output_tokens), num_samples])
        return [*encoded, *([Operation("graph")] if in_graph else decoder), *tokens]

    def _encode(self, inputs: StepInputs) -> None:
        """Run the ViT on the new items that this rank encodes, and exchange embeddings: all ranks get all of them."""
        for rank, items in _by_encoder(inputs):
            if rank == self.ranks.rank and not inputs.item_slots:
                self._encode_own(items)
            elif rank == self.ranks.rank:
                slots = dict(zip((item.digest for item in inputs.new_mm_items), inputs.item_slots, strict=True))
                for slot in dict.fromkeys(slots[item.digest] for item in items):
                    self._encode_own([item for item in items if slots[item.digest] == slot], slot)
        if self.ranks.size > 1:
            for rank, items in _by_encoder(inputs):
                self._broadcast_encoder_outputs(rank, items)

    def _encode_own(self, items: list[MultiModalItem], slot: int | None = None) -> None:
        """One call of the ViT on a GPU, a few whose tensors fit the caches on a CPU; all with one adapter."""
        for group in _groups(items, _CPU_PATCHES if self.device.type == "cpu" else None):
            embeds, is_kept = self._encode_group(group, slot)  # (M, mm_embed_size)
            self._keep(group, embeds, is_kept)

    def _keep(self, items: list[MultiModalItem], embeds: Tensor, is_kept: bool) -> None:
        for item, own in zip(items, embeds.split([item.num_tokens for item in items]), strict=True):
            # A copy: a view would keep the embeddings of the whole call in memory while one item is cached.
            self._encoder_outputs[item.digest] = own.clone() if len(items) > 1 or not is_kept else own

    def _broadcast_encoder_outputs(self, rank: int, items: list[MultiModalItem]) -> None:
        if rank == self.ranks.rank:
            self.ranks.broadcast(torch.cat([self._encoder_outputs[item.digest] for item in items]), rank)
        else:
            embeds = self._no_embeds.new_empty(sum(item.num_tokens for item in items), self._no_embeds.shape[1])
            self._keep(items, self.ranks.broadcast(embeds, rank), True)

    def _encode_group(self, items: list[MultiModalItem], slot: int | None) -> tuple[Tensor, bool]:
        """The embeddings of all items, and whether the next call leaves them intact."""
        patches, layout = self._pixels(items), self.model.layout([item.grid for item in items])
        if slot is not None:
            layout = replace(layout.to(self.device), slot=(slot, self.adapters.num_slots))
            return self.model.encode_patches(patches, layout), True
        size = self.vision_graphs.size(layout) if self.vision_graphs is not None else None
        if size is not None:
            return self.vision_graphs.run(size, patches, layout), False
        return self.model.encode_patches(patches, layout.to(self.device)), True

    def _pixels(self, items: list[MultiModalItem]) -> Tensor:
        """(P, patch_dim) normalized patches of all items; those that are alike are copied and normalized at once."""
        alike = groupby(items, lambda item: (item.modality, item.patches.dtype, item.patches.device))
        runs = [self._normalized(modality, [item.patches for item in run]) for (modality, *_), run in alike]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _normalized(self, modality: str, patches: Sequence[Tensor]) -> Tensor:
        pixels = self._copier.concatenated(patches)
        return normalize(pixels, self._tables[modality]) if pixels.dtype == torch.uint8 else pixels.to(self.dtype)


def _by_encoder(inputs: StepInputs) -> list[tuple[int, list[MultiModalItem]]]:
    """The new items that each rank encodes, for the ranks that do."""
    by_rank: dict[int, list[MultiModalItem]] = {}
    for rank, item in zip(inputs.encoders, inputs.new_mm_items, strict=True):
        by_rank.setdefault(rank, []).append(item)
    return sorted(by_rank.items())


def _groups(items: list[MultiModalItem], max_patches: int | None) -> Iterator[list[MultiModalItem]]:
    """Runs of items with at most `max_patches` patches together, or of one that has more; None sets no limit."""
    group: list[MultiModalItem] = []
    for item in items:
        if group and max_patches and sum(other.num_patches for other in [*group, item]) > max_patches:
            yield group
            group = []
        group.append(item)
    if group:
        yield group
