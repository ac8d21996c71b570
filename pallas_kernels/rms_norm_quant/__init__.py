"""RMSNorm fused with the Q8 quantiser (kernels.md 4.8)."""
