"""Predictor speed: every prefix of a step's trees from packed forests, beside transformers on padded batches.

    python tools/bench/bench_predictor.py [--model FOLDER --layers 4] [--dtype bfloat16] [--threads 2]

Without --model: a random Llama, 256 wide, 4 layers. Trees are synthetic: --prompts x --rollouts x --turns, prompts with
a common opening as a chat template writes it. Every time is the median of --repeats; memory is what a call needed at
its peak beyond what the process held before it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peak_memory import peak_kib, reset_peak
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from trace_megatron.algorithm.tree import history_ids, prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.predictor.model import ValueModel, load_value_model
from trace_megatron.predictor.neural import NeuralPredictor
from trace_megatron.predictor.pack import pack_histories
from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

VOCABULARY = 1000
OPENING, QUESTION, ACTION, OBSERVATION = 40, 60, 40, 24  # tokens


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    trees = [build_tree(index, options) for index in range(options.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_random_llama(Path(scratch))
        model = load_value_model(folder, num_layers=options.layers, dtype=options.dtype)
        padded = load_plain(folder, model)
    config = PredictorConfig(kind="model", dtype=options.dtype, tokens_per_forward=options.tokens_per_forward)
    predictor = NeuralPredictor(model, config, seed=0)

    requests = [(tree, prefix_anchors(tree)) for tree in trees]
    histories = [history_ids(tree, anchor) for tree, anchors in requests for anchor in anchors]
    batches = padded_batches(histories, options.tokens_per_forward)
    num_alone = sum(map(len, histories))
    num_packed = sum(pack.num_tokens for pack in pack_histories(requests, options.tokens_per_forward))
    num_padded = sum(len(rows) * max(len(histories[row]) for row in rows) for rows in batches)

    packed_run, padded_run = take_turns(
        [
            lambda: np.concatenate(predictor.score_prefixes_many(trees)),
            lambda: score_padded(padded, model, histories, batches, options.dtype),
        ],
        options.repeats,
    )
    packed_mib = peak_mib(lambda: predictor.score_prefixes_many(trees))
    padded_mib = peak_mib(lambda: score_padded(padded, model, histories, batches, options.dtype))
    prompts = [tree.prompt for tree in trees]
    (roots_run,) = take_turns([lambda: predictor.score_roots(prompts)], 1)  # prompts are known afterwards
    (kept_run,) = take_turns([lambda: np.concatenate(predictor.score_prefixes_many(trees))], options.repeats)
    packs = pack_histories(requests, options.tokens_per_forward)
    num_known = sum(len({position for page in pack.pages for position in page.positions}) for pack in packs)
    num_root_tokens = sum(pack.num_tokens for pack in pack_histories([(t, (ROOT,)) for t in trees], 1 << 30))
    (update_run,) = take_turns([lambda: predictor.update(trees, "leaf_mean")], options.repeats)
    num_update_tokens = update_run[2].num_tokens * config.epochs

    kind = model.backbone.config
    print(
        f"{options.prompts} prompts x {options.rollouts} rollouts x {options.turns} turns: {len(histories)} prefixes;"
    )
    print(f"{kind.model_type}, {kind.num_hidden_layers} layers, {kind.hidden_size} wide, {options.dtype};")
    print(f"{options.threads} threads, packs of {options.tokens_per_forward} tokens\n")
    print(f"{'':34}{'tokens':>10}{'seconds':>10}{'tokens/s':>10}{'CPU s':>10}")
    print_row("prefix scores, packed", num_packed, packed_run)
    print_row("prefix scores, prompts kept", num_packed - num_known, kept_run)
    print_row("prefix scores, one by one, padded", num_padded, padded_run)
    print_row("root scores, packed", num_root_tokens, roots_run)
    print_row(f"update ({config.epochs} epochs + check)", num_update_tokens, update_run)
    print(f"\npeak memory MiB           {packed_mib:.0f} packed, {padded_mib:.0f} padded")
    print(f"unshared / shared tokens  {num_alone / num_packed:.2f}  (padded / shared {num_padded / num_packed:.2f})")
    ratios = [slow / fast for slow, fast in zip(padded_run[:2], packed_run[:2], strict=True)]
    print(f"padded / packed seconds   {ratios[0]:.2f}  (CPU seconds {ratios[1]:.2f})")
    plain = padded_run[2]
    print(f"largest score difference  {max(np.abs(run[2] - plain).max() for run in (packed_run, kept_run)):.1e}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="HF folder of the backbone")
    parser.add_argument("--layers", type=int, default=0, help="use the first n layers; 0: all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--question", type=int, default=QUESTION, help="tokens of a prompt after the common opening")
    parser.add_argument("--tokens-per-forward", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def build_tree(index: int, options: argparse.Namespace) -> RolloutTree:
    rng = np.random.default_rng(index)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCABULARY, size).tolist())

    def turn(last: bool) -> Turn:
        return Turn(ids(ACTION), (-1.0,) * ACTION, () if last else ids(OBSERVATION), 0)

    def rollout() -> Rollout:
        turns = tuple(turn(number == options.turns - 1) for number in range(options.turns))
        return Rollout(ROOT, turns, float(rng.integers(0, 2)), RolloutStatus.FINISHED)

    prompt = Prompt(str(index), Task(str(index), (), {}), (*range(OPENING), *ids(options.question)))
    return RolloutTree(prompt, tuple(rollout() for _ in range(options.rollouts)))


def write_random_llama(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_plain(folder: Path, model: ValueModel) -> torch.nn.Module:
    """The same backbone under transformers' own attention."""
    return AutoModel.from_pretrained(
        folder, config=model.backbone.config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def padded_batches(histories: list[tuple[int, ...]], tokens_per_forward: int) -> list[list[int]]:
    """Rows of like length together, so that padding is small."""
    batches: list[list[int]] = [[]]
    for row in sorted(range(len(histories)), key=lambda row: len(histories[row])):
        if batches[-1] and (len(batches[-1]) + 1) * len(histories[row]) > tokens_per_forward:
            batches.append([])
        batches[-1].append(row)
    return batches


def score_padded(
    backbone: torch.nn.Module,
    model: ValueModel,
    histories: list[tuple[int, ...]],
    batches: list[list[int]],
    dtype: str,
) -> np.ndarray:
    scores = np.zeros(len(histories))
    for rows in batches:
        lengths = torch.tensor([len(histories[row]) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, : lengths[place]] = torch.tensor(histories[row])
        mask = torch.arange(tokens.size(1)) < lengths[:, None]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            hidden = backbone(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows)), lengths - 1].float()
        scores[rows] = torch.sigmoid(last @ model.head.weight[0]).detach().numpy()
    return scores


def take_turns(calls: list[Callable], repeats: int) -> list[tuple[float, float, object]]:
    """(seconds, CPU seconds, result) of each call, medians; the calls take turns, so that they share disturbances."""
    measured = [[] for _ in calls]
    for _ in range(repeats):
        for call, records in zip(calls, measured, strict=True):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            result = call()
            records.append((time.perf_counter() - start_s, time.process_time() - start_cpu_s, result))
    return [
        (statistics.median(record[0] for record in records), statistics.median(r[1] for r in records), records[0][2])
        for records in measured
    ]


def peak_mib(call: Callable) -> float:
    """MiB that a call needs at its peak beyond what is resident before it."""
    before = reset_peak()
    call()
    return (peak_kib() - before) / 1024


def print_row(name: str, num_tokens: int, run: tuple[float, float, object]) -> None:
    seconds, cpu_seconds, _ = run
    print(f"{name:34}{num_tokens:>10,}{seconds:>10.2f}{num_tokens / seconds:>10,.0f}{cpu_seconds:>10.2f}")


if __name__ == "__main__":
    main()
