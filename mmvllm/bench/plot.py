"""A plot of a run: tokens per step, KV blocks in use, and the time of each request."""

from importlib.util import find_spec
from pathlib import Path

from mmvllm.bench.runs import Run
from mmvllm.utils.text import counted


def require_matplotlib() -> None:
    """Raise ValueError if matplotlib is not installed; called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'mmvllm[bench]'")


def plot(run: Run, path: Path) -> None:
    """Write a PNG, regardless of the file's extension."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tokens, blocks, requests) = pyplot.subplots(3, sharex=True, figsize=(10, 9), layout="constrained")
    _draw_tokens(tokens, run)
    _draw_blocks(blocks, run)
    _draw_requests(requests, run)
    for axes in (tokens, blocks, requests):
        axes.grid(alpha=0.3)
    requests.set_xlim(0, run.seconds)
    requests.set_xlabel("seconds since the requests were submitted")
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _draw_tokens(axes, run: Run) -> None:
    for kind, marker in (("prefill", "s"), ("decode", ".")):
        steps = [(end, getattr(step, f"num_{kind}_tokens")) for end, step in zip(_ends(run), run.steps, strict=True)]
        axes.plot(*zip(*((end, tokens) for end, tokens in steps if tokens), strict=True), marker, label=kind)
    axes.set_yscale("log")  # a prefill step computes thousands of tokens, a decode step a few
    axes.set_ylabel("tokens in a step")
    axes.set_title(f"{counted(len(run.outputs), 'request')} in {run.seconds:.2f} s, {counted(len(run.steps), 'step')}")
    axes.legend(loc="upper right")


def _draw_blocks(axes, run: Run) -> None:
    used = [step.num_used_blocks for step in run.steps]
    axes.fill_between(_ends(run), used, step="post", alpha=0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("KV blocks in use")


def _draw_requests(axes, run: Run) -> None:
    outputs = sorted(run.outputs, key=lambda output: output.arrival_time)
    rows = range(1, len(outputs) + 1)
    for label, begin, end in (
        ("until the first token", "arrival_time", "first_token_time"),
        ("until the last token", "first_token_time", "finish_time"),
    ):
        begins = [getattr(output, begin) - run.start for output in outputs]
        ends = [getattr(output, end) - run.start for output in outputs]
        axes.barh(rows, [end - begin for begin, end in zip(begins, ends, strict=True)], 0.8, begins, label=label)
    axes.invert_yaxis()
    axes.set_ylabel("request, by arrival")
    axes.legend(loc="upper right")


def _ends(run: Run) -> list[float]:
    return [step.end - run.start_counter for step in run.steps]
