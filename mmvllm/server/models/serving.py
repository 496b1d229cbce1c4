"""Serves /v1/models, and the routes that load and unload adapters."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from mmvllm.server.common.response_models import ERRORS
from mmvllm.server.common.served_models import ServedModels
from mmvllm.server.http.body import StrictRoute
from mmvllm.server.models.protocol import LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest


def router(models: ServedModels, loads_adapters: bool) -> APIRouter:
    """Return the routes; `loads_adapters` adds the routes that load adapters from folders named by clients."""
    routes = APIRouter()
    routes.include_router(_models(models))
    if loads_adapters:
        routes.include_router(_adapters(models))
    return routes


def _models(models: ServedModels) -> APIRouter:
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=ERRORS)

    @routes.get("")
    async def list_models() -> ModelList:
        """List the served model under each of its names, and its adapters."""
        return ModelList(data=[_card(models, name) for name in models.names()])

    @routes.get("/{model:path}")
    async def model(model: str) -> ModelCard:
        """Describe the model, or an adapter; 404 if none is served under this name."""
        return _card(models, model)

    return routes


def _adapters(models: ServedModels) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["models"], route_class=StrictRoute, responses=ERRORS)

    @routes.post("/load_lora_adapter", response_class=PlainTextResponse)
    async def load(body: LoadAdapterRequest) -> str:
        """Load an adapter from a folder on the server, and serve it under a name."""
        await models.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @routes.post("/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(body: UnloadAdapterRequest) -> str:
        """Stop serving an adapter."""
        models.unload(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    return routes


def _card(models: ServedModels, name: str) -> ModelCard:
    _, adapter = models.find(name)
    parent, root = (None, name) if adapter is None else (models.names()[0], str(adapter.lora_path))
    limit = models.max_model_len
    return ModelCard(id=name, root=root, created=models.created[name], max_model_len=limit, parent=parent)
