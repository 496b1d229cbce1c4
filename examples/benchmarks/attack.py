"""Starts a server on this machine, attacks it, and checks that other clients do not notice.

    pip install ".[serve,test]" && python examples/benchmarks/attack.py

Starts `mmvllm serve` with the bundled model on a free port of 127.0.0.1. Hostile images, malformed HTTP, forged bodies,
stalled connections, clients that hang up and too many requests arrive at once, while other clients ask about
`examples/images` and read health and metrics. The answers must equal an undisturbed server's and arrive in time.
Afterwards memory, open files, threads and requests in flight must be back where they were, and the log must be empty.
Prints a table, and exits with 1 if a check fails. Needs about `--seconds` and one minute.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import psutil
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent))
import hostile
from hostile import CHAT, KEY, image_chat, request_bytes

IMAGES = sorted((Path(__file__).resolve().parents[1] / "images").glob("*.png"))[:4]
QUESTION = "What do you see?"
MAX_WAITING, BODY_SECONDS = 16, 5
BURST = 60  # requests at once; more than fit
ANSWER_SECONDS, POLL_SECONDS = 45.0, 10.0  # time limits for answers and for health, on a machine with two cores
SETTLE_SECONDS = 30.0
# Allowed growth: buffers of the allocator, and threads of pools that were not full yet.
MEMORY_GROWTH, MEMORY_BYTES, POOL_THREADS = 0.05, 32 << 20, 8
IN_FLIGHT = ("requests_preparing", "sequences_waiting", "sequences_running", "kv_cache_usage_ratio")
EXPECTED_LINES = ("mmvllm serve: without --model", "shutting down")
CLOSED = "closed"  # the outcome if the server closed the connection without a status


@dataclass(slots=True)
class Tally:
    """The outcomes of one kind of client."""

    allowed: Callable[[int | str], bool]
    outcomes: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds

    def add(self, outcome: int | str, what: str) -> None:
        self.outcomes[outcome] += 1
        if not self.allowed(outcome):
            self.problems.append(f"{what}: {outcome}")


class Target:
    """`mmvllm serve` on a free port of this machine."""

    def __init__(self, log: IO[str]):
        self._log = log
        command = [sys.executable, "-m", "mmvllm", "serve", "--port", "0", "--api-key", KEY, "--device", "cpu"]
        command += ["--dtype", "float32", "--max-waiting", str(MAX_WAITING), "--body-timeout", str(BODY_SECONDS)]
        command += ["--num-kvcache-blocks", "512", "--max-num-seqs", "8"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        if not (found := re.search(r":(\d+)/v1", self._process.stdout.readline())):
            raise SystemExit(f"the server did not start; its exit code is {self._process.wait(60)}")
        self.port, self._watched = int(found[1]), psutil.Process(self._process.pid)

    def usage(self) -> dict[str, int]:
        """Return memory in bytes, open files and sockets, and threads, of the server and its child processes."""
        processes = [self._watched, *self._watched.children(recursive=True)]
        return {
            "memory": sum(process.memory_info().rss for process in processes),
            "open files": sum(process.num_fds() for process in processes),
            "threads": sum(process.num_threads() for process in processes),
        }

    def stop(self) -> str:
        """Stop the server and return what it logged."""
        self._process.terminate()
        self._process.wait(60)
        self._log.seek(0)
        return "".join(line for line in self._log if not line.startswith(EXPECTED_LINES))


async def exchange(port: int, data: bytes, seconds: float = 120.0) -> tuple[int | str, bytes]:
    """Send bytes, read until the server closes the connection, and return the status, or CLOSED, and the body."""
    received = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(seconds):
                while piece := await reader.read(65536):
                    received += piece
    finally:
        writer.transport.abort()
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head else CLOSED, body


async def send_one_of(named: dict[str, bytes], port: int, rng: random.Random, tally: Tally) -> None:
    name = rng.choice([*named])
    status, _ = await exchange(port, named[name])
    tally.add(status, name)


async def stall(port: int, rng: random.Random, tally: Tally) -> None:
    """Send nothing, or a head or a body that never ends; the server must close the connection."""
    whole = request_bytes(CHAT, b"{" + b" " * 1000)
    begun = rng.choice([b"", whole[: rng.randrange(1, 60)], whole[:-500]])
    status, _ = await exchange(port, begun, seconds=60)
    tally.add(status, f"stalled after {len(begun)} bytes")


async def hang_up(port: int, rng: random.Random, tally: Tally) -> None:
    """Close or reset the connection at a random moment of the request or the response."""
    body = image_chat(
        rng.choice(IMAGES).read_bytes(), QUESTION, max_tokens=500, ignore_eos=True, stream=rng.random() < 0.5
    )
    data = request_bytes(CHAT, json.dumps(body).encode())
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
    await asyncio.sleep(rng.uniform(0, 1))
    if rng.random() < 0.5:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    tally.add("hung up", "")


async def overload(port: int, rng: random.Random, tally: Tally) -> None:
    """Send more requests at once than may wait."""
    body = json.dumps(hostile.chat(f"Hello {rng.random()}", max_tokens=8)).encode()
    answers = await asyncio.gather(*[exchange(port, request_bytes(CHAT, body)) for _ in range(BURST)])
    for status, _ in answers:
        tally.add(status, "burst")
    await asyncio.sleep(2)


async def ask(port: int, image: Path) -> str:
    """Return the greedy answer to the question; retry while the server is busy."""
    body = json.dumps(image_chat(image.read_bytes(), QUESTION, max_tokens=32)).encode()
    while True:
        status, answer = await exchange(port, request_bytes(CHAT, body))
        if status == 200:
            return json.loads(answer)["choices"][0]["message"]["content"]
        if status != 429:
            raise RuntimeError(f"status {status}: {answer[:200]!r}")
        await asyncio.sleep(0.2)


async def ask_and_check(expected: dict[Path, str], port: int, rng: random.Random, tally: Tally) -> None:
    image, start = rng.choice(IMAGES), time.monotonic()
    try:
        outcome = "right" if await ask(port, image) == expected[image] else "wrong"
    except RuntimeError as error:
        outcome = str(error)
    seconds = time.monotonic() - start
    tally.longest = max(tally.longest, seconds)
    tally.add(outcome if seconds < ANSWER_SECONDS else f"after {seconds:.0f} s", image.name)


async def poll(port: int, rng: random.Random, tally: Tally) -> None:
    path, start = rng.choice(["/health", "/health/live", "/metrics"]), time.monotonic()
    status, _ = await exchange(port, request_bytes(path, method="GET"))
    seconds = time.monotonic() - start
    tally.longest = max(tally.longest, seconds)
    tally.add(status if seconds < POLL_SECONDS else f"after {seconds:.0f} s", path)
    await asyncio.sleep(0.5)


async def metrics(port: int) -> dict[str, float]:
    """Return sums of all samples by name, without the prefix `mmvllm_`; `status 500` counts such responses."""
    _, body = await exchange(port, request_bytes("/metrics", method="GET"))
    found = Counter()
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[sample.name.removeprefix("mmvllm_")] += sample.value
            found["status 500"] += sample.value if sample.labels.get("status") == "500" else 0
    return found


def is_refusal(outcome: int | str) -> bool:
    return outcome == CLOSED or (isinstance(outcome, int) and (400 <= outcome < 500 or outcome in (503, 504)))


async def attack(port: int, expected: dict[Path, str], seconds: float, rng: random.Random) -> dict[str, Tally]:
    """Run all kinds of clients at once, each in a loop, and return their outcomes."""
    named = {"hostile images": with_images(), "malformed HTTP": hostile.http_requests(), "forged bodies": with_bodies()}
    clients = [
        *[(kind, 2, is_refusal, _sending(requests)) for kind, requests in named.items()],
        ("stalled", 20, lambda outcome: outcome in (CLOSED, 408), stall),
        ("hang-ups", 3, lambda outcome: True, hang_up),
        ("overload", 1, lambda outcome: outcome in (200, 429), overload),
        ("normal clients", 2, lambda outcome: outcome == "right", _asking(expected)),
        ("health, metrics", 1, lambda outcome: outcome == 200, poll),
    ]
    tallies, end = {kind: Tally(allowed) for kind, _, allowed, _ in clients}, time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for kind, number, _, act in clients:
            for _ in range(number):
                group.create_task(_repeat(act, port, random.Random(rng.random()), tallies[kind], end))
    return tallies


async def _repeat(act: Callable[..., Awaitable[None]], port: int, rng: random.Random, tally: Tally, end: float) -> None:
    while time.monotonic() < end:
        try:
            await act(port, rng, tally)
        except (OSError, TimeoutError) as error:
            tally.add(f"{type(error).__name__}", "connection")


def _sending(requests: dict[str, bytes]) -> Callable[..., Awaitable[None]]:
    return lambda *args: send_one_of(requests, *args)


def _asking(expected: dict[Path, str]) -> Callable[..., Awaitable[None]]:
    return lambda *args: ask_and_check(expected, *args)


def with_images() -> dict[str, bytes]:
    made = hostile.images().items()
    return {name: request_bytes(CHAT, json.dumps(image_chat(data, "?", max_tokens=4)).encode()) for name, data in made}


def with_bodies() -> dict[str, bytes]:
    return {name: request_bytes(CHAT, body) for name, body in hostile.bodies().items()}


async def settled(target: Target, before: dict[str, int] | None = None) -> tuple[dict[str, int], dict[str, float]]:
    """Return usage and metrics once they are back at `before`, or after `SETTLE_SECONDS`."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        await asyncio.sleep(2)
        counted, usage = await metrics(target.port), target.usage()
        is_back = not any(counted[name] for name in IN_FLIGHT) and not (before and growth(before, usage))
        if (is_back and before) or time.monotonic() > end:
            return usage, counted


def growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    memory = before["memory"] * (1 + MEMORY_GROWTH) + MEMORY_BYTES
    allowed = before | {"memory": memory, "threads": before["threads"] + POOL_THREADS}
    return [f"{name} grew from {before[name]:,} to {after[name]:,}" for name in before if after[name] > allowed[name]]


async def run(target: Target, seconds: float, seed: int) -> tuple[dict[str, Tally], list[str]]:
    """Attack twice: the first, shorter attack fills caches and buffers, and is not measured."""
    rng, images = random.Random(seed), IMAGES * 4  # asked at once, to start all processes that decode
    expected = dict(zip(images, await asyncio.gather(*(ask(target.port, image) for image in images)), strict=True))
    await attack(target.port, expected, seconds / 4, rng)
    before, _ = await settled(target)
    tallies = await attack(target.port, expected, seconds, rng)
    after, counted = await settled(target, before)
    problems = growth(before, after) + [f"{name} is {counted[name]:g}" for name in IN_FLIGHT if counted[name]]
    if counted["status 500"] or counted["ready"] != 1:
        problems.append(f"{counted['status 500']:g} responses have status 500, ready is {counted['ready']:g}")
    print("\n".join(f"{name:12} {before[name]:>15,} {after[name]:>15,}" for name in before))
    return tallies, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the attack (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of attacks (default: %(default)s)")
    args = parser.parse_args()
    with TemporaryFile("w+") as file:
        target = Target(file)
        try:
            tallies, problems = asyncio.run(run(target, args.seconds, args.seed))
        finally:
            log = target.stop()
    problems += [f"the server logged: {log[:2000]}"] if log else []
    print(f"{'clients':16} {'count':>6}  {'verdict':7} outcomes")
    for kind, tally in tallies.items():
        outcomes = ", ".join(f"{outcome}: {number}" for outcome, number in tally.outcomes.most_common())
        longest = f" (longest {tally.longest:.1f} s)" if tally.longest else ""
        verdict = "FAILED" if tally.problems else "ok"
        print(f"{kind:16} {tally.outcomes.total():6}  {verdict:7} {outcomes}{longest}")
        problems += [f"{kind}: {problem}" for problem in dict.fromkeys(tally.problems)]
    print("\n".join(problems) or "no problem was found")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
