"""Batch captioning of images and videos from folders, lists, tar shards and URLs, in runs that can be resumed."""

from importlib import import_module

_EXPORTS = {
    "caption_images": "mmvllm.captioning.run",
    "CaptionRun": "mmvllm.captioning.run",
    "CaptionSettings": "mmvllm.captioning.settings",
    "EndpointOptions": "mmvllm.captioning.jobs.endpoint_options",
    "JobError": "mmvllm.captioning.errors",
    "OutputOptions": "mmvllm.captioning.outputs.options",
    "PRESETS": "mmvllm.captioning.presets",
    "PRESET_SCHEMAS": "mmvllm.captioning.presets",
    "RayOptions": "mmvllm.captioning.jobs.ray_options",
    "RunOptions": "mmvllm.captioning.jobs.run_options",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str):
    """Import a public name on first use, so that `mmvllm caption --help` does not load torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mmvllm.captioning' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
