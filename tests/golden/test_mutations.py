"""Every mutation of a shipped function makes a named golden check fail; unmutated it passes."""

import pytest

from tests.golden import (
    mutations,
    test_attention,
    test_compressor_indexer,
    test_engram,
    test_mhc,
    test_moe,
    test_norm_rope,
    test_tiny_v41,
    tiny,
)
from tests.golden.ledger import Fixture

ATTENTION, INDEXER = test_attention.SUITE, test_compressor_indexer.SUITE
MHC, MOE, ENGRAM = test_mhc.SUITE, test_moe.SUITE, test_engram.SUITE
NETWORK = test_tiny_v41.SUITE

#: mutation -> the golden check that must notice
NOTICED = {
    mutations.rotary_half_split: (test_norm_rope.SUITE, "tiny window"),
    mutations.inverse_rotation_missing: (ATTENTION, "full0 f32"),
    mutations.yarn_missing_in_window_keys: (ATTENTION, "full2 f32"),
    mutations.per_head_query_norm: (ATTENTION, "full0 f32"),
    mutations.mixing_matrix_transposed: (MHC, "sublayer s0"),
    mutations.sinkhorn_ends_on_rows: (MHC, "sinkhorn"),
    mutations.own_mix_used: (NETWORK, "layers A"),
    mutations.mix_delayed_by_a_layer: (NETWORK, "layers A"),
    mutations.sink_scaled: (ATTENTION, "core edge f32"),
    mutations.absent_keys_clamped_to_row_0: (ATTENTION, "core edge f32"),
    mutations.softmax_blocks_of_32: (ATTENTION, "core b bf16"),
    mutations.window_off_by_one: (ATTENTION, "full0 f32"),
    mutations.visible_floor_p_over_r: (ATTENTION, "full2 f32"),
    mutations.visible_open_pair: (ATTENTION, "full2 f32"),
    mutations.rotated_at_last_token: (INDEXER, "L2 n7 f32"),
    mutations.candidate_blocks_shifted: (INDEXER, "cand.a"),
    mutations.last_block_not_forced: (INDEXER, "cand.a"),
    mutations.up_clamped_from_above_only: (MOE, "s2 f32"),
    mutations.gate_clamped_on_both_sides: (MOE, "s2 f32"),
    mutations.weight_after_the_quantiser: (MOE, "s2 bf16"),
    mutations.gate_and_up_exchanged: (MOE, "s0 f32"),
    mutations.bias_inside_weights: (MOE, "router0"),
    mutations.nibbles_swapped: (MOE, "s0 f32"),
    mutations.dense_scale_axes_exchanged: (ATTENTION, "output f32"),
    mutations.expert_scale_axes_exchanged: (MOE, "s0 f32"),
    mutations.engram_columns_head_major: (ENGRAM, "hash0"),
    mutations.engram_look_back_reversed: (ENGRAM, "hash0"),
    mutations.engram_images_not_sticky: (ENGRAM, "hash1"),
    mutations.eps_of_1e_minus_6: (MHC, "sublayer zero"),
}
pytestmark = pytest.mark.accept(2)


@pytest.fixture(autouse=True)
def _no_program_survives_a_mutation():
    yield
    tiny._program.cache_clear()


@pytest.mark.parametrize("mutation", NOTICED, ids=lambda mutation: mutation.__name__)
def test_a_golden_check_notices(mutation, monkeypatch, record_property):
    suite, case = NOTICED[mutation]
    suite.run(case)
    tiny._program.cache_clear()
    mutation(monkeypatch)
    with pytest.raises(AssertionError) as failure:
        suite.cases[case](Fixture(suite.path))
    record_property("noticed", f"{suite.path} {case}: {failure.value}")
    print(f"{suite.path} {case}: {failure.value}"[:250])


def test_there_are_at_least_14_mutations_and_none_is_unused():
    shipped = {
        name
        for name, value in vars(mutations).items()
        if callable(value)
        and getattr(value, "__module__", "").endswith("golden.mutations")
        and not name.startswith("_")
        and name != "everywhere"
    }
    assert {mutation.__name__ for mutation in NOTICED} == shipped
    assert len(NOTICED) >= 14
