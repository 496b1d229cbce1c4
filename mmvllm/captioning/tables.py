"""Writes the records of a journal as one table, for spreadsheets and data frames."""

import csv
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from mmvllm.captioning.record import COLUMNS
from mmvllm.captioning.replacing import replacing, sync
from mmvllm.captioning.several import with_columns

ROWS_PER_GROUP = 8192


def write_csv(path: Path, records: Iterable[dict], more: Sequence[str] = ()) -> None:
    """Write a header and a row per record, UTF-8; the file is replaced atomically. `more` are columns of captions."""
    with replacing(path) as temporary:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            table = csv.DictWriter(file, [*COLUMNS, *more], extrasaction="ignore")  # edited records have one more
            table.writeheader()
            table.writerows(map(with_columns, records))
        sync(temporary)


def write_parquet(path: Path, records: Iterable[dict], more: Sequence[str] = ()) -> None:
    """Write typed columns in row groups; the file is replaced atomically. Needs pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, types[kind]) for name, kind in (COLUMNS | dict.fromkeys(more, str)).items()])

    with replacing(path) as temporary:
        with parquet.ParquetWriter(temporary, schema) as table:
            rows = map(_as_unicode, map(with_columns, records))
            while group := list(islice(rows, ROWS_PER_GROUP)):
                table.write_table(pa.Table.from_pylist(group, schema))
        sync(temporary)


def _as_unicode(record: dict) -> dict:
    """The record with file names that are not Unicode escaped."""
    return {
        name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for name, value in record.items()
    }
