"""When an engine places experts again, and that what it does depends on its calls alone."""

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.engine import expert_load
from deepinfer_jax.engine.expert_load import ExpertBalance, check_rebalancing
from deepinfer_jax.errors import ConfigError
from sharding.eplb.maps import initial_layout

LAYERS, EXPERTS, RANKS, STEPS = 3, 8, 4, 8


class Moves:
    """Keeps what would be moved, and checks that it lies where it is said to lie."""

    def __init__(self):
        self.layouts = first()
        self.done = []

    def move_experts(self, layer, present, layout):
        assert present.tolist() == self.layouts[layer].tolist()
        self.layouts[layer] = layout
        self.done.append((layer, layout.tolist()))


def first():
    return np.tile(initial_layout(EXPERTS, 0, RANKS), (LAYERS, 1))


def balance(gain=0.05):
    return ExpertBalance(first(), experts=EXPERTS, ranks=RANKS, steps=STEPS, gain=gain)


def load(step, hot=(0, 1)):
    """Two busy experts of one rank in all layers but the last, whose rows are even."""
    rows = np.full((LAYERS, EXPERTS), 4, np.int32)
    rows[:-1, list(hot)] = 40 + step % 3
    return rows


def run(one, steps, loads=load):
    """Acts before each step and adds its load; returns the moves, and the steps before them."""
    device, when = Moves(), []
    for step in range(steps):
        count = len(device.done)
        one.act(device)
        when += [step] * (len(device.done) - count)
        one.add(loads(step))
    return device, when


def test_a_full_window_is_planned_and_layers_follow_one_by_one():
    one = balance()
    device, when = run(one, 20)
    # eight steps of a window, two more while it is planned, then one layer before each step
    assert when == [10, 11]
    assert [layer for layer, _ in device.done] == [0, 1]
    stats = one.stats()
    assert (stats.decisions, stats.placed_layers, stats.waiting_layers) == (1, 2, 0)
    assert stats.moved_slots == int((device.layouts != first()).sum()) > 0
    assert stats.imbalance[0] < 1.7
    before = balance()
    before.add(load(0))
    assert before.stats().imbalance[0] > 2.0
    assert before.stats().gain is None


def test_equal_calls_move_equal_experts_at_equal_steps():
    found = [run(balance(), 50) for _ in range(3)]
    assert len({repr((device.done, when)) for device, when in found}) == 1
    assert found[0][1]


def test_a_load_that_stays_moves_nothing_again_and_another_one_does():
    one = balance()
    run(one, 40)
    assert one.stats().placed_layers == 2
    assert one.stats().decisions > 1
    device = Moves()
    device.layouts = one._layouts.copy()
    for step in range(20):
        one.act(device)
        one.add(load(step, hot=(4, 5)))
    assert {layer for layer, _ in device.done} == {0, 1}


def test_idle_steps_do_not_count():
    one = balance()
    _, when = run(one, 30, lambda step: load(step) * (step % 2))
    assert when[0] == 20
    assert one.stats().steps <= STEPS


def test_new_weights_begin_again():
    one = balance()
    run(one, 12)
    one.reset()
    device, when = run(one, 12)
    assert when == [10, 11]
    assert device.done


def test_a_plan_that_fails_ends_the_step_that_needs_it(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no plan")

    monkeypatch.setattr(expert_load, "decide_all", fails)
    with pytest.raises(RuntimeError, match="no plan"):
        run(balance(), 20)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rebalance_steps": 1}, "None or an integer >= 2"),
        ({"rebalance_steps": 4, "rebalance_gain": 1.0}, r"a float in \[0, 1\)"),
        ({"rebalance_steps": 4, "redundant_experts": -1}, "an integer >= 0"),
        ({"redundant_experts": 2}, "give it a number of steps"),
    ],
)
def test_options_out_of_range(options, word):
    with pytest.raises(ConfigError, match=word):
        di.RuntimeConfig(**options)


def test_without_devices_that_share_experts_it_is_refused(fixtures_dir):
    config = read_config(fixtures_dir / "tiny_v41")
    check_rebalancing(config, di.RuntimeConfig())
    with pytest.raises(ConfigError, match="every device holds all, got 100"):
        check_rebalancing(config, di.RuntimeConfig(rebalance_steps=100))
