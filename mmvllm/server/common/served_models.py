"""The model names that a server serves: names of the engine's model, and names of LoRA adapters."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.errors import RequestError
from mmvllm.lora import LoRARequest
from mmvllm.server.errors import ApiError, model_not_found
from mmvllm.server.settings import ServerSettings

# Not the event loop's default threads, which data URIs need: the patterns of an adapter may take seconds to match.
_LOADERS = ThreadPoolExecutor(2, thread_name_prefix="mmvllm-adapter")


class ServedModels:
    """The models of one server by name, for use in one event loop only.

    Raises RequestError for an adapter that cannot be used. `created` maps each name to the time, in seconds since the
    epoch, when its current model or adapter was added.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._names = engine, settings.model_names
        self.created = dict.fromkeys(settings.model_names, int(time.time()))
        self._adapters: dict[str, LoRARequest] = {}
        self._loading: set[str] = set()
        for name, path in settings.lora_modules.items():
            self._check_free(name)
            self._add(_loaded(engine, name, path))

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def names(self) -> list[str]:
        """Return all names; the names of the engine's model come first."""
        return [*self._names, *self._adapters]

    def find(self, given: str | None) -> tuple[str, LoRARequest | None]:
        """Return the requested name, by default the model's first one, and the adapter with this name, if any.

        Raises ApiError for a name that is not served.
        """
        name = given or self._names[0]
        if name not in self.created:
            raise model_not_found(name, self.names())
        return name, self._adapters.get(name)

    async def load(self, name: str, path: str, replaces: bool = False) -> None:
        """Load an adapter and serve it under a name; `replaces` permits replacing an adapter with the same name.

        Raises ApiError if the adapter cannot be used or the name is taken.
        """
        run = partial(asyncio.get_running_loop().run_in_executor, _LOADERS)  # the folder may be on a host that hangs
        try:
            self._check_free(name, replaces)
            self._loading.add(name)
            try:
                if not await run(os.path.isdir, path):
                    raise ApiError(404, f"{path!r:.200} is not a folder of the server", param="lora_path")
                self._add(await run(_loaded, self._engine, name, path))
            finally:
                self._loading.discard(name)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param) from None

    def unload(self, name: str) -> None:
        """Stop serving an adapter; requests in flight keep it. Raises ApiError if no adapter has the name."""
        if name not in self._adapters:
            raise ApiError(404, f"the adapter {name!r:.100} is not loaded", param="lora_name", code="model_not_found")
        del self._adapters[name], self.created[name]

    def _check_free(self, name: str, replaces: bool = False) -> None:
        is_taken = name in self.created and not (replaces and name in self._adapters)
        if is_taken or name in self._loading:
            reason = f"the name {name!r:.100} is taken by another model or adapter; choose another"
            raise RequestError(f"{reason}, or replace an adapter with load_inplace: true", param="lora_name")

    def _add(self, adapter: LoRARequest) -> None:
        self._adapters[adapter.lora_name], self.created[adapter.lora_name] = adapter, int(time.time())


def _loaded(engine: AsyncLLM, name: str, path: str) -> LoRARequest:
    try:
        adapter = LoRARequest(lora_name=name, lora_path=os.path.abspath(path))
        engine.load_adapter(adapter)
    except RequestError as error:
        error.param = "lora_path"
        raise
    return adapter
