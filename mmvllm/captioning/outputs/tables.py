"""Writes the records of a journal as one table, for spreadsheets and data frames."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmvllm.captioning.json_captions import OBJECT, TEXTS, with_object_columns
from mmvllm.captioning.multi_prompt import with_caption_columns
from mmvllm.captioning.outputs.atomic_write import replacing
from mmvllm.captioning.outputs.record import COLUMNS

ROWS_PER_GROUP, CHARACTERS_PER_GROUP = 8192, 2**26


def write_csv(
    path: Path, records: Iterable[dict], of_captions: Sequence[str], of_objects: dict[str, Any], mark: bool = False
) -> None:
    """Write a UTF-8 file with a header, a row per record and lists as JSON; the file is replaced atomically.

    With `mark` it begins with a byte order mark.
    """
    with replacing(path, newline="", synced=True) as file:
        file.write("\ufeff" * mark)
        names = [*COLUMNS, *of_captions, *of_objects]
        table = csv.DictWriter(file, names, extrasaction="ignore")  # edited records have one more field
        table.writeheader()
        table.writerows(_as_row(record, dict.fromkeys(of_objects, str)) for record in records)


def write_parquet(path: Path, records: Iterable[dict], of_captions: Sequence[str], of_objects: dict[str, Any]) -> None:
    """Write typed columns in row groups; the file is replaced atomically. Needs pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet

    types = {str: pa.string(), list: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    types[TEXTS] = pa.list_(pa.string())
    kinds = COLUMNS | dict.fromkeys(of_captions, str) | of_objects
    schema = pa.schema([(_unicode(name), types[kind]) for name, kind in kinds.items()])

    with replacing(path, "wb", synced=True) as file, parquet.ParquetWriter(file, schema) as table:
        rows = (_as_unicode(_as_row(record, of_objects)) for record in records)
        for group in _groups(rows):
            table.write_table(pa.Table.from_pylist(group, schema))


TABLES = {"csv": write_csv, "parquet": write_parquet}  # by format


def _groups(rows: Iterable[dict]) -> Iterator[list[dict]]:
    """Yield groups of rows of limited size, because a caption may have millions of characters."""
    group, num_characters = [], 0
    for row in rows:
        group.append(row)
        num_characters += sum(map(_length, row.values()))
        if len(group) == ROWS_PER_GROUP or num_characters >= CHARACTERS_PER_GROUP:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


def _length(value: Any) -> int:
    """Return the number of characters in a cell; 0 unless it is a text or a list."""
    return len(value) if isinstance(value, str) else sum(map(_length, value)) if isinstance(value, list) else 0


def _as_row(record: dict, of_objects: dict[str, Any]) -> dict:
    """Return the record with the cells of all columns; lists in columns of kind `TEXTS` stay lists."""
    return with_object_columns(_as_cells(with_caption_columns(record)), of_objects)


def _as_cells(record: dict) -> dict:
    """Return the record with lists as JSON, except its object."""
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list) and name != OBJECT else value
        for name, value in record.items()
    }


def _as_unicode(record: dict) -> dict:
    """Return the record with surrogates escaped, which file names and cut captions (half of an emoji) may contain."""
    return {_unicode(name): _unicode(value) for name, value in record.items()}


def _unicode(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_unicode, value)]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
