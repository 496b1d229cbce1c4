"""The tables of a run in Markdown: measurements beside goals."""

from collections.abc import Iterator

Row = tuple[str, ...]

BANDWIDTH = {"2B": 0.60, "7B": 0.75}  # goals for decode steps, as shares of the memory's bandwidth
ARITHMETIC = 0.55  # goal for the ViT and prefill, as a share of the matrix throughput
IMAGES_PER_SECOND = 250  # goal with one output token, for the 2B sizes


def table(results: dict) -> str:
    """Return all tables, including the steps that could not be measured."""
    stages = results["stages"]
    environment = ", ".join(f"{name} {value}" for name, value in results["environment"].items() if value)
    tables = [
        _markdown("tests", ["tests", "passed", "failed", "skipped"], _tests(stages)),
        _markdown(
            "random decode calls", ["calls", "wrong", "differ when repeated", "error, reference"], _decode(stages)
        ),
        _markdown("throughput", ["images/s", "output tokens/s", "share of the limit", "goal"], _throughput(stages)),
        _markdown(
            "latency",
            ["first token", "decode step", "bandwidth in decode", "goal", "prefill", "ViT", "goal"],
            _latency(stages),
        ),
        _markdown("kernels", ["triton us", "torch us", "of bandwidth"], _kernels(stages)),
        _markdown("attention", ["choice", "us"], _attention(stages)),
        _markdown("steps", ["status", "seconds", "reason"], _steps(stages)),
    ]
    return "\n\n".join([environment, *filter(None, tables)]) + "\n"


def _markdown(title: str, header: list[str], rows: Iterator[Row]) -> str:
    lines = [_line(row) for row in rows]
    return "\n".join([_line((title, *header)), "|" + "---|" * (1 + len(header)), *lines]) if lines else ""


def _line(cells: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _measured(stages: dict, prefix: str) -> Iterator[tuple[str, dict]]:
    """Yield the results of steps whose names begin with `prefix`, in all stages."""
    for stage in stages.values():
        for name, step in stage["steps"].items():
            if name.startswith(prefix) and step.get("result"):
                yield name, step["result"]


def _tests(stages: dict) -> Iterator[Row]:
    for name in ("kernel-tests", "engine-tests", "memory-tests"):
        for _, result in _measured(stages, name):
            failed = result["failures"] + result["errors"]
            passed = result["tests"] - failed - result["skipped"]
            yield name, str(result["tests"]), str(passed), str(failed), str(result["skipped"])


def _decode(stages: dict) -> Iterator[Row]:
    for name, result in _measured(stages, "decode-calls"):
        errors = result["errors"]
        shown = f"{errors['quantile']:.2e}, {errors['reference_quantile']:.2e}"
        yield name, str(result["calls"]), str(result["wrong_calls"]), str(result["differing_calls"]), shown


def _throughput(stages: dict) -> Iterator[Row]:
    for name, record in _measured(stages, "throughput"):
        result, tokens = record["results"]["mmvllm"], record["arguments"]["output_tokens"]
        goal = f"{IMAGES_PER_SECOND} images/s" if tokens == 1 else ""
        share = _percent(result["roofline"]["share_of_limit"])
        yield name, f"{result['images_per_second']:.3g}", f"{result['output_tokens_per_second']:.4g}", share, goal


def _latency(stages: dict) -> Iterator[Row]:
    for prefix in ("latency", "backend"):
        for name, record in _measured(stages, prefix):
            goal = next((share for size, share in BANDWIDTH.items() if size in name), BANDWIDTH["2B"])
            for batch_size, engines in record["results"].items():
                result, shares = engines["mmvllm"], engines["mmvllm"]["roofline"]
                yield (
                    f"{name}, batch of {batch_size}",
                    _milliseconds(result["first_token_seconds"]["p50"]),
                    _milliseconds(result["decode_step_seconds"]),
                    _percent(shares["decode_of_bandwidth"]),
                    _percent(goal),
                    *(_percent(shares[f"{part}_of_arithmetic"]) for part in ("prefill", "vision")),
                    _percent(ARITHMETIC),
                )


def _kernels(stages: dict) -> Iterator[Row]:
    for name, record in _measured(stages, "kernels-"):
        for case in record["results"]:
            times = (case["triton_seconds"], case["torch_seconds"])
            shown = ("-" if seconds is None else f"{1e6 * seconds:.1f}" for seconds in times)
            yield f"{name}: {case['kernel']} {case['case']}", *shown, _percent(case["share_of_bandwidth"])


def _attention(stages: dict) -> Iterator[Row]:
    for name, result in _measured(stages, "tiles"):
        for one in result["results"]:
            yield f"{name}: {one['case']}", one["choice"], str(one.get("microseconds", one.get("error")))


def _steps(stages: dict) -> Iterator[Row]:
    for stage in stages.values():
        for name, step in stage["steps"].items():
            yield name, step["status"], f"{step['seconds']:.0f}", step.get("reason", "")[:200]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.4g} ms"
