"""Worker processes, messages between processes, collectives of tensor parallel ranks, signals."""
