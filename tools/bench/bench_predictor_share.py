"""What the predictor costs beside a policy update, at the paper's size ratio: measured small, predicted at full size.

    python tools/bench/bench_predictor_share.py [--shape qa] [--trees 2] [--width 512] [--dtype bfloat16] [--threads 1]
    python tools/bench/bench_predictor_share.py --predict CONFIGS [--tokenizer FOLDER]

CONFIGS is a folder with Qwen3-0.6B.json, Qwen3-8B.json and Qwen3-14B.json.

Measured: a random policy of 12 layers and a random predictor of 3 of half its width, whose layers have a sixteenth of
the policy's weights (Qwen3-0.6B beside Qwen3-8B: 15.8). A step is that of bench_packing.py's trees: twice as many
prompts as trees are scored, then the prefixes of every bare rollout; then policy and predictor are trained (2 epochs,
prefixes 6 %). Rollouts are counted as one forward pass of the policy over the packs: generating costs more. Processor
seconds.

Predicted, with p prompt tokens, s response tokens (half of the limits each), per tree of 4 bare rollouts and 8
continuations of s / 2: F(model, tokens) = tokens (2 W + 4 L q c), W weights of all L layers, q = heads x head dim and
c = (p + s) / 2 visible tokens; the policy's head costs 2 V H more for each sampled token. Then

    policy update    = 3 (F(policy, p + 8 s) + head(8 s))
    scoring          = F(predictor, 2 a p + 4 s)           every prompt once: prefixes share them
    predictor update = (3 x epochs + 1) F(predictor, b p + 6/94 (p + s / 2))    1: the scores after it

and shares of a step are these over the policy update, times the policy update's share of a step in the paper: both are
taken to run at the same share of the peak. a and b are 1, except in the setting that ``--tokenizer`` adds: BFCL's own
training prompts, whose mean length it takes for p, with the shares of their tokens that are left when prompts that open
with the same tools are packed: a among 256 candidates, b in mini-batches of 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bench_packing import NUM_BARE, NUM_CONTINUATIONS, SHAPES, VOCABULARY, build_tree

from trace_megatron.types import Prompt, RolloutTree, Task


@dataclass(frozen=True)
class Setting:
    """Tokens p of a prompt and s of a response, epochs of the predictor; what packing leaves of prompts."""

    prompt: float
    response: float
    epochs: int = 2
    scored: float = 1.0
    trained: float = 1.0


SETTINGS = {
    "multi-hop QA": Setting(2048 / 2, 6144 / 2),
    "mathematics": Setting(2048 / 2, 14336 / 2, epochs=4),
    "function calling": Setting(12800 / 2, 8192 / 2),
}
"""Half of the limits of ALGORITHMS section 4."""
CANDIDATES, MINI_BATCH = 256, 64
PAPER = {"8B": (0.665, 0.019, 0.013), "14B": (0.754, 0.014, 0.009)}
"""Shares of a step: policy update, predictor scoring, predictor update."""
PREFIX_SHARE = 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qa", choices=list(SHAPES))
    parser.add_argument("--trees", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="the policy's, a multiple of 256")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--predict", type=Path, metavar="CONFIGS")
    parser.add_argument("--tokenizer", help="a folder: predict for BFCL's own prompts too")
    arguments = parser.parse_args()
    predict(arguments.predict, arguments.tokenizer) if arguments.predict else measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    from trace_megatron.algorithm.pack import pack_trees
    from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig, PredictorConfig
    from trace_megatron.policy.worker import Policy
    from trace_megatron.predictor.model import load_value_model
    from trace_megatron.predictor.neural import NeuralPredictor

    tree = build_tree(SHAPES[arguments.shape])
    num_prompt = len(tree.prompt.token_ids)
    pool = [prompt(index, num_prompt) for index in range(2 * arguments.trees)]
    trees = [RolloutTree(chosen, tree.rollouts) for chosen in pool[: arguments.trees]]
    bare = [RolloutTree(each.prompt, each.rollouts[:NUM_BARE]) for each in trees]
    shape = len(tree.rollouts), 1 + sum(len(rollout.turns) for rollout in tree.rollouts)
    packs = [[pack_trees([each], [np.ones(shape) / arguments.trees]) for each in trees]]
    with tempfile.TemporaryDirectory() as folder:
        policy_folder, predictor_folder = Path(folder, "policy"), Path(folder, "predictor")
        write_model(policy_folder, arguments.width, layers=12)
        write_model(predictor_folder, arguments.width // 2, layers=3)
        value_model = load_value_model(str(predictor_folder), num_layers=0, dtype=arguments.dtype)
        predictor = NeuralPredictor(value_model, PredictorConfig(kind="model", dtype=arguments.dtype), seed=0)
        policy = Policy(PolicyConfig(str(policy_folder), arguments.dtype), OptimizerConfig(), LossConfig())
        torch.set_num_threads(arguments.threads)

        def scores() -> None:
            predictor.score_roots(pool)
            predictor.score_prefixes_many(bare)

        parts = {
            "scoring": scores,
            "one forward pass of the policy": lambda: policy.logprobs(packs),
            "policy update": lambda: policy.train_step(packs),
            "predictor update": lambda: predictor.update(trees, "leaf_mean"),
        }
        records = {name: [] for name in parts}
        for _ in range(arguments.steps + 1):  # the first one allocates
            for name, part in parts.items():
                start_s = time.process_time()
                part()
                records[name].append(time.process_time() - start_s)
    seconds = {name: statistics.median(values[1:]) for name, values in records.items()}
    total = sum(seconds.values())
    packed = sum(batch.num_tokens for batch in packs[0])
    print(f"{arguments.shape}, {arguments.trees} trees, {packed} packed tokens, {arguments.dtype}")
    print(f"widths {arguments.width} (policy) and {arguments.width // 2} (predictor)")
    for name, value in seconds.items():
        print(f"{name:32s} {value:7.3f} CPU s  {100 * value / total:5.1f} %")
    print(f"{'predictor':32s} {100 * (seconds['scoring'] + seconds['predictor update']) / total:23.1f} %")


def prompt(index: int, num_tokens: int) -> Prompt:
    ids = np.random.default_rng(index).integers(0, VOCABULARY, num_tokens).tolist()
    return Prompt(str(index), Task("bench", (), {}), tuple(ids))


def write_model(folder: Path, width: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def bfcl_setting(tokenizer_folder: str) -> Setting:
    """Of BFCL's training prompts as the environment and a chat template make them."""
    from transformers import AutoTokenizer

    from trace_megatron.config import EnvConfig, PredictorConfig
    from trace_megatron.envs import build_environment
    from trace_megatron.predictor.pack import history_paths, pack_paths
    from trace_megatron.rollout.chat import ChatRenderer
    from trace_megatron.rollout.prompts import PromptSource
    from trace_megatron.types import ROOT

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    source = PromptSource(build_environment(EnvConfig("bfcl")), ChatRenderer(tokenizer), "train", 0, 12800)
    prompts = source.next(2 * CANDIDATES)

    def packed_share(group: int) -> float:
        packed = 0
        for first in range(0, len(prompts), group):
            paths = history_paths([(RolloutTree(each, ()), (ROOT,)) for each in prompts[first : first + group]])
            packed += sum(batch.num_tokens for batch in pack_paths(paths, PredictorConfig().tokens_per_forward))
        return packed / num_tokens

    num_tokens = sum(len(each.token_ids) for each in prompts)
    response = SETTINGS["function calling"].response
    return Setting(
        num_tokens / len(prompts), response, scored=packed_share(CANDIDATES), trained=packed_share(MINI_BATCH)
    )


def predict(folder: Path, tokenizer_folder: str | None) -> None:
    from trace_megatron.policy.hf_config import HFModelConfig, parse_hf_config
    from trace_megatron.policy.layout import active_layer_weights

    def config(name: str) -> HFModelConfig:
        path = folder / f"{name}.json"
        return parse_hf_config(json.loads(path.read_text()), str(path))

    def forward(hf: HFModelConfig, tokens: float, visible: float) -> float:
        query = hf.num_heads * hf.head_dim
        return tokens * hf.num_layers * (2 * active_layer_weights(hf) + 4 * query * visible)

    settings = dict(SETTINGS)
    if tokenizer_folder:
        settings["BFCL's prompts"] = bfcl = bfcl_setting(tokenizer_folder)
        print(f"BFCL: {bfcl.prompt:.0f} tokens a prompt; scored {bfcl.scored:.2f}, trained {bfcl.trained:.2f} of them")
    predictor = config("Qwen3-0.6B")
    print("share of a step            scoring   update     sum  | the paper's")
    for size, (update_share, *paper) in PAPER.items():
        policy = config(f"Qwen3-{size}")
        for name, setting in settings.items():
            p, s = setting.prompt, setting.response
            visible = (p + s) / 2
            sampled = (NUM_BARE + NUM_BARE * NUM_CONTINUATIONS / 2) * s
            head = 2 * policy.vocab_size * policy.hidden_size * sampled
            policy_update = 3 * (forward(policy, p + sampled, visible) + head)
            scoring = forward(predictor, 2 * setting.scored * p + NUM_BARE * s, visible)
            prefixes = PREFIX_SHARE / (1 - PREFIX_SHARE) * (p + s / 2)
            update = (3 * setting.epochs + 1) * forward(predictor, setting.trained * p + prefixes, visible)
            shares = [100 * update_share * flops / policy_update for flops in (scoring, update)]
            print(
                f"{size:4s} {name:18s} {shares[0]:9.2f} % {shares[1]:6.2f} % {sum(shares):6.2f} %"
                f"  | {100 * paper[0]:.1f} + {100 * paper[1]:.1f} %"
            )


if __name__ == "__main__":
    main()
