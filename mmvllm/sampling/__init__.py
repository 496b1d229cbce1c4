"""Logits -> tokens: parameters on the device, constraints, grammars, log-probabilities of prompts."""
