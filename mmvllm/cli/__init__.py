"""The commands and their options; nothing imports torch before the arguments have been read."""
