"""The server on Ray Serve."""
