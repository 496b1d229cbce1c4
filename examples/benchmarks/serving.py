"""Load test of `mmvllm serve`: checks every completion, looks for leaks, and measures latency and throughput.

    pip install ".[serve,test]" && python examples/benchmarks/serving.py

Starts the server with the bundled model, and 64 clients (the `openai` package) that send requests without pause:
chats with two, one or no image and plain completions, streamed or not. One request in ten is cancelled by its client,
one in twenty has an invalid image. Every completion is compared with the one that `LLM` generated before. With
`--data-parallel-size 2` the server has two engines, and with `--kill 5` one of them is killed every five seconds if
both are up: requests that had a token may then end with an error, but others may not. At the end, the server must hold
no request, no KV block, no temporary file and no more open files and sockets than at its start, and its memory must not
have grown in the second half. The clients run on the same cores as the server. Exits with 1 if a check fails.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

try:
    import openai
    import psutil
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    raise SystemExit(f'this benchmark needs the {error.name} package: pip install ".[serve,test]"') from None

from mmvllm import LLM, SamplingParams
from mmvllm.cli.common import at_least_one

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scenes import draw, questions, random_scene

FORMATS = ("PNG", "JPEG", "WEBP")
INVALID_IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n only a signature").decode()
CANCELLED, INVALID = 0.10, 0.05  # fractions of the requests
ENGINE_ENDED = "the engine ended while it computed this"
CANCEL_S = 0.5  # maximum delay before a request that is not streamed is cancelled
DESCRIPTORS_PER_PROCESS = 5  # two pipes, a socket, and shared memory twice: its descriptor and its mapping
SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the text that `LLM` generates for it."""

    kind: str  # "image", "two images", "text" or "completion"
    request: dict  # arguments of the client's method, without model and stream
    expected: str = ""


@dataclass(slots=True)
class Tally:
    """Results of all clients."""

    outcomes: Counter = field(default_factory=Counter)
    num_correct: int = 0
    wrong: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)  # seconds
    per_token: list[float] = field(default_factory=list)
    num_tokens: int = 0


def make_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    makers = (one_image, one_image, one_image, two_images, text_only, completion)
    return [makers[i % len(makers)](rng) for i in range(count)]


def one_image(rng: random.Random) -> Case:
    scene = random_scene(rng)
    _, question, _ = rng.choice(questions(scene, rng))
    return Case("image", chat(image_part(scene, rng), text_part(question)))


def two_images(rng: random.Random) -> Case:
    parts = [image_part(random_scene(rng), rng) for _ in range(2)]
    return Case("two images", chat(*parts, text_part("Describe this image.")))


def text_only(rng: random.Random) -> Case:
    words = " ".join(
        rng.choice(("count", "shapes", "red", "star", "where", "digit")) for _ in range(rng.randint(1, 40))
    )
    return Case("text", chat(text_part(words)) | {"max_tokens": 48, "extra_body": {"ignore_eos": True}})


def completion(rng: random.Random) -> Case:
    return Case("completion", {"prompt": f"There are {rng.randint(0, 9)} ", "max_tokens": 32, "temperature": 0})


def chat(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": 64}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def image_part(scene, rng: random.Random) -> dict:
    buffer, format = io.BytesIO(), rng.choice(FORMATS)
    draw(scene, rng).save(buffer, format)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{format.lower()};base64,{data}"}}


def with_expected_texts(cases: list[Case]) -> list[Case]:
    """Return the cases with the texts that `LLM` generates for them."""
    llm = LLM()
    prompts = [
        {"text": c.request["prompt"]} if c.kind == "completion" else {"messages": c.request["messages"]} for c in cases
    ]
    params = [SamplingParams(max_tokens=c.request["max_tokens"], **c.request.get("extra_body", {})) for c in cases]
    outputs = llm.generate_multimodal(prompts, params)
    llm.exit()
    return [Case(c.kind, c.request, output.text) for c, output in zip(cases, outputs, strict=True)]


class ServerProcess:
    """`mmvllm serve` with the bundled model on a free port, with a separate folder for temporary files."""

    def __init__(self, folder: str, num_engines: int = 1):
        self.folder, self._num_engines, self.num_kills = folder, num_engines, 0
        command = [sys.executable, "-m", "mmvllm", "serve", "--port", "0", "--num-kvcache-blocks", "1024"]
        command += ["--data-parallel-size", str(num_engines)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": folder}
        )
        found = re.search(r"http://\S+?:\d+", self._process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start; its exit code is {self._process.wait(60)}")
        self.url = found[0]
        self.memory: list[int] = []
        self._watched = psutil.Process(self._process.pid)
        self.metrics()  # the first request opens files, which are not leaks
        self._num_open = self.num_open()

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
            sums = Counter()  # also over engines
            for sample in (sample for family in families for sample in family.samples):
                sums[sample.name] += sample.value
            return sums

    def is_whole(self) -> bool:
        """Return whether all engines are up."""
        return self._num_engines == 1 or self.metrics()["mmvllm_engine_up"] == self._num_engines

    async def kill_engines(self, seconds: float) -> None:
        """Kill one engine every `seconds`, if all engines are up."""
        while True:
            await asyncio.sleep(seconds)
            if await asyncio.to_thread(self.is_whole):
                spawned = [one for one in self._watched.children() if "--multiprocessing-fork" in one.cmdline()]
                # Processes that decode images have less memory than an engine.
                os.kill(max(spawned, key=lambda one: one.memory_info().rss).pid, signal.SIGKILL)
                self.num_kills += 1

    async def watch_memory(self) -> None:
        while True:
            self.memory.append(self._watched.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    def num_open(self) -> int:
        """Return the number of open files and sockets, without the processes that decode images.

        The server starts these processes as it needs them, up to one per core.
        """
        return self._watched.num_fds() - DESCRIPTORS_PER_PROCESS * len(self._watched.children())

    def leaks(self) -> list[str]:
        """Return descriptions of resources still held after all clients have disconnected."""
        found = []
        while not self.is_whole():
            time.sleep(0.1)
        for _ in range(100):
            metrics = self.metrics()
            names = ("requests_preparing", "sequences_waiting", "sequences_running", "kv_cache_usage_ratio")
            found = [f"{name} is {metrics[f'mmvllm_{name}']:g}" for name in names if metrics[f"mmvllm_{name}"]]
            found += [f"{n} open files or sockets" for n in [self.num_open() - self._num_open] if n > 0]
            found += [f"file {path}" for path in Path(self.folder).rglob("*") if path.is_file()]
            if not found:
                break
            time.sleep(0.1)
        second, last = (
            self.memory[len(self.memory) // 4 : len(self.memory) // 2],
            self.memory[len(self.memory) * 3 // 4 :],
        )
        if max(last) > 1.05 * max(second) and not self.num_kills:
            found.append(f"memory grew from {max(second) >> 20} to {max(last) >> 20} MiB")
        return found

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(60)


async def run_client(
    client: openai.AsyncOpenAI, cases: list[Case], rng: random.Random, end: float, tally: Tally
) -> None:
    while time.perf_counter() < end:
        case, number = rng.choice(cases), rng.random()
        if number < INVALID:
            await ask_with_invalid_image(client, tally)
        elif number < INVALID + CANCELLED:
            with ending_with_engines(tally):
                await cancel(client, case, rng, tally)
        elif rng.random() < 0.6:
            await ask_streaming(client, case, tally)
        else:
            with ending_with_engines(tally):
                await ask(client, case, tally)


@contextmanager
def ending_with_engines(tally: Tally, times: list[float] | None = None) -> Iterator[None]:
    """Count a request that ends with its engine; it is wrong if its `times` of tokens are known but empty."""
    try:
        yield
    except openai.APIError as error:
        if ENGINE_ENDED not in str(error):
            raise
        tally.outcomes["ended with its engine"] += 1
        if times is not None and not times:
            tally.wrong.append(f"a stream ended before it had begun: {error}")


def create(client: openai.AsyncOpenAI, case: Case, **options):
    endpoint = client.completions if case.kind == "completion" else client.chat.completions
    return endpoint.create(model="bundled", **case.request, **options)


def text_of(case: Case, choice) -> str:
    return choice.text if case.kind == "completion" else choice.message.content


def new_text(case: Case, choice) -> str:
    return (choice.text if case.kind == "completion" else choice.delta.content) or ""


def check(tally: Tally, case: Case, text: str, num_tokens: int) -> None:
    tally.outcomes[case.kind] += 1
    tally.num_tokens += num_tokens
    if text == case.expected:
        tally.num_correct += 1
    else:
        tally.wrong.append(f"{case.kind}: {text!r} instead of {case.expected!r}")


async def ask(client: openai.AsyncOpenAI, case: Case, tally: Tally, cancel_after: float | None = None) -> None:
    """Request a completion that is not streamed; cancel it after `cancel_after` seconds."""
    try:
        response = await asyncio.wait_for(create(client, case), cancel_after)
    except TimeoutError:
        tally.outcomes["cancelled"] += 1
    else:
        check(tally, case, text_of(case, response.choices[0]), response.usage.completion_tokens)


async def ask_streaming(client: openai.AsyncOpenAI, case: Case, tally: Tally) -> None:
    start, text, times, usage = time.perf_counter(), "", [], None
    with ending_with_engines(tally, times):
        async for chunk in await create(client, case, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            if chunk.choices and (new := new_text(case, chunk.choices[0])):
                text += new
                times.append(time.perf_counter())
        check(tally, case, text, usage.completion_tokens)
        if times:
            tally.first_token.append(times[0] - start)
        if usage.completion_tokens > 1 and len(times) > 1:
            tally.per_token.append((times[-1] - times[0]) / (usage.completion_tokens - 1))


async def cancel(client: openai.AsyncOpenAI, case: Case, rng: random.Random, tally: Tally) -> None:
    if rng.random() < 0.5:
        await ask(client, case, tally, rng.random() * CANCEL_S)
        return
    stream = await create(client, case, stream=True)
    for _ in range(rng.randint(0, 6)):
        await anext(stream, None)
    await stream.close()
    tally.outcomes["cancelled"] += 1


async def ask_with_invalid_image(client: openai.AsyncOpenAI, tally: Tally) -> None:
    parts = ({"type": "image_url", "image_url": {"url": INVALID_IMAGE}}, text_part("What is this?"))
    try:
        await client.chat.completions.create(model="bundled", **chat(*parts))
        tally.wrong.append("a request with an invalid image was completed")
    except openai.BadRequestError:
        tally.outcomes["invalid image refused"] += 1


async def load(
    server: ServerProcess, cases: list[Case], clients: int, seconds: float, seed: int, kill_seconds: float | None
) -> tuple[Tally, float]:
    """Run the clients, and return their results and the elapsed seconds."""
    tally, start = Tally(), time.perf_counter()
    tasks = [asyncio.create_task(server.watch_memory())]
    tasks += [asyncio.create_task(server.kill_engines(kill_seconds))] if kill_seconds else []
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        rngs = [random.Random(f"{seed}:{i}") for i in range(clients)]
        await asyncio.gather(*(run_client(client, cases, rng, start + seconds, tally) for rng in rngs))
    for task in tasks:
        task.cancel()
    if not server.num_kills and (number := tally.outcomes["ended with its engine"]):
        tally.wrong.append(f"{number} requests ended with an engine that was not killed")
    return tally, time.perf_counter() - start


def percentiles(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "too few samples"
    marks = quantiles(seconds, n=100, method="inclusive")
    return f"p50 {1000 * marks[49]:.0f} ms, p99 {1000 * marks[98]:.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=at_least_one, default=64)
    parser.add_argument("--seconds", type=at_least_one, default=60)
    parser.add_argument("--cases", type=at_least_one, default=300, help="different requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-parallel-size", type=at_least_one, default=1, metavar="N", help="engines of the server")
    parser.add_argument("--kill", type=at_least_one, metavar="S", help="kill an engine when all were up for S seconds")
    args = parser.parse_args()
    if args.kill and args.data_parallel_size == 1:
        parser.error("--kill needs a --data-parallel-size above 1")
    cases = with_expected_texts(make_cases(args.cases, args.seed))
    with TemporaryDirectory() as folder:
        server = ServerProcess(folder, args.data_parallel_size)
        try:
            tally, seconds = asyncio.run(load(server, cases, args.clients, args.seconds, args.seed, args.kill))
            leaks, metrics = server.leaks(), server.metrics()
        finally:
            code = server.stop()
    print(f"{args.clients} clients for {seconds:.0f} s: {dict(tally.outcomes)}")
    print(f"engines {args.data_parallel_size}, killed {server.num_kills} times")
    print(f"correct completions {tally.num_correct}, wrong {len(tally.wrong)}; leaks: {', '.join(leaks) or 'none'}")
    print(f"memory at the end {server.memory[-1] >> 20} MiB; server's exit code {code}")
    print(f"time to first token: {percentiles(tally.first_token)}; per token: {percentiles(tally.per_token)}")
    print(f"{sum(tally.outcomes.values()) / seconds:.1f} requests/s, {tally.num_tokens / seconds:.0f} tokens/s")
    print(*tally.wrong[:5], sep="\n")
    summary = {
        "requests": sum(tally.outcomes.values()),
        "right": tally.num_correct,
        "wrong": len(tally.wrong),
        "leaks": leaks,
        "kills": server.num_kills,
        "ended": tally.outcomes["ended with its engine"],
    }
    hit_ratio = metrics["mmvllm_cached_tokens_total"] / max(1, metrics["mmvllm_prompt_tokens_total"])
    print(json.dumps(summary | {"seconds": round(seconds, 1), "prefix_hit_ratio": round(hit_ratio, 3)}))
    return 1 if tally.wrong or leaks or code else 0


if __name__ == "__main__":
    sys.exit(main())
