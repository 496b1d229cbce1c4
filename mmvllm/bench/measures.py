"""Metrics of a run, in seconds, bytes and fractions, with their names in the JSON line."""

import statistics
from typing import Any

import numpy as np

from mmvllm.bench.roofline import Roofline
from mmvllm.bench.runs import Run, is_prefill, step_seconds

RATES = ("requests", "images", "input_tokens", "output_tokens")


def counts_and_rates(run: Run) -> dict[str, float]:
    counts = {
        "requests": len(run.outputs),
        "images": sum(output.num_image_tokens > 0 for output in run.outputs),
        "input_tokens": sum(output.num_prompt_tokens for output in run.outputs),
        "output_tokens": sum(len(output.token_ids) for output in run.outputs),
    }
    rates = {f"{name}_per_second": counts[name] / run.seconds for name in RATES}
    return {"seconds": run.seconds, **counts, **rates, "peak_memory_bytes": run.peak_memory}


def latencies(run: Run, since: float | None = None) -> dict[str, dict]:
    """Return percentiles over requests of times since `since`, by default since each request's arrival."""
    starts = [output.arrival_time if since is None else since for output in run.outputs]
    ends = [(output.first_token_time, output.finish_time) for output in run.outputs]
    longer = [output for output in run.outputs if len(output.token_ids) > 1]
    return {
        "first_token_seconds": percentiles([first - start for start, (first, _) in zip(starts, ends, strict=True)]),
        "request_seconds": percentiles([last - start for start, (_, last) in zip(starts, ends, strict=True)]),
        "seconds_per_output_token": percentiles(
            [(output.finish_time - output.first_token_time) / (len(output.token_ids) - 1) for output in longer]
        ),
    }


def phases(run: Run) -> dict[str, float]:
    """Return a run's seconds by phase; scheduling includes packing and commit, "other" is time outside the engine."""
    encoding = [step for step in run.steps if step.num_images]
    seconds = {
        "waiting_for_preparation": waiting_seconds(run),
        "vision": _sum(encoding, "vision"),
        "prefill": _sum(filter(is_prefill, run.steps), "decoder"),
        "decode": _sum((step for step in run.steps if not is_prefill(step)), "decoder"),
        "sampling": _sum(run.steps, "sample"),
        "scheduling": sum(_sum(run.steps, part) for part in ("schedule", "pack", "copy", "commit")),
    }
    return seconds | {"other": run.seconds - sum(seconds.values())}


def waiting_seconds(run: Run) -> float:
    """Return the time for which the engine was idle because no request was prepared yet."""
    waited, idle_since = 0.0, run.start_counter
    for step in run.steps:
        if idle_since is not None:
            waited += max(0.0, step.end - step_seconds(step) - idle_since)
        idle_since = None if step.num_running + step.num_waiting else step.end
    return waited


def hit_rates(run: Run) -> dict[str, float | None]:
    """Return the hit rates of the prefix cache, by prompt token, and of the encoder cache, by image looked up."""
    cached, prompt = (sum(getattr(output, f"num_{x}_tokens") for output in run.outputs) for x in ("cached", "prompt"))
    return {
        "prefix_cache_hit_rate": cached / prompt,
        "encoder_cache_hit_rate": run.encoder_hits / run.encoder_lookups if run.encoder_lookups else None,
    }


def shares_of_machine(run: Run, roofline: Roofline, concurrency: int) -> dict[str, Any]:
    """Return the machine's limit for these requests, and the share of it that the run reached."""
    limit = roofline.limit(run, concurrency)
    rates = counts_and_rates(run)
    return {
        **roofline.shares(run),
        "limit_requests_per_second": limit,
        "limit_images_per_second": limit * rates["images"] / rates["requests"],
        "share_of_limit": rates["requests_per_second"] / limit,
    }


def percentiles(values: list[float]) -> dict[str, float | None]:
    return {f"p{q}": float(np.percentile(values, q)) if values else None for q in (50, 90, 99)}


def medians(results: list[Any]) -> Any:
    """Merge results, which are nested dicts, into one with the median of each number; None if any is None."""
    if isinstance(results[0], dict):
        return {name: medians([result[name] for result in results]) for name in results[0]}
    return None if None in results else statistics.median(results)


def ratios(results: dict[str, dict], other: str) -> dict[str, float | None]:
    """Return the rates of mmvllm divided by the rates of the engine `other`; None if the latter is zero."""
    names = [f"{name}_per_second" for name in RATES]
    ours, theirs = results["mmvllm"], results[other]
    return {name: ours[name] / theirs[name] if theirs[name] else None for name in names}


def _sum(steps, part: str) -> float:
    return sum(step.seconds.get(part, 0.0) for step in steps)
