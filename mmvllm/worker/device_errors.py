"""Which errors of a device leave it usable."""

import re

import torch

from mmvllm.processes.ranks import RanksFailed

# After these errors every later call of the CUDA context fails as well. torch has a class for those that it notices
# itself; Triton and libraries report them as texts.
_CONTEXT_IS_LOST = re.compile(
    r"(?:CUDA|cuDNN).*(?:illegal memory access|illegal instruction|device-side assert|unspecified launch failure"
    r"|misaligned address|invalid program counter|operation not supported on (?:global|shared)|hardware stack error"
    r"|launch timed out|ECC error|NVLink error|unknown error|context is destroyed|driver shutting down"
    r"|STATUS_EXECUTION_FAILED)",
    re.DOTALL,
)


def is_fatal(error: BaseException) -> bool:
    """Whether an error means that nothing can be computed any more; running out of memory does not."""
    if isinstance(error, RanksFailed):  # also if a rank has ended because it ran out of memory
        return True
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or _CONTEXT_IS_LOST.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    # Torch's allocator on a CPU, pinned memory and Triton have no class of their own for it.
    words = ("DefaultCPUAllocator: ", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in words)
