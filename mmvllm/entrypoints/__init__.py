"""The entry points `LLM` and `AsyncLLM`, with request preparation, admission, scoring, metrics and traces."""
