"""Holds LoRA adapters on a device: the matrices of all slots, beside each linear layer's weight."""

import torch

from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.linear import Linear
from mmvllm.layers.lora import AdapterStack, Matrices, Region
from mmvllm.lora.adapters import Adapter
from mmvllm.models.interface import Model
from mmvllm.models.lora import linear_regions


class DeviceAdapters:
    """The adapter slots of a model, which are initially empty; create it before weights are processed."""

    def __init__(self, model: Model, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device):
        self.num_slots, self.device = num_slots, device
        self.regions = linear_regions(model)
        self._stacks: dict[str, AdapterStack] = {}
        by_parameter: dict[str, dict[int | None, Region]] = {}
        for (parameter, part), region in self.regions.items():
            by_parameter.setdefault(parameter, {})[part] = region
        for name, layer in model.named_modules():
            if isinstance(layer, Linear) and f"{name}.weight" in by_parameter:  # not a tied head
                sizes = layer.in_features, layer.part_widths(), by_parameter[f"{name}.weight"]
                layer.adapters = self._stacks[f"{name}.weight"] = AdapterStack(
                    num_slots, max_rank, *sizes, dtype, device
                )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels of every shape of layer, for few rows and for many."""
        shapes = {(stack.a.shape, stack.b.shape): stack for stack in self._stacks.values()}
        for stack in shapes.values():
            for num_rows in (1, 64 * self.num_slots + 1):
                rows = AdapterRows.alone(0, self.num_slots, num_rows, self.device)
                x = stack.a.new_zeros(num_rows, stack.a.shape[-1])
                stack.compute(x.new_zeros(num_rows, stack.b.shape[1]), x, rows)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot, replacing the previous adapter."""
        matrices: dict[str, dict[int | None, Matrices]] = {}
        for (parameter, part), pair in adapter.matrices.items():
            matrices.setdefault(parameter, {})[part] = pair
        for parameter, stack in self._stacks.items():
            stack.write(slot, matrices.get(parameter, {}))
