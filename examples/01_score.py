"""Next-token logits of a prompt, as a pure function of parameters, config and token ids."""

import jax.numpy as jnp

import deepinfer_jax as di


def main() -> None:
    """Prints the most likely token after each position."""
    model = di.load("nano", numerics="float32")
    token_ids = jnp.arange(3, 11, dtype=jnp.int32)
    logits = di.score(model.params, model.config, token_ids)
    print(logits.argmax(axis=-1))


if __name__ == "__main__":
    main()
