"""Pure pieces of speculative decoding: acceptance, residuals, confidence, verification lengths."""
