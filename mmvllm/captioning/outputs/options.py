"""Options of a captioning job's output."""

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from mmvllm.captioning.outputs.caption_files import FILE_FORMATS
from mmvllm.captioning.outputs.tables import TABLES

RECORD_FORMATS = ("jsonl", *TABLES)
FORMATS = (*RECORD_FORMATS, *FILE_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What a job writes, and what it does with an existing output.

    Args:
        output: file for the records; the same command resumes it. Without it there are no records, except in formats
            with caption files, which then use captions.jsonl in output_dir or in the working directory.
        format: txt and webdataset-json write a file for each image in addition to the records; by default the suffix
            of output decides.
        output_dir: folder for caption files, with the folders of the images; by default they are beside the images.
        caption_extension: suffix of the caption files of txt, such as .caption; by default .txt.
        keep_line_breaks: write captions of several lines to txt files as they are; by default, spaces replace the line
            breaks, because training tools take each line for a caption.
        byte_order_mark: begin a csv table with a byte order mark, without which Excel garbles letters outside ASCII.
        overwrite: replace the output and existing caption files.
        append_anyway: append to an output that was written with other settings.
        skip_existing: skip images whose caption file exists.
        retry_failed: caption only images that are recorded as failed.
    """

    output: str | PathLike | None = field(default=None, metadata={"metavar": "FILE"})
    format: str | None = field(default=None, metadata={"choices": FORMATS})
    output_dir: str | PathLike | None = field(default=None, metadata={"metavar": "DIR"})
    caption_extension: str | None = field(default=None, metadata={"metavar": "SUFFIX"})
    keep_line_breaks: bool = False
    byte_order_mark: bool = False
    overwrite: bool = False
    append_anyway: bool = False
    skip_existing: bool = False
    retry_failed: bool = False

    @property
    def path(self) -> Path | None:
        """The path of `output`."""
        return None if self.output is None else Path(self.output)

    @property
    def folder(self) -> Path | None:
        """The path of `output_dir`."""
        return None if self.output_dir is None else Path(self.output_dir)
