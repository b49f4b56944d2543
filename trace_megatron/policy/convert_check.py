"""Whether a conversion computes what its source does: transformers on one side, Megatron's own loading on the other."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy import parallel
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.model import build_model
from trace_megatron.policy.tree_attention import TreeSequence

TOLERANCE = 1e-4
"""Of the largest logit: two float32 programs that add in different orders."""

_TEXT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "she sell altogether in April and May? 1/3 + 0.25 = 7/12; def f(x):\n    return {'a': [x, -x]}"
)


def compare_logits(hf_folder: str | Path, megatron_folder: str | Path) -> float:
    """The largest difference of logits on a sample text, in parts of the largest logit; both models in float32.

    One model is in memory at a time. The index of ``megatron_folder`` must have been read before (``dist_index``):
    Megatron unpickles it without a list of allowed classes. Raises UserError above TOLERANCE.
    """
    tokens = _sample_tokens(Path(hf_folder))
    expected = _hf_logits(hf_folder, tokens)
    found = _megatron_logits(hf_folder, megatron_folder, tokens)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"expected logits within {TOLERANCE} between '{hf_folder}' and '{megatron_folder}', found a difference of "
            f"{difference:.2e} of the largest: do not use the converted model"
        )
    return difference


def _sample_tokens(folder: Path) -> torch.Tensor:
    from transformers import AutoTokenizer  # takes seconds, and only --verify needs it

    try:
        tokens = AutoTokenizer.from_pretrained(folder)(_TEXT).input_ids
    except (OSError, ValueError):  # a folder of weights alone
        vocab_size = read_hf_config(folder).vocab_size
        tokens = torch.randint(vocab_size, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([tokens])


@torch.no_grad()
def _hf_logits(folder: str | Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits


@torch.no_grad()
def _megatron_logits(hf_folder: str | Path, folder: str | Path, tokens: torch.Tensor) -> torch.Tensor:
    hf, policy = read_hf_config(hf_folder), PolicyConfig(dtype="float32")
    ranks = parallel.initialize(policy, seed=0)
    try:
        model = build_model(hf, policy)[0]
        wanted = {
            name: place for name, place in model.sharded_state_dict().items() if not isinstance(place, ShardedObject)
        }
        model.load_state_dict(dist_checkpointing.load(wanted, str(folder)), strict=False)
        length = tokens.shape[1]
        chain = TreeSequence(torch.full((length,), length, dtype=torch.int32), torch.arange(length))
        tokens = tokens.to(ranks.device)
        return model(tokens, None, None, packed_seq_params=chain)[..., : hf.vocab_size].cpu()
    finally:
        parallel.shutdown()
