"""Draft training for a frozen target: nano's stages with another head and block, for a few steps.

The command does the same, for as long as it takes:

    deepinfer-jax train draft --target nano --data corpus.npz --out drafts --steps 2000 --head rnn

The target may be any DeepSeek-V4.1 checkpoint with draft stages. What they see of it is computed
within each step and never stored.
"""

import tempfile
from pathlib import Path

import deepinfer_jax as di
from deepinfer_jax.loading import resolve_folder
from deepinfer_jax.training import draft as drafts
from deepinfer_jax.training.data import pack_corpus, packed_batches
from deepinfer_jax.training.draft_loss import DraftLossSettings
from deepinfer_jax.training.export import export_checkpoint
from deepinfer_jax.training.loop import LoopSettings, run_steps
from deepinfer_jax.training.state import OptimiserSettings, initial_state

STEPS, LENGTH = 3, 64


def main() -> None:
    """Trains, writes a checkpoint, loads it and drafts with it."""
    folder = resolve_folder("nano")
    target = di.load(folder, numerics="float32", determinism="off")
    config = drafts.with_draft_settings(target.config, head="rnn", block=4)
    packed = pack_corpus(folder, items=64, length=LENGTH, seed=0)
    drafts.check_data(packed, target.params, config)
    loss = DraftLossSettings(anchors=8)
    settings = OptimiserSettings(steps=STEPS, peak_rate=2e-4, warmup_steps=1, loss=loss)
    stages = drafts.initial_draft(target.params, target.config, config, seed=0)
    state = run_steps(
        initial_state(stages, settings),
        drafts.compiled_draft_step(target.params, config, settings),
        packed_batches(packed, batch=2, length=LENGTH, seed=0),
        LoopSettings(steps=STEPS, log_every=1),
        report=lambda step, values: print(f"step {step}: loss {values['loss']:.3f}"),
    )
    with tempfile.TemporaryDirectory() as out:
        params = drafts.with_draft(target.params, state.params)
        written = export_checkpoint(params, config, Path(out) / "drafts", tokenizer_from=folder)
        model = di.load(written, numerics="float32")
    assert model.tokenizer is not None
    found = di.draft(model.params, model.config, model.tokenizer.encode("Tom lives in").ids)
    print(f"drafts {found.token_ids}, confidence {found.confidence.round(2)}")


if __name__ == "__main__":
    main()
