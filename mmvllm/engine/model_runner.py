"""Device state: weights and KV cache. Runs one batch at a time."""

import logging

import torch
from torch import Tensor, nn

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.engine.batch import Batch, NewImage
from mmvllm.engine.encoder_cache import EncoderCache
from mmvllm.processors.image import ImageProcessorConfig, normalize_patches

logger = logging.getLogger(__name__)


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim * dtype.itemsize


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
    ):
        self.model = model
        self.model_config = model_config
        self.image_config = image_config
        self.device = device
        self.dtype = dtype
        self.num_blocks = engine_config.num_kvcache_blocks or self._affordable_blocks(engine_config)
        c, block_size = model_config, engine_config.kvcache_block_size
        shape = (c.num_hidden_layers, 2, self.num_blocks, block_size, c.num_key_value_heads, c.head_dim)
        self.kv_cache = torch.empty(shape, dtype=dtype, device=device)

    @torch.inference_mode()
    def run(self, batch: Batch, encoder_cache: EncoderCache) -> Tensor:
        """Encode the batch's new pictures, then run the decoder -> logits (R, V) float32."""
        if batch.block_copies.numel():
            source, destination = batch.block_copies
            self.kv_cache[:, :, destination] = self.kv_cache[:, :, source]
        self._encode(batch.new_images, encoder_cache)
        rows = [encoder_cache.rows(span.digest)[span.first : span.last] for span in batch.image_spans]
        image_rows = torch.cat(rows) if rows else torch.empty(0, self.model_config.hidden_size, device=self.device)
        return self.model(batch, image_rows, self.kv_cache)

    def _encode(self, images: tuple[NewImage, ...], encoder_cache: EncoderCache) -> None:
        """One ViT call for all new pictures of the step."""
        if not images:
            return
        patches = torch.cat([self._normalized(image.pixel_values) for image in images])
        rows = self.model.visual(patches, [image.grid_thw for image in images])  # (M, C)
        lengths = [len(image.pixel_values) // self.image_config.merge_size**2 for image in images]
        for image, own in zip(images, rows.split(lengths), strict=True):
            # A copy: a view would keep the rows of the whole step alive for as long as one picture of it is cached.
            encoder_cache.store(image.digest, own.clone() if len(images) > 1 else own)

    def _normalized(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values.to(self.device, non_blocking=True)
        return normalize_patches(pixels, self.image_config) if pixels.dtype == torch.uint8 else pixels.float()

    def _affordable_blocks(self, engine_config: EngineConfig) -> int:
        """KV blocks that fit: in a stated number of bytes on a CPU, in what a trial run leaves free on a GPU."""
        block_bytes = kv_block_bytes(self.model_config, engine_config.kvcache_block_size, self.dtype)
        if self.device.type == "cpu":
            budget, source = engine_config.cpu_kvcache_bytes, "cpu_kvcache_bytes"
        else:
            peak = self._peak_memory(engine_config)
            free, total = torch.cuda.mem_get_info(self.device)
            others = total - free - torch.cuda.memory_reserved(self.device)
            budget = (
                int(total * engine_config.gpu_memory_utilization) - others - peak - engine_config.encoder_cache_bytes
            )
            source = "gpu_memory_utilization"
        if budget < block_bytes:
            raise ValueError(
                f"no room for the KV cache: a block takes {block_bytes} bytes, {budget} are left; raise {source}, "
                "or lower max_num_batched_tokens, max_vision_patches or encoder_cache_bytes"
            )
        return budget // block_bytes

    @torch.inference_mode()
    def _peak_memory(self, engine_config: EngineConfig) -> int:
        """Bytes that the largest step takes on the GPU, weights included: out of memory now rather than in service."""
        torch.cuda.reset_peak_memory_stats(self.device)
        c = self.model_config
        if c.vision is not None:
            side = c.vision.spatial_merge_size
            grid = (1, side, max(side, engine_config.max_vision_patches // side // side * side))
            patches = torch.zeros(grid[1] * grid[2], c.vision.patch_dim, device=self.device)
            self.model.visual(patches, [grid])
        x = torch.zeros(engine_config.max_num_batched_tokens, c.hidden_size, dtype=self.dtype, device=self.device)
        self.model.decoder.layers[0].mlp(x)
        torch.empty(engine_config.max_num_seqs, c.vocab_size, dtype=torch.float32, device=self.device).softmax(
            -1
        ).double()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)
