"""The outputs of a job: the journal, the tables and caption files that are derived from it, and their folder."""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

from mmvllm.captioning.errors import JobError, explained
from mmvllm.captioning.json_captions import object_columns
from mmvllm.captioning.outputs.atomic_write import check_regular
from mmvllm.captioning.outputs.caption_files import FILE_FORMATS, CaptionFiles
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.outputs.options import FORMATS, RECORD_FORMATS, OutputOptions
from mmvllm.captioning.outputs.restorer import Restorer
from mmvllm.captioning.outputs.tables import TABLES, write_csv
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.context import check_suffix
from mmvllm.captioning.sources.items import Item
from mmvllm.errors import ArgumentError

DEFAULT_JOURNAL = "captions.jsonl"


class OutputFolder:
    """The folder of caption files, which is checked while a job runs; without a `path`, all methods do nothing."""

    def __init__(self, path: Path | None):
        self.path = path
        self._is_new = False
        self._identity: os.stat_result | None = None

    def make(self) -> None:
        """Make the folder if it is missing; raises ArgumentError if that fails."""
        if self.path is None:
            return
        try:
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._identity = self.path.stat()
        except OSError as error:
            raise ArgumentError(
                "{output_dir} {path} cannot be made: {reason}", path=self.path, reason=explained(error)
            ) from error

    def check(self) -> None:
        """Raise JobError if the folder was removed or replaced since it was made."""
        if self._identity is None:
            return
        try:
            is_same = os.path.samestat(self._identity, self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise JobError(
                f"{self.path} was removed or replaced by another program while this run was writing caption files to "
                "it; put it back, or run the same job again, which writes the files of all recorded images",
                path=self.path,
            )

    def remove_if_new(self) -> None:
        """Remove the folder if this job made it and it is empty."""
        if self._is_new:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()


class Output:
    """Everything that a job writes.

    No existing file is changed before `begin`.
    """

    def __init__(self, settings: CaptionSettings, options: OutputOptions):
        self._settings = settings
        self.path, self.format = options.path, check_output(settings, options)
        self.files, self._is_marked = None, options.byte_order_mark
        self._unwritten: list[dict] = []  # records whose caption files are not written yet
        if self.format in FILE_FORMATS:
            self.files = CaptionFiles(
                self.format,
                options.folder,
                options.overwrite,
                options.skip_existing,
                options.caption_extension,
                options.keep_line_breaks,
            )
            self.path = self.path or (options.folder or Path()) / DEFAULT_JOURNAL
        self._folder = OutputFolder(options.folder)
        self.journal = self._restorer = None
        if self.path is None:
            return
        self._folder.make()
        try:
            self.journal = Journal(self._journal_path(), settings, options.overwrite, options.append_anyway)
        except BaseException:
            self._folder.remove_if_new()
            raise
        self.reserve(self.journal.paths)
        if self.files is not None:
            self._restorer = Restorer(self.files, self.journal)

    def reserve(self, paths: Iterable[str | PathLike]) -> None:
        """Keep caption files from replacing these files, which the job reads or writes."""
        if self.files is not None:
            self.files.reserved |= {os.path.realpath(path) for path in paths}

    @property
    def index(self) -> Index:
        """The index of the recorded tasks; valid after `begin`."""
        return self.journal.index if self.journal else self._index

    def begin(self) -> None:
        """Read the existing records."""
        if self.journal is None:
            self._index = Index()
        else:
            self.journal.begin()

    def found(self, item: Item, key: str) -> None:
        """Restore the caption file of a recorded image that this run has found, if the file is missing."""
        if self._restorer is not None:
            self._restorer.found(item, key)

    def skips(self, item: Item) -> bool:
        """Return whether an image is skipped because its caption file exists."""
        return self.files is not None and self.files.skips(item)

    def claim_file(self, item: Item, key: str) -> str | None:
        """Reserve the path of an item's caption file, if the format has one; raises ValueError if it is unusable."""
        return None if self.files is None or item.error else str(self.files.claim(item, key, self.index))

    def write(self, record: dict) -> None:
        """Write a record to the journal, and its caption file later; raises JobError if that fails."""
        if self.journal is None:
            return
        self.journal.append(record)
        if record["file"] is not None:
            self._unwritten.append(record)
        if self.journal.is_synced:
            self._write_files(self._take_unwritten())

    def _take_unwritten(self) -> list[dict]:
        records = list(self._unwritten)
        self._unwritten.clear()  # if one cannot be written, the next run restores all
        return records

    def _write_files(self, records: list[dict]) -> None:
        """Write caption files of synced records: a file without a record would count as not made by this job."""
        self._folder.check()
        for record in records:
            self.files.write(record, Path(record["file"]))

    def finish(self) -> None:
        """Check that all outputs still exist, and write the table of all records if the format is a table."""
        self._flush()
        if self.journal is not None:
            self.journal.check()
        self._folder.check()
        if self._restorer is not None:
            self._restorer.finish()
        if self.format in TABLES and self.journal.has_records:  # otherwise the journal is deleted
            try:
                columns = self.journal.caption_columns(), object_columns(self._settings.schema)
                write = partial(write_csv, mark=True) if self._is_marked else TABLES[self.format]
                write(self.path, self.journal.records(), *columns)
            except OSError as error:
                hint = f"; all records are in {self.journal.path}"
                raise JobError.cannot_write(self.path, error, hint) from error

    def close(self) -> None:
        """Write the remaining caption files, and close the journal."""
        try:
            self._flush()
        finally:
            if self.journal is not None:
                self.journal.close()
            self._folder.remove_if_new()

    def _flush(self) -> None:
        if records := self._take_unwritten():
            self.journal.sync()  # raises JobError if the records are lost; their files are not written then
            self._write_files(records)

    def _journal_path(self) -> Path:
        return _journal_of(self.path) if self.format in TABLES else self.path


def check_output(settings: CaptionSettings, options: OutputOptions) -> str:
    """Return the format of an output with these options; raises ArgumentError for incompatible ones."""
    format = options.format or _format_of(options.path)
    _check(options, format)
    if options.caption_extension is not None:
        _check_extension(options.caption_extension, format)
    if options.overwrite and (options.skip_existing or options.retry_failed):
        raise ArgumentError(
            "{overwrite} starts over, with nothing to skip or to try again; do not combine it with {skip_existing} "
            "or {retry_failed}"
        )
    if format in FILE_FORMATS:
        _check_context(options.caption_extension or FILE_FORMATS[format][0], options.folder, settings.context_from)
    elif options.output is None:
        _check_unrecorded(options)
    return format


def _format_of(path: Path | None) -> str:
    """Return the format of the suffix, or JSON lines without a suffix; raises ArgumentError for an unknown suffix."""
    suffix = path.suffix.removeprefix(".").lower() if path else ""
    if suffix in ("", *RECORD_FORMATS):
        return suffix or "jsonl"
    *most, last = (f".{name}" for name in RECORD_FORMATS)
    raise ArgumentError(
        "{output} {path}: the suffix is not {suffixes}; name it {jsonl}, or choose a {format}",
        path=path,
        suffixes=f"{', '.join(most)} or {last}",
        jsonl=path.with_suffix(".jsonl").name,
    )


def _check(options: OutputOptions, format: str) -> None:
    path, output_dir = options.path, options.folder
    if path == Path("-"):
        raise ArgumentError(
            "{output} must be a file, from which a run can be resumed, got -; without {output}, captions are printed, "
            "and records with the {format} jsonl"
        )
    if options.byte_order_mark and format != "csv":
        raise ArgumentError("{byte_order_mark} needs the format csv, got {value}", value=format)
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if path is not None and not (os.path.isdir(path.parent) or path.parent == output_dir):
        raise ArgumentError(
            "{output} {path}: there is no folder {folder}; make it first", path=path, folder=path.parent
        )
    if path is not None and os.path.isdir(path):
        raise ArgumentError("{output} {path} is a folder; name a file", path=path)
    if output_dir is not None and os.path.lexists(output_dir) and not os.path.isdir(output_dir):
        raise ArgumentError("{output_dir} {path} is not a folder; choose another", path=output_dir)
    if output_dir is not None and os.path.isdir(output_dir) and not os.access(output_dir, os.W_OK | os.X_OK):
        raise ArgumentError("{output_dir} {path} is not writable", path=output_dir)
    if format not in FILE_FORMATS:
        for name in ("output_dir", "skip_existing"):
            if getattr(options, name):
                names = ", ".join(FILE_FORMATS)
                raise ArgumentError(f"{{{name}}} needs a format with caption files ({names}), got {format}")
    if format in TABLES:
        _check_table(path, format, options.overwrite)


def _check_extension(extension: str, format: str) -> None:
    check_suffix("caption_extension", extension)
    if format != "txt":
        raise ArgumentError("{caption_extension} needs the format txt, got {value}", value=format)


def _check_context(suffix: str, output_dir: Path | None, context_from: str | None) -> None:
    if output_dir is None and suffix == context_from:
        raise ArgumentError(
            "{context_from} is {suffix!r}, the suffix of the caption files: captions would replace the context that "
            "they are generated from; choose another {caption_extension}, or an {output_dir}",
            suffix=context_from,
        )


def _check_unrecorded(options: OutputOptions) -> None:
    for name in ("overwrite", "append_anyway", "retry_failed"):
        if getattr(options, name):
            raise ArgumentError(f"{{{name}}} concerns existing records; give {{output}} too")


def _check_table(path: Path | None, format: str, overwrite: bool) -> None:
    if path is None:
        raise ArgumentError(f"{format} needs {{output}} FILE.{format}")
    if format == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow: pip install 'mmvllm[parquet]'")
    check_regular(path)
    if os.path.lexists(path) and not os.path.lexists(_journal_of(path)) and not overwrite:
        raise ArgumentError(
            "{path} exists and was not made by mmvllm; choose another {output}, or replace the file with {overwrite}",
            path=path,
        )


def _journal_of(table: Path) -> Path:
    return table.with_name(f"{table.name}.journal.jsonl")
