"""`trace-megatron plan`: whether a configuration fits its hardware, and how long a step would take there."""
