import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonemb.training import Schedule
from tritonemb.training.schedule import LossScale


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor(step) for step in range(steps)]


def test_a_constant_schedule_changes_nothing():
    schedule = Schedule()
    assert schedule.is_constant
    assert schedule.within(None) is schedule
    assert factors(schedule, 3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_and_reaches_the_full_rate_with_its_last_step():
    schedule = Schedule(warmup_steps=4)
    assert not schedule.is_constant
    assert factors(schedule, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_polynomial_decay_by_hand():
    schedule = Schedule(warmup_steps=1, decay="polynomial", decay_steps=4, power=2.0, final=0.2)
    expected = [1.0] + [0.2 + 0.8 * (1 - done / 4) ** 2 for done in range(5)] + [0.2, 0.2]
    assert factors(schedule, 8) == pytest.approx(expected)


def test_cosine_decay_by_hand():
    schedule = Schedule(decay="cosine", decay_steps=4)
    assert factors(schedule, 6) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0])


def test_decay_takes_the_steps_that_the_warm_up_leaves():
    schedule = Schedule(warmup_steps=10, decay="polynomial", power=1.0).within(110)
    assert schedule.decay_steps == 100
    assert schedule.factor(60) == pytest.approx(0.5)
    assert Schedule(decay="cosine", decay_steps=7).within(100).decay_steps == 7


def test_decay_over_an_unknown_number_of_steps_is_refused():
    with pytest.raises(ValueError, match=r"cosine decay needs decay_steps \(or max_steps\)"):
        Schedule(decay="cosine").within(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"decay": "linear"}, r"decay must be one of .*, got 'linear'"),
        ({"decay_steps": 0}, "decay_steps must be at least 1, got 0"),
        ({"power": 0.0}, "power must be positive, got 0.0"),
        ({"final": 1.5}, r"final must lie in \[0, 1\], got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)


def test_a_loss_scale_doubles_and_halves_within_its_limits():
    scale = LossScale(factor=LossScale.LARGEST / 2)
    for _ in range(3 * LossScale.GROWTH_INTERVAL):
        scale.update(overflowed=False)
    assert scale.factor == LossScale.LARGEST
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert (scale.factor, scale.good_steps, scale.overflows) == (LossScale.LARGEST / 2, 0, 1)
    for _ in range(30):
        scale.update(overflowed=True)
    assert (scale.factor, scale.overflows) == (LossScale.SMALLEST, 31)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(-1, 5))
def test_a_loss_scale_is_that_of_torch(overflows, interval, exponent):
    """It grows again and again, each time after as many steps without overflow."""
    torchs, fused = torch.amp.GradScaler("cpu", 2.0**exponent, growth_interval=interval), LossScale(2.0**exponent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScale, "GROWTH_INTERVAL", interval)
        patch.setattr(LossScale, "SMALLEST", 0.0)
        for overflowed in [*overflows, *[False] * 3 * interval]:
            torchs.scale(torch.ones(()))  # makes the tensor of the scale
            actual = torch.tensor(float(overflowed))
            torch._amp_update_scale_(torchs._scale, torchs._growth_tracker, actual, 2.0, 0.5, interval)
            fused.update(overflowed)
            assert (fused.factor, fused.good_steps) == (torchs.get_scale(), int(torchs._get_growth_tracker()))
    assert fused.overflows == sum(overflows)
