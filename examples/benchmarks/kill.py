"""Kills captioning at random moments, resumes it, and compares it with an undisturbed run.

    python examples/benchmarks/kill.py 200
    python examples/benchmarks/kill.py 12 --data-parallel-size 2 --images 664 --format jsonl

Draws 20 small images in folders and a tar, with duplicates and broken files, and captions them with the bundled model
in every format, beside the images and in an output folder. Each job is killed again and again, at moments spread over
start, model load, run and end, drawn from a seed: four times in six by SIGKILL, once by SIGTERM, once by a double
SIGINT. When it has finished, its records are compared with the records of an undisturbed run, without times and without
the choice of the original among equal images, and its caption files byte by byte. Jobs follow each other until N kills
are done. Prints a table; the exit code is 1 if anything differs. Each run is a process forked from one that has
imported torch. With several engines, an engine is killed some time before each run is killed; the run must survive
that. Processes that a run leaves behind are counted. Linux only.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from mmvllm.captioning.outputs.caption_files import FILE_FORMATS
from mmvllm.cli.common import at_least_one
from mmvllm.cli.main import main as mmvllm

OPTIONS = ("--device", "cpu", "--max-tokens", "4", "--progress", "none", "--num-kvcache-blocks", "64", "--skip-warmup")
VARIES = ("time", "seconds", "duplicate_of")  # differ between two undisturbed runs, too
SIGNALS = ("kill", "kill", "term", "kill", "interrupt twice", "kill")
MAX_RUNS = 100  # of one job; more means that it makes no progress
LEFT_SECONDS = 20  # time limit for the end of processes that a run started


@dataclass(frozen=True, slots=True)
class Job:
    """One way to write captions; `folder` is the output folder of caption files."""

    format: str
    folder: str | None = None

    @property
    def name(self) -> str:
        place = f" in {self.folder}/" if self.folder else " beside images"
        return self.format + (place if self.format in FILE_FORMATS else "")

    def arguments(self, num_engines: int) -> list[str]:
        place = ["--output-dir", self.folder] if self.folder else []
        engines = ["--data-parallel-size", str(num_engines)]
        output = ["--format", self.format, "--output", f"out.{self.format}"]
        return ["caption", "images", *output, *place, *engines, *OPTIONS]

    @property
    def journal(self) -> str:
        return f"out.{self.format}" + (".journal.jsonl" if self.format in ("csv", "parquet") else "")


JOBS = [Job(name) for name in ("jsonl", "csv", "parquet")] + [
    Job(name, folder) for name in FILE_FORMATS for folder in ("texts", None)
]


@dataclass(slots=True)
class Counts:
    """Outcomes of the jobs of one format."""

    jobs: int = 0
    kills: int = 0
    resumes: int = 0
    records_lost: int = 0
    records_twice: int = 0
    records_different: int = 0
    files_missing: int = 0
    files_different: int = 0
    processes_left: int = 0

    @property
    def has_failed(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self)[3:])


def draw(folder: Path, seed: int = 0, number: int = 4) -> None:
    """Draw `number` images in each of three new folders, and add copies and damaged images."""
    numbers = np.random.default_rng(seed)
    for place in ("", "a", "a/deep"):
        (folder / place).mkdir(parents=True)
        for i in range(number):
            pixels = numbers.integers(0, 256, (56, 56, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{i}.png")
        shutil.copy(folder / place / "0.png", folder / place / "copy.png")
    (folder / "a/broken.png").write_bytes((folder / "0.png").read_bytes()[:300])
    (folder / "a/deep/empty.png").touch()
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for i in range(3):
            tar.add(folder / f"a/{i}.png", f"x/t{i}.png")


def start(job: Job, folder: Path, num_engines: int) -> int:
    """Start a run of the job in a new process, and return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.setsid()
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    code = 1
    try:
        code = mmvllm(job.arguments(num_engines))
    finally:
        os._exit(code)


def end(pid: int, seconds: float, how: str | None = None) -> int | None:
    """Return the exit code of a run, or None if it was killed after `seconds`, as `how` says."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if (status := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(status[1])
        time.sleep(0.002)
    if how is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise RuntimeError(f"a run takes longer than {seconds:.0f} s")
    _send(pid, how)
    os.waitpid(pid, 0)
    return None


def _send(pid: int, how: str) -> None:
    if how == "interrupt twice":
        os.kill(pid, signal.SIGINT)
        time.sleep(0.02)
    os.kill(pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt twice": signal.SIGINT}[how])


def kill_engine(pid: int, seconds: float) -> bool:
    """Kill an engine of a run after some seconds; return False if it has none then."""
    time.sleep(seconds)
    engines = [child for child in group(pid) if child != pid and "spawn_main" in _command(child)]
    if engines:
        with suppress(ProcessLookupError):
            os.kill(engines[0], signal.SIGKILL)
    return bool(engines)


def group(pid: int) -> list[int]:
    """Return the ids of the run's process and of the processes that it has started, except those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == pid and state != "Z":
                found.append(int(path.parent.name))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def num_left(pid: int) -> int:
    """Return the number of processes that a run has left behind."""
    limit = time.monotonic() + LEFT_SECONDS
    while (left := len(group(pid))) and time.monotonic() < limit:
        time.sleep(0.05)
    return left


def disturbed(
    job: Job, folder: Path, seconds: float, moments: random.Random, counts: Counts, most: int, num_engines: int = 1
) -> None:
    """Run the job until it has finished, and kill it at most `most` times."""
    counts.jobs += 1
    for number in range(MAX_RUNS):
        counts.resumes += number > 0
        pid = start(job, folder, num_engines)
        if counts.kills >= most:
            code = end(pid, 300)
        else:
            left = moments.uniform(0, 1.1 * seconds)
            if num_engines > 1:
                before = moments.uniform(0, left)
                counts.kills += kill_engine(pid, before)
                left -= before
            code = end(pid, left, SIGNALS[counts.kills % len(SIGNALS)])
        counts.processes_left += num_left(pid)
        if code is not None:
            if code != 3:  # some images are broken
                raise RuntimeError(f"{job.name}: exit code {code}\n{(folder / 'log').read_text()[-2000:]}")
            return
        counts.kills += 1
    raise RuntimeError(f"{job.name}: not finished after {MAX_RUNS} runs")


def records(job: Job, folder: Path) -> Iterator[tuple[str, dict]]:
    """Yield path and record of every image, as the format's reader sees them."""
    if job.format == "parquet":
        from pyarrow import parquet

        found = parquet.read_table(folder / "out.parquet").to_pylist()
    elif job.format == "csv":
        with (folder / "out.csv").open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    else:
        with (folder / job.journal).open(encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
    for record in found:
        yield record["path"], {name: value for name, value in record.items() if name not in VARIES}


def caption_files(job: Job, folder: Path) -> dict[str, bytes]:
    """Return the content of caption files by path; JSON records lack the fields that vary."""
    if job.format not in FILE_FORMATS:
        return {}
    found = {}
    for path in folder.rglob(f"*{FILE_FORMATS[job.format][0]}"):
        if path.name == job.journal:
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            content = json.dumps({k: v for k, v in json.loads(content).items() if k not in VARIES}).encode()
        found[str(path.relative_to(folder))] = content
    return found


def compare(job: Job, folder: Path, calm: Path, counts: Counts) -> None:
    """Count the differences between a job that was killed and an undisturbed one."""
    expected, found = dict(records(job, calm)), list(records(job, folder))
    numbers = Counter(path for path, _ in found)
    counts.records_lost += len(expected.keys() - numbers.keys())
    counts.records_twice += sum(numbers.values()) - len(numbers)
    counts.records_different += sum(expected.get(path) != record for path, record in found)
    wanted, files = caption_files(job, calm), caption_files(job, folder)
    counts.files_missing += len(wanted.keys() - files.keys())
    counts.files_different += sum(wanted.get(path) != content for path, content in files.items())


def run(
    num_kills: int, seed: int, folder: Path, jobs: list[Job] = JOBS, num_engines: int = 1, num_images: int = 4
) -> dict[str, Counts]:
    """Kill the jobs in turn, below `folder`, and return the counts by job."""
    draw(folder / "images", number=num_images)
    table = {job.name: Counts() for job in jobs}
    for number, job in enumerate(jobs):
        moments = random.Random(f"{seed} {job.name}")
        counts = table[job.name]
        # All jobs work in one folder, because the keys of the records depend on it.
        seconds, calm = undisturbed(job, folder), folder / f"calm-{number}"
        (folder / "job").rename(calm)
        if num_engines > 1:
            seconds = undisturbed(job, folder, num_engines)
            compare(job, folder / "job", calm, counts)
        most = num_kills // len(jobs) + (number < num_kills % len(jobs))
        while counts.kills < most:
            killed = fresh(folder)
            disturbed(job, killed, seconds, moments, counts, most, num_engines)
            compare(job, killed, calm, counts)
            if counts.has_failed:
                shutil.copytree(killed, folder / f"failed-{number}-{counts.jobs}")
        print(f"{job.name}: {seconds:.1f} s undisturbed, {counts}", file=sys.stderr, flush=True)
    return table


def undisturbed(job: Job, folder: Path, num_engines: int = 1) -> float:
    """Return the seconds of a run that is not killed."""
    before = time.monotonic()
    disturbed(job, fresh(folder), 0, random.Random(), Counts(), 0, num_engines)
    return time.monotonic() - before


def fresh(folder: Path) -> Path:
    """Create a folder with the images and nothing else."""
    shutil.rmtree(folder / "job", ignore_errors=True)
    shutil.copytree(folder / "images", folder / "job/images")
    return folder / "job"


def show(table: dict[str, Counts]) -> None:
    names = [field.name for field in fields(Counts)]
    print("| format |", " | ".join(name.replace("_", " ") for name in names), "|")
    print("|---" * (len(names) + 1) + "|")
    for label, counts in table.items():
        print(f"| {label} |", " | ".join(str(getattr(counts, name)) for name in names), "|")
    total = {name: sum(getattr(counts, name) for counts in table.values()) for name in names}
    print("| all |", " | ".join(map(str, total.values())), "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=at_least_one, nargs="?", default=21, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    parser.add_argument("--data-parallel-size", type=at_least_one, default=1, metavar="N", help="number of engines")
    parser.add_argument("--images", type=at_least_one, default=4, metavar="N", help="images in each of three folders")
    parser.add_argument("--format", choices=sorted({job.format for job in JOBS}), help="kill only jobs of this format")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this empty folder, and keep it")
    args = parser.parse_args()
    warm_up()
    jobs = [job for job in JOBS if args.format in (None, job.format)]
    options = (jobs, args.data_parallel_size, args.images)
    if args.keep is not None:
        table = run(args.kills, args.seed, args.keep, *options)
    else:
        with TemporaryDirectory() as folder:
            table = run(args.kills, args.seed, Path(folder), *options)
    show(table)
    return int(any(counts.has_failed for counts in table.values()))


def warm_up() -> None:
    """Import the modules of a run without starting threads, which a fork would lose."""
    import torch

    import mmvllm.captioning.run
    import mmvllm.models.qwen2_vl  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
