"""Pydantic models of the routes for operators."""

from typing import Literal

from pydantic import BaseModel


class EngineStatus(BaseModel):
    engine: str
    status: Literal["ok", "failing", "starting"]
    reason: str | None


class HealthResponse(BaseModel):
    status: Literal["ok", "failing", "starting", "draining", "stopped", "failed"]
    reason: str | None
    engines: list[EngineStatus] | None = None  # if the server has several engines


class LoadResponse(BaseModel):
    server_load: int


class VersionResponse(BaseModel):
    version: str
