"""Model-written Python code, isolated."""
