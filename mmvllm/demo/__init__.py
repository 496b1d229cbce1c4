"""A chat page for images and videos, built with Gradio (extra `demo`); started by `mmvllm demo`."""
