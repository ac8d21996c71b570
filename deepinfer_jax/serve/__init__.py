"""An HTTP server that speaks OpenAI's and Anthropic's protocols (io.md 4). Extra: `serve`."""
