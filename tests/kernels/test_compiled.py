"""What kernels need of a GPU, from compiling them for it; none is there, and none of this says that they run."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton compiles on Linux only")

from tests.helpers.models.compiling import SHARED_MEMORY, WRITE_E4M3

KERNELS = Path(__file__).parents[2] / "kernels"
SPILLED = {"bfloat16": 64, "float32": 4096}  # bytes per thread, stored and loaded
# Accesses of 16 bits: a token's few KV heads and its angles have less than 16 bytes for each thread of the program, a
# table is read at each pixel's own level, one count of a row is changed, and a tile of a weight has a scale per output.
NARROW = {
    "_rotary_kernel": 12,
    "_rotary_write_kv_kernel": 12,
    "_normalize_kernel": 16,
    "_count_tokens_kernel": 2,
    "_quantized_linear_kernel": 4,
}


def run(tmp_path: Path, *args: str) -> list:
    """Lines of JSON from a process without Triton's interpreter and without binaries compiled before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.helpers.models.compiling", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """Names of all functions of the folder that are launched."""
    return {
        function.name
        for file in KERNELS.glob("*.py")
        for function in ast.parse(file.read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        (90, "bfloat16"),
        *(pytest.param(arch, "bfloat16", marks=pytest.mark.slow) for arch in (80, 89, 100)),
        *(pytest.param(arch, "float32", marks=pytest.mark.slow) for arch in (80, 89, 90, 100)),
    ],
)
def test_every_kernel_fits_every_gpu(arch, dtype, tmp_path):
    """Shared memory and registers, 16 bytes per access where rows are long, and no default of the compiler's."""
    found = run(tmp_path, str(arch), dtype)
    assert {variant["kernel"] for variant in found} == kernels() - (WRITE_E4M3 if arch < 89 else set())
    for variant in found:
        assert variant["shared"] <= SHARED_MEMORY[arch], variant
        assert variant["spilled"] <= SPILLED[dtype], variant
        assert variant["fusion_stated"], variant  # the default changes in Triton 3.10
        assert variant["narrow"] <= NARROW.get(variant["kernel"], 0), variant


@pytest.mark.spawns
def test_no_step_compiles_a_variant_of_its_own(tmp_path):
    """Numbers of sequences, lengths, widths of block tables and the alignment of views choose nothing."""
    [variants] = run(tmp_path, "variants")
    assert len(variants) >= 8 and set(variants.values()) == {1}, variants
