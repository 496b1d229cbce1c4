"""Health, metrics, load, version."""
