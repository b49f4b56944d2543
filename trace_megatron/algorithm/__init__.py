"""TRACE without a framework: allocation, trees, advantages, packing and loss. Needs torch and NumPy only."""
