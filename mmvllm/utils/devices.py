"""Choose the device for "auto": the first GPU that the engine can use, or the CPU, with the reason."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)  # required by Triton on NVIDIA's GPUs, and by bfloat16 in its kernels


def auto_device(memory_share: float) -> tuple["torch.device", str]:
    """Return the device and, if it is the CPU although torch sees accelerators, the reason; otherwise "".

    `memory_share` is the fraction of a GPU's memory that the engine and all other programs may use together.
    """
    import torch

    reasons = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        reason = cuda_unusable(i, memory_share)
        if reason is None:
            return torch.device(f"cuda:{i}" if i else "cuda"), ""
        reasons.append(f"cuda:{i} {reason}")
    reasons += [f"{name} is not supported" for name in unsupported_accelerators()]
    return torch.device("cpu"), "; ".join(reasons)


def cuda_unusable(index: int, memory_share: float) -> str | None:
    """Return why "auto" skips this GPU, or None if the engine can use it."""
    import torch

    if torch.version.hip:
        return "is an AMD GPU, which is not supported"
    try:
        capability = torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            numbers = [".".join(map(str, pair)) for pair in (capability, MIN_CAPABILITY)]
            return "has compute capability {}, below {}".format(*numbers)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # from the driver: the GPU is broken, or another process uses it exclusively
        return f"cannot be used: {str(error).partition(chr(10))[0]}"
    if free <= (1 - memory_share) * total:
        return f"has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, of which the engine may use none"
    return None


def unsupported_accelerators() -> list[str]:
    """Return the accelerators that torch can use but mmvllm cannot."""
    import torch

    modules = {"mps": torch.backends.mps, "xpu": torch.xpu}
    return [name for name, module in modules.items() if module.is_available()]
