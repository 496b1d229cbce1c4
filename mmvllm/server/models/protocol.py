"""Pydantic models of /v1/models and of the routes that load adapters."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from mmvllm.server.common.messages import Ignored, StrictModel

MAX_NAME, MAX_PATH = 256, 4096  # characters


class LoadAdapterRequest(StrictModel):
    """POST /v1/load_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, description="The model name of the adapter.")]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH, description="A folder in PEFT's format.")]
    load_inplace: bool | None = Field(None, description="Replace the adapter that has this name.")


class UnloadAdapterRequest(StrictModel):
    """POST /v1/unload_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    lora_int_id: Ignored = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmvllm"
    root: str  # the id, or the folder of an adapter
    parent: str | None = None  # the model that an adapter adapts
    max_model_len: int
    permission: list[dict] = []  # always empty


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
