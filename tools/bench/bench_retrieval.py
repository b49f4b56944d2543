"""Retrieval on real questions: what is found, how fast, and what it takes.

    python tools/bench/bench_retrieval.py --data FOLDER --index INDEX [--batch 32] [--batches 40]

FOLDER holds question files with the ids of their supporting passages (hotpotqa_distractor_200.jsonl and others); INDEX
was made by tools/build_index.py. Per question set: the share with any, and with all, of its supporting passages in the
top 10. Then milliseconds a query in batches: in this process, and by a server through the client of the environment,
whose queries come one by one from as many episodes at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from trace_megatron.retrieval.client import RetrievalClient
from trace_megatron.retrieval.index import Index
from trace_megatron.retrieval.local import LocalServer

QUESTION_FILES = {
    "HotpotQA": ("hotpotqa_distractor_200.jsonl", "supporting_ids"),
    "MuSiQue": ("musique_distractor_100.jsonl", "supporting_ids"),
    "2WikiMultiHopQA (its gold and distractors, not told apart)": ("2wikimultihopqa_ircot_20.jsonl", "context_ids"),
}
TOP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--index", required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=40)
    arguments = parser.parse_args()
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    start_s = time.perf_counter()
    index = Index(arguments.index)
    questions = {name: read_questions(Path(arguments.data) / file) for name, (file, _) in QUESTION_FILES.items()}
    texts = [question["question"] for group in questions.values() for question in group]
    index.search(texts[:1], TOP)
    print(f"{index.kind}: {len(index)} passages, {folder_mib(arguments.index):.1f} MiB, ", end="")
    print(f"opened in {time.perf_counter() - start_s:.2f} s")
    for name, (_, key) in QUESTION_FILES.items():
        shares = found_shares(index, questions[name], key)
        print(f"{name}: {len(shares)} questions, any {np.mean(shares > 0):.1%}, all {np.mean(shares == 1):.1%}")
    batches = [
        [texts[(number * arguments.batch + row) % len(texts)] for row in range(arguments.batch)]
        for number in range(arguments.batches)
    ]
    report("in process", [timed(index, batch) for batch in batches], arguments.batch)
    seconds, rss_mib = asyncio.run(timed_server(arguments.index, batches))
    report("by HTTP", seconds, arguments.batch)
    print(f"server: {rss_mib:.0f} MiB resident")


def read_questions(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def found_shares(index: Index, questions: Sequence[dict], key: str) -> np.ndarray:
    """The share of each question's passages that are in the top 10, [questions]."""
    results = index.search([question["question"] for question in questions], TOP)
    return np.array(
        [
            len({hit.passage.id for hit in hits} & set(question[key])) / len(question[key])
            for question, hits in zip(questions, results, strict=True)
        ]
    )


def timed(index: Index, queries: Sequence[str]) -> float:
    start_s = time.perf_counter()
    index.search(queries, TOP)
    return time.perf_counter() - start_s


async def timed_server(folder: str, batches: Sequence[Sequence[str]]) -> tuple[list[float], float]:
    """Seconds until all episodes of a batch have their passages, and the server's memory at the end."""
    server = LocalServer(folder)
    client = RetrievalClient(await server.start())
    try:
        await client.search(batches[0][0], TOP)
        seconds = []
        for batch in batches:
            start_s = time.perf_counter()
            await asyncio.gather(*(client.search(query, TOP) for query in batch))
            seconds.append(time.perf_counter() - start_s)
        family = [process for process in psutil.Process().children() if "server" in " ".join(process.cmdline())]
        return seconds, sum(process.memory_info().rss for process in family) / 2**20
    finally:
        await client.close()
        await server.stop()


def report(where: str, seconds: Sequence[float], batch: int) -> None:
    p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
    print(
        f"{where}, batches of {batch}: whole batch p50 {p50:.1f} ms, p95 {p95:.1f} ms; "
        f"a query p50 {p50 / batch:.2f} ms, p95 {p95 / batch:.2f} ms"
    )


def folder_mib(folder: str) -> float:
    return sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20


if __name__ == "__main__":
    main()
