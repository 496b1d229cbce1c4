"""LoRA adapters of requests; `mmvllm.lora.request` is the module that programs for vLLM import."""

from mmvllm.lora.request import LoRARequest, adapter_name

__all__ = ["LoRARequest", "adapter_name"]
