"""Prepare the paper's data sets for training and evaluation; docs/evaluation.md describes what is written.

    python tools/prepare_data.py --out data deepscaler math500 aime24      # from the Hugging Face Hub
    python tools/prepare_data.py --out data math500 --from math500.jsonl   # from a file of your own
    python tools/prepare_data.py --out data hotpotqa --split train --from hotpot_train_v1.1.json

Files are JSON Lines, JSON, Parquet or CSV, .gz of the text formats too. Each data set becomes OUT/NAME/ with
train.jsonl and validation.jsonl, or eval.jsonl, and a report of the rows that were left out. Afterwards everything to
train on below OUT is compared with everything to evaluate on: OUT/overlap.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from trace_megatron.data.files import Row, read_rows
from trace_megatron.data.hub import read_hub
from trace_megatron.data.prepare import flag_overlaps, prepare, targets
from trace_megatron.data.sources import SOURCES, Source, find_source
from trace_megatron.errors import UserError
from trace_megatron.log import progress, say


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--from", nargs="+", default=[], dest="files", metavar="FILE", help="instead of the Hub")
    parser.add_argument("--split", choices=("train", "eval"), help="one split only; all that there are without it")
    arguments = parser.parse_intermixed_args()
    try:
        _run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    sources = [find_source(name) for name in arguments.names]
    wanted = [
        (source, split) for source in sources for split in ([arguments.split] if arguments.split else source.splits)
    ]
    if arguments.files and len(wanted) > 1:
        raise UserError(
            "expected one data set and one split with --from, found "
            f"{', '.join(f'{source.name} {split}' for source, split in wanted)}: name one, and --split train or eval"
        )
    for source, split in wanted:  # before anything is downloaded
        targets(source, split, arguments.out)
    for source, split in wanted:
        with progress(f"{source.name} {split}") as report:
            result = prepare(source, split, _rows(source, split, arguments.files), arguments.out, report.update)
        for line in result.lines(f"{source.name} {split}"):
            say(line)
    pairs = flag_overlaps(arguments.out)
    exact = sum(pair.exact for pair in pairs)
    say(f"overlap of training with evaluation: {exact} pairs exactly, {len(pairs) - exact} nearly (overlap.json)")


def _rows(source: Source, split: str, files: list[str]) -> Iterable[Row]:
    if files:
        return itertools.chain.from_iterable(map(read_rows, files))
    return read_hub(source.hub, source.config, source.splits[split])


if __name__ == "__main__":
    sys.exit(main())
