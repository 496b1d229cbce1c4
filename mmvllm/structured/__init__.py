"""What the text of a completion must be: which schemas and grammars are accepted."""
