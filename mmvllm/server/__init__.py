"""An OpenAI-compatible HTTP server over one `AsyncLLM`; needs the extra `serve`."""
