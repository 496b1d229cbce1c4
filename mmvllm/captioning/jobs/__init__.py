"""Tasks -> records: by one engine, several, Ray or an endpoint."""
