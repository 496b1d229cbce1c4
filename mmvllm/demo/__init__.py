"""A page to talk about pictures with a model, made with Gradio (extra `demo`); `mmvllm demo` opens it."""
