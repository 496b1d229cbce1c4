"""Code that the routes share: schemas, prompts, media, sampling, jobs and their responses."""
