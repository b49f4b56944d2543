"""What every `vllm serve` of a run needs beside its model; no imports, as the launcher's environment has no vLLM."""

SHARED_MEMORY_BACKEND = "trace_megatron_shared_memory"
"""Name of our weight-transfer backend in vLLM's registry."""

SERVE_FLAGS = (
    "--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm --weight-transfer-config "
    f"""'{{"backend": "{SHARED_MEMORY_BACKEND}"}}'"""
)
"""Token-ids route, logprobs of the distribution sampled from, no defaults of the model's own, our weight transfer."""
