"""The tasks that a captioning run would take, without an engine."""

from collections.abc import Iterable
from contextlib import closing, contextmanager
from pathlib import Path

from mmvllm.captioning.jobs.pending_tasks import PendingTasks, Selection
from mmvllm.captioning.jobs.progress import Progress
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.loading import ItemLoader


@contextmanager
def opened(settings: CaptionSettings, *paths, output: Path | None, retry_failed: bool = False, **options):
    """The output and the tasks of a run; they are not recorded."""
    out = Output(settings, OutputOptions(output=output, retry_failed=retry_failed, **options))
    try:
        out.begin()
        with closing(ItemLoader()) as loader:
            yield out, list(PendingTasks(settings, Selection(list(paths), retry_failed), out, Progress(), loader))
        out.finish()
    finally:
        out.close()


def left(settings: CaptionSettings, *paths, output: Path, **options) -> list[str]:
    """The paths of the images that a run would take."""
    with opened(settings, *paths, output=output, **options) as (_, tasks):
        return [task.item.path for task in tasks]


def record_all(settings: CaptionSettings, *paths, output: Path | None, failing: Iterable[str] = (), **options) -> None:
    """Record a caption, or an error for the names in `failing`, for every image that a run would take."""
    with opened(settings, *paths, output=output, **options) as (out, tasks):
        for task in tasks:
            name = Path(task.item.path).name
            error = task.item.error or ("is damaged" if name in failing else None)
            known = {"path": task.item.path, "id": task.item.id, "key": task.key, "settings": settings.fingerprint}
            made = {
                "caption": None if error else f"a {name}",
                "error": error,
                "finish_reason": "error" if error else "eos",
            }
            file = None if error else task.file
            prompt = settings.prompt_for(task.item)
            out.write(dict.fromkeys(COLUMNS) | known | made | {"digest": name, "file": file, "prompt": prompt})
