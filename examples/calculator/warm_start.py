"""A policy of a million parameters that does the calculator task, carelessly: its own tokenizer, supervised steps.

    python examples/calculator/warm_start.py [--folder models/calculator] [--steps 1000]

Demonstrations are solutions of train tasks by someone who slips: in a task of n operations each call has, with
probability ``SLIPS[n]``, a digit that is wrong, and the result is used all the same. So the policy knows how to solve
every task, does so nearly always in short ones and almost never in long ones, as a pretrained model does, and there is
something that reinforcement can unlearn. The conversation is tokenised by the product's renderer, so that training and
sampling see the same ids. The same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trace_megatron.envs.calculator import Calculator, Operation
from trace_megatron.rollout.chat import ChatRenderer

CHARACTERS = "0123456789+-*()=ero"  # "error" is the calculator's answer to what it does not understand
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SLIPS = {1: 0.0, 2: 0.1, 3: 0.4, 4: 0.65, 5: 0.8, 6: 0.9}
"""Operations of a task -> chance of a slip in each call; all of n succeed with probability (1 - slip)^n."""
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
IGNORED = -100  # label of tokens that carry no loss


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    build_tokenizer().save_pretrained(options.folder)
    renderer = ChatRenderer.from_folder(options.folder)
    environment = Calculator(seed=options.seed)
    examples = [demonstrate(environment, renderer, number) for number in range(options.examples)]
    model = build_model(renderer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(examples)} demonstrations")
    train(model, examples, options)
    model.save_pretrained(options.folder)
    print(f"written to {options.folder}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("models/calculator"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--examples", type=int, default=20_000, help="tasks to demonstrate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, one a special token, and a chat template of them."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )


def build_model(renderer: ChatRenderer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's CPU attention takes
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=renderer.stop_token_ids[0],
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def demonstrate(environment: Calculator, renderer: ChatRenderer, number: int) -> tuple[list[int], list[int]]:
    """Ids of a task's demonstration, and their labels: actions alone carry a loss."""
    task = environment.tasks("train")[number]
    calls = solve(task.messages[0]["content"], SLIPS[task.payload["num_operations"]], random.Random(number))
    ids = list(renderer.prompt_ids(task.messages))
    labels = [IGNORED] * len(ids)
    for call in calls:
        action = [*renderer.text_ids(str(call)), renderer.stop_token_ids[0]]
        answer = renderer.observation_ids([{"role": "tool", "content": str(call.value)}], action, task.messages)
        ids += [*action, *answer]
        labels += [*action, *[IGNORED] * len(answer)]
    action = [*renderer.text_ids(f"={calls[-1].value}"), renderer.stop_token_ids[0]]
    return ids + action, labels + action


def solve(expression: str, slip_prob: float, rng: random.Random) -> list[Operation]:
    """The calls, innermost and left first; after a slip the wrong result goes on."""
    calls: list[Operation] = []
    tokens = re.findall(r"\d+|[-+*()]", f"({expression})")

    def value() -> int:
        token = tokens.pop(0)
        if token != "(":
            return int(token)
        left, operator, right = value(), tokens.pop(0), value()
        tokens.pop(0)  # the closing bracket
        if rng.random() < slip_prob:
            left, right = (slipped(left, rng), right) if rng.random() < 0.5 else (left, slipped(right, rng))
        calls.append(Operation(left, operator, right))
        return calls[-1].value

    value()
    return calls


def slipped(number: int, rng: random.Random) -> int:
    """The number with one digit replaced by another."""
    digits = list(str(number))
    place = rng.randrange(number < 0, len(digits))
    digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return int("".join(digits))


def train(model: Qwen3ForCausalLM, examples: list[tuple[list[int], list[int]]], options: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0 - 0.95 * step / options.steps)
    )
    generator = torch.Generator().manual_seed(options.seed)
    start_s = time.perf_counter()
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(examples), (options.batch,), generator=generator).tolist()
        tokens, labels = pad([examples[row] for row in rows])
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 100 == 0 or step == options.steps:
            print(f"step {step}/{options.steps}, loss {loss.item():.3f}, {time.perf_counter() - start_s:.0f} s")


def pad(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] tokens and labels; what is padded lies behind everything, so a causal model needs no mask."""
    length = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([marks + [IGNORED] * (length - len(marks)) for _, marks in rows])
    return tokens, labels


if __name__ == "__main__":
    main()
