"""The predictor's network: a causal LM backbone and a scalar head, run over packed forests.

transformers hands every attention call to ``_attend``, which lets a token see its own path and nothing else; position
ids are depths on the path. So one forward over shared prefixes equals a forward of each history alone.

Legend: T packed tokens, Q of them computed, A anchors, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from trace_megatron.errors import UserError
from trace_megatron.ops import tree_attention
from trace_megatron.predictor.key_values import KeyValues
from trace_megatron.predictor.pack import HistoryBatch

_ATTENTION = "trace_megatron_tree"

_HEAD_SCALE = (
    0.1  # of initial logits: scores start near 1/2, yet differ, so that ties do not leave the pool's order to decide
)

_OWN_PATH_TOLERANCE = 1e-4  # relative, float32: packing moves a Llama's states by 1e-6


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    subtree_end: torch.Tensor | None = None,
    key_values: KeyValues | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, Q, D], key and value [1, G, Q, D] -> [1, Q, H, D], no weights."""
    if subtree_end is None:
        raise ValueError(f"{type(module).__name__} did not pass subtree_end on to its attention")
    if any(option is not None for option in (sliding_window, softcap, s_aux, position_bias)):
        raise UserError("windows, soft caps, sinks and position biases are not supported")
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = q.size(-1) ** -0.5 if scaling is None else scaling
    with torch.autocast(q.device.type, enabled=False):  # the op chooses its own accumulation type
        if key_values is not None:
            return key_values.attend(module.layer_idx, q, k, v, scale)[None], None
        return tree_attention(q, k, v, subtree_end, scale)[None], None


AttentionInterface.register(_ATTENTION, _attend)


class ValueModel(nn.Module):
    """Scores of histories: sigmoid(head(last hidden state of the history)), head and sigmoid in float32.

    Parameters are float32, main weights of the optimizer; ``dtype`` bfloat16 runs the backbone's matrix products in it.
    """

    def __init__(self, backbone: PreTrainedModel, dtype: Literal["float32", "bfloat16"], seed: int):
        super().__init__()
        hidden = backbone.config.hidden_size
        self.backbone = backbone
        self.head = nn.Linear(hidden, 1, bias=False, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # the final norm leaves entries of order 1
            self.head.weight.copy_(torch.randn(1, hidden, generator=generator) * (_HEAD_SCALE / math.sqrt(hidden)))
        self._half = dtype == "bfloat16"
        self.eval()  # for good: dropout would make packed and separate scores differ

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the backbone's keys and values."""
        return torch.bfloat16 if self._half else torch.float32

    def forward(self, histories: HistoryBatch, key_values: KeyValues | None = None) -> torch.Tensor:
        """[A] float32 in [0, 1], differentiable without ``key_values``, which stand for tokens computed before.

        Raises UserError on token ids outside the backbone's vocabulary.
        """
        size = self.backbone.get_input_embeddings().num_embeddings
        if int(histories.tokens.max()) >= size:
            raise UserError(
                f"expected token ids below the predictor's vocabulary of {size}, found {int(histories.tokens.max())}: "
                "choose a predictor.model that shares the policy's tokenizer"
            )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            hidden = last_hidden(self.backbone, histories, key_values)
        # row by row: a product of all rows may round a row by its place, and equal histories must score exactly alike
        logits = (hidden.to(self.head.weight.dtype) * self.head.weight).sum(-1)
        return torch.sigmoid(logits)


def last_hidden(
    backbone: PreTrainedModel, histories: HistoryBatch, key_values: KeyValues | None = None
) -> torch.Tensor:
    """[A, hidden] state, after the final norm, of the last token of each history."""
    device = backbone.device
    tokens, position_ids, rows = histories.tokens, histories.position_ids, histories.last_positions
    if key_values is not None:
        tokens, position_ids = tokens[key_values.positions], position_ids[key_values.positions]
        rows = key_values.rows
    hidden = backbone(
        input_ids=tokens[None].to(device),
        position_ids=position_ids[None].to(device),
        subtree_end=histories.subtree_end.to(device),
        key_values=key_values,
        use_cache=False,
    ).last_hidden_state[0]
    return hidden[rows.to(device)]


def load_value_model(
    folder: str | Path, *, num_layers: int = 0, dtype: Literal["float32", "bfloat16"] = "float32", seed: int = 0
) -> ValueModel:
    """Read the first ``num_layers`` layers (0: all) of an HF folder; the LM head is left out, the final norm kept.

    Raises UserError on a missing folder, missing weights, too many layers, and on architectures whose tokens see more,
    or less, than their own path.
    """
    config = _read_config(Path(folder))
    if not 0 <= num_layers <= config.num_hidden_layers:
        raise UserError(
            f"expected predictor.num_layers from 0 to {config.num_hidden_layers}, the layers of '{folder}', "
            f"found {num_layers}"
        )
    if num_layers:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    backbone = _read_backbone(folder, config).eval()
    _check_sees_own_path(backbone, folder)
    return ValueModel(backbone, dtype, seed)


def _read_config(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"expected an HF model folder with a config.json at '{folder}', found none: set predictor.model"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"expected a readable HF config in '{folder}', found: {_one_line(error)}") from error
    if not hasattr(config, "num_hidden_layers") or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"expected a decoder-only language model in '{folder}', found {config.model_type}")
    return config


def _read_backbone(folder: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with _quiet():
            backbone, report = AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=_ATTENTION,
                output_loading_info=True,
                local_files_only=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"expected the weights of a language model in '{folder}', found: {_one_line(error)}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(f"expected all weights of {config.model_type} in '{folder}', missing: {missing}")
    return backbone


def _check_sees_own_path(backbone: PreTrainedModel, folder: str | Path) -> None:
    """Compare a fork packed once with its two histories alone: recurrences and foreign attention would differ."""
    packed = _history([0, 1, 2, 1, 2], [0, 1, 2, 1, 2], [5, 3, 3, 5, 5], [2, 4])
    alone = _history([0, 1, 2], [0, 1, 2], [3, 3, 3], [2])
    found = f"expected a predictor.model with plain causal attention, found {backbone.config.model_type} in '{folder}'"
    try:
        with torch.no_grad():
            expected = last_hidden(backbone, alone)
            difference = ((last_hidden(backbone, packed) - expected).abs().max() / expected.abs().max()).item()
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{found}: {_one_line(error)}") from error
    if not difference < _OWN_PATH_TOLERANCE:
        raise UserError(f"{found}: packing two histories changes their hidden states by {difference:.1e}")


def _history(tokens: list[int], positions: list[int], ends: list[int], last: list[int]) -> HistoryBatch:
    tensors = (torch.tensor(values) for values in (tokens, positions, last, range(len(last))))
    tokens_T, position_ids_T, last_positions_A, rows_A = tensors
    return HistoryBatch(tokens_T, position_ids_T, torch.tensor(ends, dtype=torch.int32), last_positions_A, rows_A)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the load report: layers beyond ``num_layers`` and the LM head are unexpected on purpose."""
    logging = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
