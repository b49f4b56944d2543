"""Live weights from the trainer to the rollout engine, over vLLM's weight-transfer API."""
