"""A step of policy gradients: roll out, score the same tokens with slopes, go on with new weights.

Engine and `score` share parameters and arithmetic, so log-probabilities of the rollout need no
correction: at level "batch" the logits behind both have the same bits. Only the head learns here;
leave `replace(...)` away, and everything does.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di

PROMPT, LENGTH, RATE = "Mara lives in Oakford.", 8, 0.5


def main() -> None:
    """Prints how far rollout and recomputation differ, and the reward before and after."""
    model = di.load("nano", numerics="float32")
    llm = di.LLM(model, runtime=di.RuntimeConfig(max_seqs=8, max_len=64, drafting=False))
    sampling = di.SamplingParams(n=8, seed=1, max_tokens=LENGTH, logprobs=0, ignore_eos=True)

    def rollout() -> tuple[di.RequestOutput, np.ndarray]:
        [output] = llm.generate(PROMPT, sampling, progress=False)
        return output, np.asarray([one.text.count("a") for one in output.outputs], np.float32)

    @jax.jit
    def taken(head: jax.Array, ids: jax.Array) -> jax.Array:
        logits = di.score(replace(model.params, head=head), model.config, ids[:-1])[-LENGTH:]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[-LENGTH:, None], 1)[:, 0]

    output, reward = rollout()
    texts = [jnp.asarray([*output.prompt_token_ids, *one.token_ids]) for one in output.outputs]
    pairs = zip(texts, output.outputs, strict=True)
    head = jnp.asarray(model.params.head)
    print("difference", max(float(abs(taken(head, t) - o.logprobs).max()) for t, o in pairs))
    slope = jax.jit(jax.grad(lambda head, ids: taken(head, ids).mean()))
    gain = sum(a * slope(head, ids) for a, ids in zip(reward - reward.mean(), texts, strict=True))
    llm.replace_params(replace(model.params, head=head + RATE * gain))
    print("reward", reward.mean(), "then", rollout()[1].mean())


if __name__ == "__main__":
    main()
