"""The run's configuration: YAML into nested frozen dataclasses, unknown keys refused, ``section.key=value`` overrides.

Every component receives only its own section. An option that nobody would change is a constant, not an option.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trace_megatron.errors import UserError

ENV_TOKEN = "TRACE_ENV_TOKEN"
"""Environment variable with what the servers of ``env.urls`` ask for; no option, since configurations are kept."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    name: str = "run"
    """Folder below ``output_dir``."""
    output_dir: str = "runs"
    seed: int = 0
    steps: int = 100
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only the last step."""
    export_hf: bool = True
    """Write ``hf/`` at the end."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    model: str = ""
    """HF folder of the policy."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations; main weights and gradients are float32."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    """Model chunks of every pipeline stage, by the interleaved schedule where more than one."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of every chunk, in model order; empty: balanced by cost, the vocabulary head counted."""
    context_parallel: int = 1
    """Ranks that share the rows of every pack; each holds the keys and values of all rows, a layer at a time."""
    data_parallel: int = 1
    expert_parallel: int = 1
    """Ranks that share the experts of a layer: some of the tensor-, context- and data-parallel ones."""
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    offload_layers: int = 0
    """GPUs with Transformer Engine: layers whose activations wait in host memory for their backward pass."""
    offload_weights: bool = False
    """Those layers' weights too."""
    offload_modules: tuple[str, ...] = ()
    """GPUs: parts of every layer (core_attn, mlp_norm, ...; policy/offload.py) whose inputs wait there instead."""
    tokens_per_micro_batch: int = 4096
    """A pack's upper limit; longer trees are cut by leaves."""
    peak_tflops: float = 0.0
    """Dense bfloat16 peak of a rank's device, for train/flop_utilisation; 0: of known devices."""

    @property
    def num_ranks(self) -> int:
        """Trainer processes."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    clip_grad: float = 1.0
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks."""
    offload_share: float = 0.0
    """GPUs: of the optimizer's state, main weights and moments, what stays in host memory and is updated there."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    """Upper bound c of the ratio on negative advantages; 0: none."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"] = "seq-mean-token-mean"
    old_logprobs: Literal["bypass", "decoupled"] = "bypass"
    """``bypass``: the engine's; ``decoupled``: recomputed by the trainer, with truncated importance weights."""
    importance_cap: float = 2.0
    """C in min(pi_old / pi_rollout, C), decoupled only."""
    kl_coef: float = 0.0
    reference_model: str = ""
    """HF folder for the KL term; empty: the starting policy."""


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    candidates: int = 32
    """Prompts looked at per step (the pool)."""
    rollouts: int = 64
    """M: bare rollouts per step."""
    continuations: int = 0
    """N: continuations per bare rollout; each costs half a unit."""
    max_rollouts_per_prompt: int = 0
    """Cap on a prompt's bare rollouts; 0: none."""
    exact: bool = True
    """False: at most M, units of zero value are not spent."""


@dataclass(frozen=True, slots=True)
class MethodConfig:
    selector: str = "uniform"
    """A file of algorithm/selectors/: trace, uniform, random, pcl, treepo, dapo, knapsack."""
    advantage: Literal["grpo", "tree_rpo", "tree_grpo"] = "grpo"
    normalizer: Literal["std", "bernoulli", "none"] = "std"
    """Divisor of group-relative advantages: sample std, sqrt(mu (1 - mu)), or 1."""
    singleton: Literal["zero", "reward"] = "zero"
    """Tree-GRPO's term for a group of one: 0, or the authors' +R."""
    options: dict[str, Any] = field(default_factory=dict)
    """The selector's own options."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    max_turns: int = 5
    max_new_tokens: int = 1024
    """Of one turn."""
    max_response_tokens: int = 8192
    """Of all turns with their observations."""
    max_prompt_tokens: int = 2048
    """Longer prompts are dropped and counted."""
    truncated: Literal["failure", "mask", "keep"] = "failure"
    """How a rollout cut by a token limit counts: reward 0, not trained, or with the reward it had."""
    max_failed_share: float = 0.5
    """The run stops when more of a step's rollouts fail."""
    max_staleness: int = 0
    """Updates of the policy by which a trained token's weights may be older than those it trains; above 0 the next
    step's rollouts are sampled while the policy trains (docs/overlap.md)."""
    carried_share: float = 0.0
    """Of a step's units, what may be left to trees that go on growing into the next step; needs a staleness of 2."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tensor_parallel: int = 1
    max_num_seqs: int = 128
    kv_cache_gib: float = 2.0
    """CPU engines: KV cache space."""
    gpu_memory_utilization: float = 0.5
    """GPU engines: share of device memory."""
    threads: int = 0
    """CPU engines: threads per engine rank; 0: all cores."""
    max_model_len: int = 0
    """0: prompt plus response limit."""
    num_engines: int = 1
    """Started by the run on its first rank's machine; on GPUs the i-th has the i-th ``tensor_parallel`` devices."""
    urls: tuple[str, ...] = ()
    """Servers (``vllm serve``) that sample instead of engines of the run's own; see docs/engines.md."""
    colocated: bool = False
    """The engines are on the trainer's devices: they sleep while it trains, and while they sample it keeps its weights
    alone (weight_sync/colocation.py)."""
    timeout_s: float = 1800.0
    """An engine that answers no request for so long is taken for dead, and its requests move to the others."""


@dataclass(frozen=True, slots=True)
class SyncConfig:
    verify_every: int = 0
    """Compare engine and trainer logprobs every K syncs; the first is always compared."""
    verify_tolerance: float = 0.0
    """Largest allowed difference, the mean may be an eighth of it; 0: 1e-3 in float32, 1.0 in bfloat16."""
    bucket_mib: int = 512
    address: str = ""
    """This host's, where engines on other hosts fetch the weights over TCP; empty: all engines are on this machine."""


@dataclass(frozen=True, slots=True)
class EnvConfig:
    name: str = "reasoning_gym"
    """A file of envs/, or an entry point of the group trace_megatron.envs."""
    params: dict[str, Any] = field(default_factory=dict)
    max_concurrency: int = 0
    """Calls to the environment that may run at once; 0: its own limit, if it has one."""
    timeout_s: float = 120.0
    """Of one call, without the wait for its turn; a call that takes longer fails its rollout."""
    urls: tuple[str, ...] = ()
    """Servers (``trace-megatron serve-env``) that play the environment's part on other hosts; empty: this process."""


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    kind: Literal["none", "model", "constant", "oracle"] = "none"
    """``constant``: 1/2 everywhere; ``oracle``: the tree's own outcome, a control."""
    model: str = ""
    """HF folder of the backbone."""
    num_layers: int = 0
    """Use the first n layers; 0: all."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the backbone's matrix products; weights, head and scores are float32."""
    learning_rate: float = 3e-5
    epochs: int = 2
    batch_size: int = 64
    prefix_share: float = 0.06
    """Share of prefixes in a training batch."""
    target_mode: Literal["leaf_mean", "bare_mean", "path_uniform"] = "leaf_mean"
    tokens_per_forward: int = 8192
    kv_cache_gib: float = 1.0
    """Keys and values of prompts kept from the root scores to the prefix scores of a step; 0: none."""


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    every: int = 0
    """Steps between validations; 0: never."""
    prompts: int = 64
    samples: int = 1
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What ``trace-megatron eval`` measures; 0 takes the value of ``validation`` for the benchmark of that name."""

    checkpoint: str = ""
    """HF folder, run folder, or checkpoint of a run or of Megatron's; empty: ``policy.model``."""
    benchmarks: tuple[str, ...] = ("validation",)
    """``validation`` (the environment's own split), ``bfcl``, prepared data sets by name, problem files by path."""
    data: str = "data"
    """Folder of the prepared data sets."""
    samples: int = 0
    """k of avg@k; 0: the paper's."""
    prompts: int = 0
    """0: all."""
    temperature: float = 0.0
    """0: ``rollout.temperature``."""
    top_p: float = 0.0
    """0: ``rollout.top_p``."""
    scaffold: Literal["chat", "react"] = "chat"
    """``react``: plain text with examples, for base models."""
    output: str = ""
    """Folder of the records; empty: ``eval`` in the run's folder, or in ``run.output_dir``."""


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """The outcomes that ``trace-megatron simulate`` draws; see simulate/model.py."""

    base_rate: float = 0.3
    """Mean success probability of a prompt."""
    prompt_concentration: float = 1.0
    """a + b of its Beta distribution: small, prompts are solved always or never; large, all alike."""
    turn_concentration: float = 4.0
    """Of the martingale's steps: small, the first turns decide; large, the last."""
    stop_prob: float = 0.2
    """Chance that a turn before ``rollout.max_turns`` is the last."""
    turn_tokens: float = 200.0
    """Mean action tokens of a turn."""
    recorded_run: str = ""
    """A run's folder: its turn counts and tokens instead of the two above."""
    predictor_error: float = 1.0
    """Standard deviation of the predictor's error in log-odds."""
    steps: int = 20
    """Steps simulated for every figure."""


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What ``trace-megatron plan`` assumes."""

    device: str = "H100"
    """A row of plan/hardware.py; one for each trainer rank, shared with the engine."""
    prompt_tokens: float = 0.0
    """Mean of a prompt; 0: half of ``rollout.max_prompt_tokens``."""
    response_tokens: float = 0.0
    """Mean of a rollout's response; 0: half of ``rollout.max_response_tokens``."""


@dataclass(frozen=True, slots=True)
class Config:
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    budget: BudgetConfig = BudgetConfig()
    method: MethodConfig = MethodConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    env: EnvConfig = EnvConfig()
    predictor: PredictorConfig = PredictorConfig()
    validation: ValidationConfig = ValidationConfig()
    eval: EvalConfig = EvalConfig()
    simulate: SimulateConfig = SimulateConfig()
    plan: PlanConfig = PlanConfig()


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML file and apply ``section.key=value`` overrides (values are YAML).

    Raises UserError that names the unknown key and its nearest known neighbour, or the wrong type.
    """
    path = Path(path)
    if not path.exists() or path.is_dir():  # /dev/stdin is good, too
        raise UserError(
            f"expected a configuration file, found nothing at '{path}': give the path of a YAML file with -c"
        )
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"expected YAML in '{path}', found: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"expected sections in '{path}', found a {type(values).__name__}: write 'run:', 'policy:', ...")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise UserError(f"expected section.key=value, found '{override}'")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"expected a YAML value in '{override}', found: {' '.join(str(error).split())}") from error
        _set(values, key.split("."), value, override)
    return _build(Config, values, "")


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; ``load_config`` reads it back."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))  # YAML's safe dumper knows lists, but no tuples
    return yaml.safe_dump(values, sort_keys=False)


def _set(values: dict, parts: list[str], value: Any, override: str) -> None:
    for part in parts[:-1]:
        child = values.get(part)
        if child is None:
            child = values[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"expected a section at '{part}' in '{override}', found the value {child!r}")
        values = child
    values[parts[-1]] = value


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"expected options below '{where}', found {values!r}")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            nearest = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise UserError(f"unknown option '{where}{key}': did you mean '{where}{nearest[0]}'?")
    arguments = {}
    for key, value in values.items():
        hint = hints[key]
        name = f"{where}{key}"
        arguments[key] = (
            _build(hint, value or {}, f"{name}.") if dataclasses.is_dataclass(hint) else _convert(hint, value, name)
        )
    return cls(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"expected one of {', '.join(map(str, choices))} for '{name}', found {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"expected a list for '{name}', found {value!r}")
        return tuple(_convert(typing.get_args(hint)[0], entry, name) for entry in value)
    if origin in (dict, types.GenericAlias) or hint is dict:
        if not isinstance(value, dict):
            raise UserError(f"expected a mapping for '{name}', found {value!r}")
        return value
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"expected {hint.__name__} for '{name}', found {value!r}")
    return value
