"""Image preprocessing of Qwen2-VL: sizes, normalisation, placeholders."""

from mmvllm.processors.image import ImageProcessorConfig

# Those of transformers' Qwen2VLImageProcessor, for checkpoints that leave them out.
IMAGE_DEFAULTS = ImageProcessorConfig(
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    rescale_factor=1 / 255,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)
