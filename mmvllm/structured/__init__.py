"""Parameters of structured outputs, and checks of their schemas and grammars."""
