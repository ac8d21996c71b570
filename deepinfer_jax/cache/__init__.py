"""Host side of the KV cache: block pool, prefix tree, window checkpoints, capacity arithmetic."""
