"""POST /v1/embeddings and /pooling."""
