"""`LLM` and `AsyncLLM`: requests prepared in workers, admitted, scored; metrics and traces of requests."""
