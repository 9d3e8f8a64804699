"""HTTP to a placed request: OpenAI-compatible API, admission, prefix-aware placement, token streams."""
