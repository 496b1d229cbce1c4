"""The startup time of `mmvllm caption`: from its start to its first caption, and to its end.

    python examples/benchmarks/startup.py
    python examples/benchmarks/startup.py --model Qwen2-VL-2B-Instruct/ -- --quantization int8

Options of `mmvllm caption` follow "--". The image is one of `examples/images`, the model by default the bundled one.
Each run is a new process; the first one, which reads files that are not in the system's cache, is listed but not
counted. `mmvllm --version` shows the time of the interpreter and the command line, `import torch` that of torch.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from mmvllm.cli.common import at_least_one

IMAGE = Path(__file__).resolve().parent.parent / "images" / "scene-01.png"


def seconds_of(*command: str) -> tuple[float, float]:
    """Return the seconds from the start of an interpreter to its first line of output, and to its end."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        first = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return first, time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(benchmark="startup")
    parser.add_argument("--repeat", type=at_least_one, default=5, help="runs that are counted (default: %(default)s)")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the small bundled model)")
    parser.add_argument("--max-tokens", type=at_least_one, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the last line to this file")
    parser.add_argument("options", nargs="*", metavar="OPTION", help='options of mmvllm caption, after "--"')
    args = parser.parse_args(argv)

    import torch

    from mmvllm.bench.report import emit, number, print_table, record

    model = ("--model", args.model) if args.model else ()
    caption = ("-m", "mmvllm", "caption", str(IMAGE), "--max-tokens", str(args.max_tokens), "--progress", "none")
    commands = {
        "mmvllm caption": (*caption, *model, *args.options),
        "mmvllm --version": ("-m", "mmvllm", "--version"),
        "import torch": ("-c", "import torch; print(torch.__version__)"),
    }
    results = {name: [seconds_of(*command) for _ in range(1 + args.repeat)] for name, command in commands.items()}
    rows = []
    for name, runs in results.items():
        first, last = ([run[i] for run in runs[1:]] for i in (0, 1))
        rows.append([name, *map(number, (runs[0][0], median(first), min(first), median(last)))])
    print_table("seconds", ["cold", "first line", "fastest", "end"], rows)
    emit(record(args, torch.device("cpu"), None, results=results), args.json)


if __name__ == "__main__":
    main()
