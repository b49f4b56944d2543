"""Index a corpus of passages for the environment ``retrieval``.

    python tools/build_index.py --out FOLDER [--kind bm25] CORPUS.jsonl [MORE.jsonl.gz ...]
    python tools/build_index.py --out FOLDER --kind dense --model MODEL_FOLDER [--factory IVF4096,SQ8] CORPUS.jsonl

A line of a corpus is {"id", "title", "text"} or {"id", "contents"}; see docs/retrieval.md. FOLDER appears complete or
not at all; the same command after an interruption goes on where that is possible.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from trace_megatron.errors import UserError
from trace_megatron.log import progress, say
from trace_megatron.retrieval.index import KINDS, build_index, read_description


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--kind", choices=KINDS, default="bm25")
    parser.add_argument("--model", help="dense: a sentence-transformers model, E5 for example")
    parser.add_argument("--factory", default="Flat", help="dense: FAISS's description of the index")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="dense")
    parser.add_argument("--batch-size", type=int, default=64, help="dense: passages that the model sees at once")
    parser.add_argument("--query-prefix", help='dense: default "query: " for E5 models, else nothing')
    parser.add_argument("--passage-prefix", help='dense: default "passage: " for E5 models, else nothing')
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    try:
        with progress("passages") as report:
            build_index(arguments.corpus, arguments.out, arguments.kind, _settings(arguments), _stages(report.update))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    num_passages = read_description(arguments.out)["num_passages"]
    say(f"indexed {num_passages} passages into {arguments.out} in {time.perf_counter() - start_s:.1f} s")
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.kind != "dense":
        return {}
    if not arguments.model:
        raise UserError("expected --model for a dense index, found none")
    return {
        "model": arguments.model,
        "factory": arguments.factory,
        "dtype": arguments.dtype,
        "batch_size": arguments.batch_size,
        "query_prefix": arguments.query_prefix,
        "passage_prefix": arguments.passage_prefix,
    }


def _stages(update: Callable[[int, int], None]) -> Callable[[str, int, int], None]:
    """One line for each stage, and counts in between."""
    seen: list[str] = []

    def report(what: str, done: int, total: int) -> None:
        if what not in seen:
            seen.append(what)
            say(f"passages {what} ...")
        update(done, total)

    return report


if __name__ == "__main__":
    sys.exit(main())
