"""LoRA adapters of requests; programs written for vLLM import `mmvllm.lora.request`."""

from mmvllm.lora.request import LoRARequest, adapter_name

__all__ = ["LoRARequest", "adapter_name"]
