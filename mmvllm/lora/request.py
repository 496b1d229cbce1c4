"""`LoRARequest` names the LoRA adapter of a request, as in vLLM."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from mmvllm.errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request uses.

    Args:
        lora_name: name of the adapter in outputs and messages.
        lora_int_id: accepted for compatibility with vLLM but unused; the contents of files identify adapters.
        lora_path: folder of the adapter in PEFT's format, on the engine's machine.

    Raises RequestError for a wrong type.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | PathLike[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name must be a name, got {self.lora_name!r:.100}", param="lora_request")
        if not isinstance(self.lora_path, str | PathLike) or not str(self.lora_path):
            raise RequestError(f"lora_path must be a folder, got {self.lora_path!r:.100}", param="lora_request")


def adapter_name(request: Any) -> str | None:
    """Return the name of a request's adapter; None if it has none or an invalid one, which is refused later."""
    adapter = request.get("lora_request") if isinstance(request, dict) else None
    return adapter.lora_name if isinstance(adapter, LoRARequest) else None
