"""GET /v1/models; adapters that are loaded and unloaded."""
