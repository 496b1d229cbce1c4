"""mmvllm: a small, exact inference engine for the Qwen-VL family of vision-language models."""

from importlib import import_module

__version__ = "0.1.0"

# In a checkout, mmvllm/kernels and mmvllm/processors are links to the folders beside this package; a wheel has the
# folders here. They have no __init__.py because transformers probes for the PyPI package named `kernels`, which a
# regular top-level package of that name would shadow.

_EXPORTS_BY_MODULE = {
    "mmvllm.entrypoints.llm": ("LLM",),
    "mmvllm.entrypoints.async_llm": ("AsyncLLM",),
    "mmvllm.engine.llm_engine": ("LLMEngine",),
    "mmvllm.config": ("EngineConfig", "EngineArgs", "AsyncEngineArgs"),
    "mmvllm.sampling_params": ("SamplingParams", "BeamSearchParams"),
    "mmvllm.lora": ("LoRARequest",),
    "mmvllm.inputs": ("TextPrompt", "TokensPrompt"),
    "mmvllm.structured.params": ("StructuredOutputsParams",),
    "mmvllm.outputs": (
        *("RequestOutput", "CompletionOutput", "Delta", "Logprob"),
        *("EmbeddingOutput", "ScoreOutput", "ContinuationScore", "BeamSearchOutput", "BeamSearchSequence"),
    ),
    "mmvllm.grounding": ("Box", "Point"),
    "mmvllm.errors": (
        *("RequestError", "ParameterError", "ImageError", "VideoError", "PromptTooLong"),
        *("RequestFailed", "RequestsAborted", "EngineBusy", "EngineStopped", "EngineFailed"),
        *("DeadlineExceeded", "ArgumentError"),
    ),
}
_EXPORTS = {name: module for module, names in _EXPORTS_BY_MODULE.items() for name in names}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str):
    """Import a public name on first use, so that `import mmvllm` and `mmvllm --help` do not load torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mmvllm' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
