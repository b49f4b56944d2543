"""Rollout trees without a policy: outcomes drawn from a stated model, spent by the real selectors."""
