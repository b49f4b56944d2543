"""Passage retrieval: indexes over a corpus, an HTTP server over an index, and a client that batches.

Nothing here needs torch except the dense index, so a BM25 server starts in a second.
"""
