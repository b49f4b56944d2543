"""Seconds of a step by phase, from FLOPs, bytes and stated efficiencies. A plan, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from trace_megatron.config import Config
from trace_megatron.plan.hardware import Device
from trace_megatron.plan.memory import kv_bytes_per_token, num_parameters
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.layout import active_layer_weights

TRAINING_MFU = 0.35
"""Share of the peak that training reaches on packs of some thousand tokens."""
SCORING_MFU = 0.3
DECODING_EFFICIENCY = 0.5
"""Share of memory bandwidth that decoding reaches; the rest goes to launches, sampling and the scheduler."""
SYNC_EFFICIENCY = 0.4
LONGEST_ROLLOUT = 4.0
"""Of a step, in mean responses: lengths are long-tailed."""
CONTINUED_SHARE = 0.5
"""Of a rollout, what a continuation samples anew."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of a step."""

    rollouts: int
    continuations: int
    sampled_tokens: float
    packed_tokens: float
    unpacked_tokens: float
    episode_tokens: float
    """Mean of prompt and response."""

    @property
    def packing_ratio(self) -> float:
        return self.unpacked_tokens / self.packed_tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds."""

    rollouts: float
    policy_update: float
    predictor_scoring: float
    predictor_update: float
    weight_sync: float
    runs_ahead: bool = False
    """Whether rollouts run beside training (``rollout.max_staleness``)."""

    @property
    def hidden(self) -> float:
        """Of the shorter of rollouts and training, where they overlap."""
        sampling, training = self.rollouts + self.predictor_scoring, self.policy_update + self.predictor_update
        return min(sampling, training) if self.runs_ahead else 0.0

    @property
    def total(self) -> float:
        phases = self.rollouts, self.policy_update, self.predictor_scoring, self.predictor_update, self.weight_sync
        return sum(phases) - self.hidden


def workload(config: Config) -> Workload:
    """Of the configured budget, at ``plan.prompt_tokens`` and ``plan.response_tokens`` (0: half of their limits)."""
    prompt = config.plan.prompt_tokens or config.rollout.max_prompt_tokens / 2
    response = config.plan.response_tokens or config.rollout.max_response_tokens / 2
    rollouts, continuations = config.budget.rollouts, config.budget.rollouts * config.budget.continuations
    sampled = response * (rollouts + CONTINUED_SHARE * continuations)
    trees = min(config.budget.candidates, max(rollouts // 4, 1))  # TRACE opens few prompts: about 4 rollouts each
    return Workload(
        rollouts=rollouts,
        continuations=continuations,
        sampled_tokens=sampled,
        packed_tokens=trees * prompt + sampled,
        unpacked_tokens=(rollouts + continuations) * (prompt + response),
        episode_tokens=prompt + response,
    )


def step_time(hf: HFModelConfig, predictor: HFModelConfig | None, config: Config, device: Device) -> StepTime:
    """Engines and trainers take turns on the same devices, or, with staleness, each side has its own."""
    work, num_devices = workload(config), config.policy.num_ranks
    peak = device.tflops * 1e12 * num_devices
    trained = forward_flops(hf, work.packed_tokens, work.episode_tokens) * 3
    if config.policy.recompute == "full":
        trained *= 4 / 3
    passes = 2 if config.loss.old_logprobs == "decoupled" else 1  # its old logprobs are another forward pass
    trained += (passes - 1) * forward_flops(hf, work.packed_tokens, work.episode_tokens)
    scored = updated = 0.0
    if predictor is not None:
        roots = config.budget.candidates * (config.plan.prompt_tokens or config.rollout.max_prompt_tokens / 2)
        scored = forward_flops(predictor, roots + work.packed_tokens, work.episode_tokens)
        roots_trained = roots * min(work.rollouts / 4 / config.budget.candidates, 1.0)
        updated = 3 * config.predictor.epochs * forward_flops(predictor, roots_trained * 1.2, work.episode_tokens)
    return StepTime(
        rollouts=decoding_seconds(hf, config, device, work),
        policy_update=trained / (TRAINING_MFU * peak),
        predictor_scoring=scored / (SCORING_MFU * peak),
        predictor_update=updated / (SCORING_MFU * peak),
        weight_sync=2 * num_parameters(hf) / (SYNC_EFFICIENCY * device.link_gb_s * 1e9) + 0.2,
        runs_ahead=config.rollout.max_staleness > 0,
    )


def forward_flops(hf: HFModelConfig, num_tokens: float, context: float) -> float:
    """Of a forward pass over tokens that see ``context`` / 2 others on average; experts: those that are active."""
    layer, query = active_layer_weights(hf), hf.num_heads * hf.head_dim
    head = hf.vocab_size * hf.hidden_size
    return num_tokens * (2 * (hf.num_layers * layer + head) + 4 * hf.num_layers * query * context / 2)


def decoding_seconds(hf: HFModelConfig, config: Config, device: Device, work: Workload) -> float:
    """The larger of two: all tokens at the engines' throughput, and the longest rollout's tokens one after the other.

    Every decoding step reads the weights once for its batch, and the keys and values of its sequences.
    """
    engines = len(config.engine.urls) or config.engine.num_engines
    sequences = min(config.engine.max_num_seqs, (work.rollouts + work.continuations) / engines)
    bandwidth = DECODING_EFFICIENCY * device.memory_gb_s * 1e9 * config.engine.tensor_parallel
    weights = 2 * num_parameters(hf)
    step_s = (weights + sequences * kv_bytes_per_token(hf) * work.episode_tokens / 2) / bandwidth
    flops = sequences * forward_flops(hf, 1, work.episode_tokens)
    compute_s = flops / (SCORING_MFU * device.tflops * 1e12 * config.engine.tensor_parallel)
    throughput_s = work.sampled_tokens / engines / sequences * max(step_s, compute_s)
    response = config.plan.response_tokens or config.rollout.max_response_tokens / 2
    longest = min(LONGEST_ROLLOUT * response, config.rollout.max_response_tokens)
    return max(throughput_s, longest * weights / bandwidth)
