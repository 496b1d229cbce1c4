"""What a job writes: the journal, tables, caption files, the report."""
