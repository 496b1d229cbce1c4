"""POST /rerank and /score."""
