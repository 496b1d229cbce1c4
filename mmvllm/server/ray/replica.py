"""A replica in Ray Serve: the application with its engine, in an actor that Ray watches, drains and replaces."""

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import FastAPI
from ray import serve

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.app import build_app
from mmvllm.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """Describes an engine and its application; it is sent to every replica."""

    model: str | None
    engine_args: dict[str, Any]
    max_waiting: int
    settings: ServerSettings
    otlp_traces_endpoint: str | None = None
    num_threads: int
    folder: str

    def build(self) -> FastAPI:
        """Load the model and build the application, with the engine in `state.engine`."""
        with suppress(OSError):  # another machine may not have the folder; absolute paths work without it
            os.chdir(self.folder)
        torch.set_num_threads(self.num_threads)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        engine = AsyncLLM(
            self.model,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            max_waiting=self.max_waiting,
            trusts_grammars=False,
            **self.engine_args,
        )
        app = build_app(engine, self.settings)
        app.state.engine = engine
        return app


def replica_class(spec: ReplicaSpec) -> type:
    """Return the class of a deployment, whose replicas build their application when they start."""

    def build() -> FastAPI:
        return spec.build()

    @serve.ingress(build)
    class EngineReplica:
        """A replica with one engine; Ray drains its requests before it shuts the application and the engine down."""

        async def check_health(self) -> None:
            """Raise if the engine has failed: Ray replaces the replica."""
            health = self.app.state.engine.health()
            if not health.is_live:
                raise RuntimeError(f"the engine has {health.status}: {health.reason}")

    return EngineReplica
