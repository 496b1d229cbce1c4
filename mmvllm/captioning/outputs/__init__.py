"""The files that a job writes: the journal, tables, caption files and the report."""
