"""The ops in torch and NumPy: what the native ones are checked against, and what runs where those are not built."""
