"""The step: requests in, launch, wait, commit, outputs; what happens when a step fails."""
