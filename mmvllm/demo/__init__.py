"""A chat page for images, built with Gradio (extra `demo`); started by `mmvllm demo`."""
