"""POST /tokenize and /detokenize; GET /tokenizer_info."""
