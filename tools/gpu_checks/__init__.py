"""The checks of tools/gpu_check.py."""
