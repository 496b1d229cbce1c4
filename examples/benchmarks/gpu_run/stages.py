"""The stages of the run, in their order, and the same stages small enough for a CPU."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpu_run.steps import RunStep, python

INTERPRETER = {"TRITON_INTERPRET": "1"}  # runs kernels on a CPU
ALONE = "kv_blocks_fill or test_on_a_gpu"  # tests that measure the GPU's free memory


@dataclass(frozen=True)
class Stage:
    name: str
    title: str
    minutes: float  # time limit
    steps: list[RunStep]


def stages(output: Path, small: bool) -> list[Stage]:
    """Return the stages; `output` has the folders of the checkpoints, and gets the files of pytest."""
    return _Stages(output, small).all()


class _Stages:
    def __init__(self, output: Path, small: bool):
        self.output, self.small = output, small
        self.folders = {"2B": output / "checkpoints/2B", "7B": output / "checkpoints/7B"}

    def all(self) -> list[Stage]:
        return [
            Stage("kernels", "Versions, and tests of the kernels", 5, self._kernels()),
            Stage("engine", "Tests of the engine", 6, self._engine()),
            Stage("decode", "Random decode calls with split contexts", 3, self._decode()),
            Stage("bench-kernels", "Kernels beside their references", 3, self._bench_kernels()),
            Stage("throughput", "Throughput of different images of 448x448", 4, self._throughput()),
            Stage("latency", "Latency and profiles of decode steps, 2B", 5, self._latency()),
            Stage("attention", "Attention backends and tiles", 5, self._attention()),
            Stage("models", "7B, with and without CUDA graphs and 8-bit floats", 6, self._models()),
        ]

    def _kernels(self) -> list[RunStep]:
        info = [
            RunStep(f"info-{size}", python("-m", "mmvllm", "info", "--model", self.folders[size]))
            for size in self._sizes
        ]
        chosen = ["-m", "not gpu", "tests/kernels/test_quick_gelu.py"] if self.small else ["-m", "gpu", "tests/kernels"]
        return [*info, self._pytest("kernel-tests", *chosen)]

    def _engine(self) -> list[RunStep]:
        if self.small:
            return [self._pytest("engine-tests", "-m", "not gpu", "tests/utils/test_devices.py")]
        files = ("tests/end_to_end/test_gpu.py", "tests/cli/test_bench.py")
        return [
            self._pytest("engine-tests", "-m", "gpu", "-k", f"not ({ALONE})", *files),
            self._pytest("memory-tests", "-m", "gpu", "-k", ALONE, *files, parallel=False),
        ]

    def _decode(self) -> list[RunStep]:
        limits = ("--calls", 1, "--longest", 150) if self.small else ("--calls", 20_000, "--seconds", 150)
        return [RunStep("decode-calls", python("-m", "gpu_run.decode", *limits), env=INTERPRETER if self.small else {})]

    def _bench_kernels(self) -> list[RunStep]:
        names = ("--device", "cpu", "quick_gelu") if self.small else ("--dtype", "bfloat16")
        return [self._bench(f"kernels-{size}", "kernels", size, *names, engine=False) for size in self._sizes]

    def _throughput(self) -> list[RunStep]:
        requests = ("--requests", 3) if self.small else ("--requests", 512, "--concurrency", 256)
        return [
            self._bench(f"throughput-{tokens}", "throughput", "2B", *requests, "--output-tokens", tokens, "--repeat", 1)
            for tokens in ((1, 3) if self.small else (1, 64))
        ]

    def _latency(self) -> list[RunStep]:
        batches = ("1,2",) if self.small else ("1,8", "64,256")
        options = ("--size", 64, "--dtype", "float32") if self.small else ()
        profiled = ",".join(batches)
        command = python("-m", "gpu_run.profile", self.folders["2B"], "--batch-sizes", profiled, *options)
        return [*(self._latency_of("2B", sizes) for sizes in batches), RunStep("profile", command)]

    def _attention(self) -> list[RunStep]:
        # A backend that is not installed is refused as a wrong argument.
        engines = [
            self._latency_of("2B", "1" if self.small else "64", "--attention-backend", name, name=f"backend-{name}")
            for name in (("torch",) if self.small else ("triton", "flash", "flash4", "torch"))
        ]
        small = ("--small",) if self.small else ()
        kernels = [
            RunStep(
                f"tiles-{size}",
                python("-m", "gpu_run.attention", self.folders[size], *small),
                env=INTERPRETER if self.small else {},
            )
            for size in self._sizes
        ]
        return [*engines, *kernels]

    def _models(self) -> list[RunStep]:
        batches, eager = ("1", "1") if self.small else ("1,64", "64")
        return [
            self._latency_of("7B", batches),
            self._latency_of("7B", eager, "--enforce-eager", name="latency-7B-eager"),
            self._latency_of("7B", batches, "--quantization", "fp8", name="latency-7B-fp8"),
            self._latency_of("2B", eager, "--enforce-eager", name="latency-2B-eager"),
            self._latency_of("2B", eager, "--quantization", "fp8", name="latency-2B-fp8"),
        ]

    @property
    def _sizes(self) -> list[str]:
        return ["2B"] if self.small else ["2B", "7B"]

    def _latency_of(self, size: str, batches: str, *options: object, name: str | None = None) -> RunStep:
        tokens = 3 if self.small else 33
        given = ("--batch-sizes", batches, "--output-tokens", tokens, "--repeat", 1, *options)
        return self._bench(name or f"latency-{size}-{batches.replace(',', '-')}", "latency", size, *given)

    def _bench(self, name: str, benchmark: str, size: str, *options: object, engine: bool = True) -> RunStep:
        shared = ("--load-format", "dummy", "--size", "64x64" if self.small else "448x448") if engine else ()
        if engine:
            shared += ("--device", "cpu", "--dtype", "float32") if self.small else ("--dtype", "bfloat16")
        command = python("-m", "mmvllm", "bench", benchmark, "--model", self.folders[size], *shared, *options)
        return RunStep(name, command, may_be_refused=True)

    def _pytest(self, name: str, *arguments: str, parallel: bool = True) -> RunStep:
        """Run pytest without the options of pyproject.toml, which need a plugin; with the plugin, in 8 processes."""
        workers = ("-n", 8, "--dist", "load") if parallel and not self.small and find_spec("xdist") else ()
        junit = self.output / f"logs/{name}.xml"
        options = ("-o", "addopts=", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={junit}", *workers)
        return RunStep(name, python("-m", "pytest", *options, *arguments), needs=("pytest",), junit=junit)
