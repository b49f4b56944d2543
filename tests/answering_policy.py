"""A tiny policy that keeps to the form of an answer: some answers are right, some are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.types import Task


def teach_answers(folder: Path, tasks: Sequence[Task], answers: Sequence[str]) -> None:
    """Train the model in ``folder`` a little on what it should reply; which of the answers stays open."""
    renderer = ChatRenderer.from_folder(folder)
    stop = renderer.stop_token_ids[0]
    rows, labels = [], []
    for task, answer in zip(tasks, answers, strict=True):
        prompt = renderer.prompt_ids(task.messages, task.tools)
        action = [*renderer.text_ids(answer), stop]
        rows.append([*prompt, *action])
        labels.append([-100] * len(prompt) + action)
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [stop] * (longest - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(20):
        chosen = torch.randperm(len(rows))[:8]
        loss = model(tokens[chosen], labels=targets[chosen]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.6  # the form is learnt
    model.save_pretrained(folder)
