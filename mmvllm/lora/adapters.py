"""Loads LoRA adapters into host memory while requests are prepared, never during a step."""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmvllm.config import ModelConfig
from mmvllm.errors import RequestError
from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.lora import Matrices, Region
from mmvllm.lora import LoRARequest
from mmvllm.models.interface import Model
from mmvllm.models.lora import CONFIG, WEIGHTS, LoraPair, Target, place_adapter, read_adapter
from mmvllm.models.registry import family_of
from mmvllm.processors.digest import digest_of
from mmvllm.utils.transfer import pinned

KEPT = 16  # adapters in host memory beyond those that requests in flight use


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter for one model, in host memory.

    Args:
        digest: digest of its files, which is equal for equal adapters of any name.
        adapts_vision: whether it changes the ViT's embeddings.
    """

    name: str
    digest: bytes
    matrices: Mapping[Target, Matrices]
    adapts_vision: bool

    def item_digest(self, digest: bytes) -> bytes:
        """Return the cache key of a multimodal item that is encoded with this adapter."""
        return digest_of(self.digest, digest) if self.adapts_vision else digest


def model_without_weights(model_config: ModelConfig) -> Model:
    """Build a model that has the names and shapes of its weights, but no memory for them."""
    with torch.device("meta"):
        return family_of(model_config.architecture).build(model_config, TorchAttention)


class AdapterStore:
    """Loads adapters for one model and keeps the most recently used ones; any thread may call it.

    For the device "meta", it only checks that adapters can be used, and keeps no values. It outlives an engine that has
    released its memory, so `model` has no weights.
    """

    def __init__(
        self,
        model: Model,
        regions: Mapping[Target, Region],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._model, self._regions, self._max_rank = model, regions, max_rank
        self._dtype, self._device = dtype, device
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple, Adapter] = OrderedDict()  # by folder and state of its files

    def load(self, request: LoRARequest) -> Adapter:
        """Return an adapter, reading it unless an unchanged copy is kept; raises RequestError if it is unusable."""
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, got {type(request).__name__}", param="lora_request", value=request
            )
        try:
            key = _state(Path(request.lora_path))
            with self._lock:
                found = self._kept.get(key)
            return self._keep(key, found or self._read(request))
        except (ValueError, OSError) as error:
            raise RequestError(f"adapter {request.lora_name!r:.100}: {error}", param="lora_request") from None

    def _keep(self, key: tuple, adapter: Adapter) -> Adapter:
        with self._lock:
            adapter = self._kept.setdefault(key, adapter)  # another thread may have read it meanwhile
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return adapter

    def _read(self, request: LoRARequest) -> Adapter:
        folder = Path(request.lora_path)
        pairs = read_adapter(folder)
        for name, pair in pairs.items():
            if len(pair.a) > self._max_rank:
                raise ValueError(f"its rank is {len(pair.a)} for {name}; max_lora_rank is {self._max_rank}")
        placed = place_adapter(folder, pairs, self._model, self._regions)
        matrices = {target: self._matrices(target, pair) for target, pair in placed.items()}
        adapts_vision = any(parameter.startswith("visual.") for parameter, _ in placed)
        return Adapter(request.lora_name, _digest(folder), matrices, adapts_vision)

    def _matrices(self, target: Target, pair: LoraPair) -> Matrices:
        """Return the matrices in the weights' dtype, with the scale in the second, in pinned memory for a GPU."""
        made = pair.a.to(self._dtype), (pair.b.float() * pair.scale).to(self._dtype)
        largest = made[0].abs().amax(1), made[1].abs().amax(0)  # per rank; any infinity makes the bound below infinite
        if not math.prod(values.double() for values in largest).sum().to(self._dtype).isfinite():
            reason = f"is too large for {self._dtype} with its scale of {pair.scale:g}"
            raise ValueError(f"the change of {target[0]} {reason}")
        return tuple(map(self._ready, made))

    def _ready(self, matrix: Tensor) -> Tensor:
        made = matrix.to("meta" if self._device.type == "meta" else "cpu").contiguous()
        return pinned(made) if self._device.type == "cuda" else made


def _state(folder: Path) -> tuple:
    """Return a key that changes when the adapter's files in a folder change; it ignores other files."""
    stats = [os.stat(path) if (path := folder / name).exists() else None for name in (CONFIG, WEIGHTS)]
    return os.path.realpath(folder), *(stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def _digest(folder: Path) -> bytes:
    return digest_of(*((folder / name).read_bytes() for name in (CONFIG, WEIGHTS)))
