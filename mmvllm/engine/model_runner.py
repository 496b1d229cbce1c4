"""Device state: weights and KV cache. Runs one batch at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.engine.batch import Batch, NewImage
from mmvllm.engine.decode_graphs import DecodeGraphs, graphs_bytes
from mmvllm.engine.encoder_cache import EncoderCache
from mmvllm.engine.sampler import draw
from mmvllm.engine.stats import Stopwatch
from mmvllm.layers.transfer import current_device, to_device
from mmvllm.processors.image import ImageProcessorConfig, normalize_patches
from mmvllm.sampling_params import SamplingParams

_CPU_PATCHES = 1024  # in one ViT call: 8 pictures of 1024 took 5 % longer in one call than in eight (2 cores)


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim * dtype.itemsize


def affordable_blocks(
    budget: int, engine_config: EngineConfig, config: ModelConfig, block_size: int, dtype: torch.dtype
) -> int:
    """KV blocks that `budget` bytes hold, but no more than all sequences at full length could use."""
    longest = engine_config.max_model_len or config.max_position_embeddings
    useful = engine_config.max_num_seqs * -(-longest // block_size)
    return min(max(0, budget) // kv_block_bytes(config, block_size, dtype), useful)


def _groups(images: tuple[NewImage, ...], max_patches: int | None) -> Iterator[list[NewImage]]:
    """Runs of pictures with at most `max_patches` patches together, or of one that has more; None sets no limit."""
    group: list[NewImage] = []
    for image in images:
        if group and max_patches and sum(len(i.pixel_values) for i in [*group, image]) > max_patches:
            yield group
            group = []
        group.append(image)
    if group:
        yield group


class ModelRunner:
    """Writes device tensors, and the rows of the encoder cache; nothing else."""

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        image_config: ImageProcessorConfig,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        use_graphs: bool,
    ):
        self.model = model
        self.model_config = model_config
        self.image_config = image_config
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.use_graphs = use_graphs
        self._no_rows = torch.empty(0, model_config.hidden_size, dtype=dtype, device=device)
        self.num_blocks = engine_config.num_kvcache_blocks or self._num_blocks(engine_config)
        # With graphs the last block is nobody's: their padding rows write there.
        self.kv_cache = self._empty_kv_cache(self.num_blocks + use_graphs)
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> None:
        """Capture decode steps of up to `max_num_seqs` sequences, for a runner made to use them."""
        with current_device(self.device):
            self.graphs = DecodeGraphs(self.model, self.kv_cache, self._no_rows, max_num_seqs, max_model_len)

    @torch.inference_mode()
    def run(self, batch: Batch, encoder_cache: EncoderCache, watch: Stopwatch) -> Tensor:
        """Encode the batch's new pictures, then run the decoder -> logits (R, V) float32."""
        if batch.block_copies.numel():
            source, destination = batch.block_copies
            self.kv_cache[:, :, destination] = self.kv_cache[:, :, source]
        self._encode(batch.new_images, encoder_cache)
        watch.mark("vision")
        rows = [encoder_cache.rows(span.digest)[span.first : span.last] for span in batch.image_spans]
        if self.graphs is not None and self.graphs.fits(batch):
            logits = self.graphs.run(batch)
        else:
            logits = self.model(batch, torch.cat(rows) if rows else self._no_rows, self.kv_cache)
        watch.mark("decoder")
        return logits

    def _encode(self, images: tuple[NewImage, ...], encoder_cache: EncoderCache) -> None:
        """The ViT on all new pictures of the step: one call on a GPU, a few whose tensors fit the caches on a CPU."""
        for group in _groups(images, _CPU_PATCHES if self.device.type == "cpu" else None):
            patches = torch.cat([self._normalized(image.pixel_values) for image in group])
            rows = self.model.visual(patches, [image.grid_thw for image in group])  # (M, C)
            lengths = [len(image.pixel_values) // self.image_config.merge_size**2 for image in group]
            for image, own in zip(group, rows.split(lengths), strict=True):
                # A copy: a view would keep the rows of the whole call alive while one picture of it is cached.
                encoder_cache.store(image.digest, own.clone() if len(group) > 1 else own)

    def _normalized(self, pixel_values: Tensor) -> Tensor:
        pixels = to_device(pixel_values, self.device)
        patches = normalize_patches(pixels, self.image_config) if pixels.dtype == torch.uint8 else pixels
        return patches.to(self.dtype)

    def _empty_kv_cache(self, num_blocks: int) -> Tensor:
        c = self.model_config
        shape = (c.num_hidden_layers, 2, num_blocks, self.block_size, c.num_key_value_heads, c.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _num_blocks(self, engine_config: EngineConfig) -> int:
        """KV blocks that fit: in a stated number of bytes on a CPU, in what a trial run leaves free on a GPU."""
        if self.device.type == "cpu":
            budget, source = engine_config.cpu_kvcache_bytes, "cpu_kvcache_bytes"
        else:
            with current_device(self.device):
                peak = self._peak_memory(engine_config)
            free, total = torch.cuda.mem_get_info(self.device)
            others = total - free - torch.cuda.memory_reserved(self.device)
            budget = int(total * engine_config.gpu_memory_utilization) - others - peak
            budget -= engine_config.encoder_cache_bytes if self.model_config.vision else 0
            if self.use_graphs:
                budget -= graphs_bytes(engine_config.max_num_seqs, self.model_config.vocab_size)
            source = "gpu_memory_utilization"
        num_blocks = affordable_blocks(budget, engine_config, self.model_config, self.block_size, self.dtype)
        if num_blocks < 1:
            block_bytes = kv_block_bytes(self.model_config, self.block_size, self.dtype)
            raise ValueError(
                f"no room for the KV cache: a block takes {block_bytes} bytes, {budget} are left; raise {source}, "
                "or lower max_num_batched_tokens, max_vision_patches or encoder_cache_bytes"
            )
        return num_blocks

    @torch.inference_mode()
    def _peak_memory(self, engine_config: EngineConfig) -> int:
        """Bytes that the largest step takes on the GPU, weights included: out of memory now rather than in service.

        A single picture above `max_vision_patches`, which may go alone, is not reserved for.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        c = self.model_config
        if c.vision is not None:
            side = c.vision.spatial_merge_size
            grid = (1, side, max(side, engine_config.max_vision_patches // side // side * side))
            patches = torch.zeros(grid[1] * grid[2], c.vision.patch_dim, dtype=self.dtype, device=self.device)
            self.model.visual(patches, [grid])
            del patches
        logits = self.model(*self._largest_batch(engine_config))
        params = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1)
        draw(logits, [params] * len(logits), [0.5] * len(logits))
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def _largest_batch(self, engine_config: EngineConfig) -> tuple[Batch, Tensor, Tensor]:
        """The model's arguments for one prompt of the whole token budget, with all the logit rows there can be."""
        N = engine_config.max_num_batched_tokens
        num_blocks = -(-N // self.block_size)
        tokens = torch.arange(N, device=self.device)
        batch = Batch(
            input_ids=torch.zeros_like(tokens),
            positions=tokens.expand(3, N),
            slot_mapping=tokens,
            cu_seqlens_q=torch.tensor([0, N], dtype=torch.int32, device=self.device),
            kv_lens=torch.tensor([N], dtype=torch.int32, device=self.device),
            cu_seqlens_k=torch.tensor([0, N], dtype=torch.int32, device=self.device),
            block_table=torch.arange(num_blocks, dtype=torch.int32, device=self.device)[None],
            sample_at=tokens[: engine_config.max_num_seqs],
            image_at=tokens[:0],
            image_spans=(),
            new_images=(),
            block_copies=tokens[:0].view(2, 0),
            query_lens=(N,),
            context_lens=(N,),
        )
        return batch, self._no_rows, self._empty_kv_cache(num_blocks)
