"""Rows of a data file: JSON Lines, JSON, Parquet or CSV, by the name's ending; ``.gz`` of the text formats too."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trace_megatron.errors import UserError

Row = Mapping[str, Any]
FORMATS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")


def read_rows(path: str | Path) -> Iterator[Row]:
    """The file's rows. Raises UserError, with the line where there is one, for a file that cannot be read."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"expected a data file, found none at '{path}'")
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    match suffix.lower():
        case ".jsonl" | ".ndjson":
            yield from _json_lines(path)
        case ".json":
            yield from _json(path)
        case ".parquet" if path.suffix != ".gz":
            yield from _parquet(path)
        case ".csv" | ".tsv":
            yield from _csv(path, "\t" if suffix.lower() == ".tsv" else ",")
        case _:
            raise UserError(f"expected a file that ends in {', '.join(FORMATS)}, found '{path.name}'")


def _text(path: Path) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"expected UTF-8 text in '{path}', found: {error}") from error


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield _object(_parsed(line, f"line {number} of '{path}'"), f"line {number} of '{path}'")


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, one below the key ``data``, or (as some call it) JSON Lines."""
    text = _text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        if not str(error).startswith("Extra data"):
            raise UserError(f"expected JSON in '{path}', found: {error}") from error
        yield from _json_lines(path)
        return
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise UserError(f"expected a list of objects in '{path}', found {str(value)[:80]}")
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"object {number} of '{path}'")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(
            "expected the package pyarrow to read Parquet, found none: pip install 'trace-megatron[data]'"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"expected a Parquet file at '{path}', found: {' '.join(str(error).split())}") from error


def _csv(path: Path, delimiter: str) -> Iterator[Row]:
    """A header and rows; a cell that holds a JSON list or object is read as one, an empty cell as nothing."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"expected {len(reader.fieldnames)} cells up to line {reader.line_num} of '{path}', found another "
                    "number: quote the cells that hold a separator"
                )
            yield {name: _cell(cell) for name, cell in row.items()}
    except csv.Error as error:
        raise UserError(f"expected CSV in '{path}', found: {error} (line {reader.line_num})") from error


def _cell(cell: str) -> Any:
    if not cell:
        return None
    if cell[0] in "[{":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"expected JSON in {where}, found: {error}") from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"expected an object in {where}, found {str(value)[:80]}")
    return value
