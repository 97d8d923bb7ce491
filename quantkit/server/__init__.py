"""The OpenAI-compatible server: an HTTP front without torch, an engine process, and typed messages between."""
