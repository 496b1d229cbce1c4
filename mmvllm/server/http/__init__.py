"""What concerns every request: keys, sizes, strict JSON, connections, streams of events."""
