"""HTTP handling of every request: API keys, size limits, strict JSON, connections, server-sent events."""
