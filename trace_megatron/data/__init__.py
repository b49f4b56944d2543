"""Data sets of the paper, from the Hub or from files, as problems that the environments read (docs/evaluation.md)."""
