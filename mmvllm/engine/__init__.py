"""The engine's step: add requests, launch, wait, commit and return outputs; recover when a step fails."""
