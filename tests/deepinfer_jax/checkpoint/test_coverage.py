"""Coverage: every kind of mismatch is named, all of them in one error."""

import pytest

from deepinfer_jax.checkpoint.coverage import MAX_LINES, check_coverage, compare
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.checkpoint.safetensors import open_store
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import CheckpointError


def check(copy):
    return check_coverage(open_store(copy.folder), read_config(copy.folder))


def test_untouched_copies_are_complete(copy_of):
    for name in ("tiny_v41", "tiny_v4"):
        coverage = check(copy_of(name))
        assert coverage.is_complete
        assert coverage.report() == ""


def test_missing_tensor_is_named(copy_of):
    copy = copy_of("tiny_v41")
    index = copy.read_index()
    copy.edit("layers.3.attn.wkv.scale", lambda record: None)
    del index["weight_map"]["layers.3.attn.wkv.scale"]
    copy.write_index(index)
    with pytest.raises(CheckpointError, match=r"missing \(1\):\n +layers\.3\.attn\.wkv\.scale"):
        check(copy)


def test_unused_tensor_is_named(copy_of):
    copy = copy_of("tiny_v41")
    copy.add("layers.0.hc_attn_norm.weight", ["BF16", [64], bytes(128)])
    with pytest.raises(CheckpointError, match=r"unused \(1\):\n +layers\.0\.hc_attn_norm\.weight"):
        check(copy)


def test_wrong_dtype_is_named_with_both(copy_of):
    copy = copy_of("tiny_v41")
    copy.edit("norm.weight", lambda record: ["F16", *record[1:]])
    with pytest.raises(CheckpointError, match=r"norm\.weight: expected BF16, received F16"):
        check(copy)


def test_wrong_shape_is_named_with_both(copy_of):
    copy = copy_of("tiny_v41")
    copy.edit("layers.2.attn.wq_a.scale", lambda record: [record[0], [2, 3], record[2]])
    with pytest.raises(CheckpointError, match=r"wq_a\.scale: expected \(3, 2\), received \(2, 3\)"):
        check(copy)


def test_tensor_that_the_index_puts_elsewhere_is_named(copy_of):
    copy = copy_of("tiny_v41")
    copy.edit("embed.weight", lambda record: None)
    with pytest.raises(CheckpointError, match=r"embed\.weight: the index puts it in .*not hold it"):
        check(copy)


def test_tensor_that_the_index_does_not_list_is_named(copy_of):
    copy = copy_of("tiny_v41")
    index = copy.read_index()
    del index["weight_map"]["embed.weight"]
    copy.write_index(index)
    with pytest.raises(CheckpointError, match=r"embed\.weight: .*the index does not list it"):
        check(copy)


def test_one_error_holds_all_kinds_and_shortens_long_lists(copy_of):
    copy = copy_of("tiny_v41")
    copy.edit("norm.weight", lambda record: ["F16", *record[1:]])
    copy.edit("embed.weight", lambda record: [record[0], record[1][::-1], record[2]])
    copy.rename(lambda name: name.replace("ffn.experts.7.", "ffn.experts.8."))
    with pytest.raises(CheckpointError) as caught:
        check(copy)
    text = str(caught.value)
    for title in ("missing (60)", "unused (60)", "wrong shape (1)", "wrong dtype (1)"):
        assert title in text
    assert text.count(f"... and {60 - MAX_LINES} more") == 2
    assert str(copy.folder) in text


@pytest.mark.parametrize(
    ("model", "name", "is_ignored"),
    [
        ("tiny_v41", "mtp.0.embed.weight", True),
        ("tiny_v41", "mtp.2.head.weight", True),
        ("tiny_v41", "mtp.0.emb.tok_emb.weight", False),
        ("tiny_v4", "mtp.0.emb.tok_emb.weight", True),
        ("tiny_v4", "mtp.0.head.weight", True),
        ("tiny_v4", "mtp.0.enorm.weight", False),
    ],
)
def test_copies_of_embedding_and_head_are_ignored(copy_of, model, name, is_ignored):
    copy = copy_of(model)
    copy.add(name, ["BF16", [512, 64], bytes(2 * 512 * 64)])
    coverage = compare(open_store(copy.folder), read_config(copy.folder))
    assert coverage.ignored == ((name,) if is_ignored else ())
    assert coverage.unused == (() if is_ignored else (name,))


def test_hash_layers_are_checked_both_ways(copy_of):
    copy = copy_of("tiny_v4")
    copy.rename(lambda name: name.replace("layers.0.ffn.gate.tid2eid", "layers.0.ffn.gate.bias"))
    with pytest.raises(CheckpointError) as caught:
        check(copy)
    assert "missing (1):\n    layers.0.ffn.gate.tid2eid" in str(caught.value)
    assert "unused (1):\n    layers.0.ffn.gate.bias" in str(caught.value)


def test_loading_refuses_before_anything_is_read(copy_of):
    copy = copy_of("tiny_v41")
    copy.edit("norm.weight", lambda record: ["F16", *record[1:]])
    seen = []
    with pytest.raises(CheckpointError, match="wrong dtype"):
        load_params(copy.folder, read_config(copy.folder), progress=lambda *a: seen.append(a))
    assert seen == []
