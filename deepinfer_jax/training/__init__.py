"""Training of the embedded model: corpus, tokenizer, losses and the training loop."""
