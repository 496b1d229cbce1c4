"""Worker processes, message channels, collectives of tensor-parallel ranks, and signal handling."""
