"""The results of a run so far: results.json with everything, a file for each stage, and table.md."""

import json
import os
from pathlib import Path

from gpu_run.stages import Stage
from gpu_run.summary import table

UNFINISHED = "out of time"  # the status of a step without a result, because the whole run ended


class RunRecord:
    """The results of a run, written after every step; a kill leaves the last complete version."""

    def __init__(self, output: Path):
        self.output, self._path = output, output / "results.json"
        self.results: dict = {"environment": {}, "stages": {}}
        if self._path.is_file():
            self.results = json.loads(self._path.read_text())

    def steps(self, stage: Stage) -> dict[str, dict]:
        """Return the results of a stage's steps by name."""
        entry = self.results["stages"].setdefault(stage.name, {"title": stage.title, "steps": {}})
        return entry["steps"]

    def has(self, stage: Stage, step: str) -> bool:
        return self.steps(stage).get(step, {}).get("status", UNFINISHED) != UNFINISHED

    def forget(self, stage: Stage, only_failed: bool) -> None:
        """Drop the results of a stage, or of its steps that did not succeed."""
        steps = self.steps(stage)
        for name in [*steps]:
            if not only_failed or steps[name]["status"] not in ("ok", "not available"):
                del steps[name]

    def add(self, stage: Stage, step: str, result: dict) -> None:
        self.steps(stage)[step] = result
        self.write()
        _write(self.output / f"{stage.name}.json", json.dumps(self.results["stages"][stage.name], indent=1))

    def write(self) -> None:
        _write(self._path, json.dumps(self.results, indent=1))
        _write(self.output / "table.md", table(self.results))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
