"""One of the ranks of test_replicas.py: python replica_ranks.py FOLDER. Rank 0 drives, and leaves its results there."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from example_trees import random_trees

from trace_megatron.config import PredictorConfig
from trace_megatron.policy.broadcast import receive_command
from trace_megatron.policy.worker import SharedRanks
from trace_megatron.predictor import build_predictor

OPTIONS = {"kind": "model", "dtype": "float32", "learning_rate": 1e-3, "batch_size": 4, "tokens_per_forward": 60}


def scenario(predictor, folder: Path) -> dict[str, np.ndarray]:
    """Two steps of scores and updates, and a step back to a checkpoint."""
    results = {}
    for step in (0, 1):
        trees = random_trees(step, 7)
        results[f"roots{step}"] = predictor.score_roots([tree.prompt for tree in trees])
        results[f"prefixes{step}"] = np.concatenate(predictor.score_prefixes_many(trees))
        results[f"one{step}"] = predictor.score_prefixes(trees[0])
        stats = predictor.update(trees, "leaf_mean")
        results[f"losses{step}"] = np.array([stats.loss_before, stats.loss_after])
        if step == 0:
            predictor.snapshot()(folder / "checkpoint")
    predictor.load(folder / "checkpoint")
    results["restored"] = predictor.score_roots([tree.prompt for tree in random_trees(5, 7)])
    predictor.update(random_trees(1, 1), "leaf_mean")  # a mini-batch with less to share than there are ranks
    results["nothing"] = predictor.score_roots([])
    return results


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["TRACE_RENDEZVOUS_FILE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = SharedRanks(rank, size, dist.group.WORLD)
    predictor = build_predictor(PredictorConfig(model=str(folder / "model"), **OPTIONS), seed=2, replicas=ranks)
    if rank == 0:
        np.savez(folder / "results.npz", **scenario(predictor, folder))
        ranks.send({"call": "stop"}, [])
    else:
        while (command := receive_command(dist.group.WORLD)).arguments["call"] != "stop":
            predictor.repeat(command.arguments, command.tensors)
    weights = torch.cat([parameter.detach().flatten() for parameter in predictor._model.parameters()])
    np.save(folder / f"weights{rank}.npy", weights.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
