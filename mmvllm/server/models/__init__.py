"""GET /v1/models, and the routes that load and unload adapters."""
