"""Times of steps: what a step's time is on either kind of device, and which steps the means are of."""

from types import SimpleNamespace

import pytest

from llmc.clock import StepClock


def clock_of(*marks, asynchronous=False, setting_up=1):
    marks = iter(marks)
    backend = SimpleNamespace(asynchronous=asynchronous, mark=lambda: next(marks), seconds_between=lambda a, b: b - a)
    return StepClock(backend, tokens=64, setting_up=setting_up)


@pytest.mark.parametrize("setting_up, seconds", [(1, (9.0, 4.0, 1.0, 1.0)), (2, (9.0, 3.0, 4.0, 1.0, 1.0))])
def test_steps_that_set_things_up_are_left_out_of_the_means(setting_up, seconds):
    clock = clock_of(setting_up=setting_up)
    for s in seconds[:setting_up]:
        assert clock.count(0.0, s) == s and clock.tokens_per_s == 64 / s and clock.average_ms is None
    for s in seconds[setting_up:]:
        clock.count(0.0, s)
    assert clock.average_ms == 2000.0


def test_tokens_per_second_forgets_by_a_twentieth_a_step_and_starts_unbiased():
    clock = clock_of()
    for s in (9.0, 4.0, 1.0):
        clock.count(0.0, s)
    assert clock.tokens_per_s == pytest.approx((0.95 * 0.05 * 16 + 0.05 * 64) / (1 - 0.95**2))


def test_a_gpu_s_step_begins_where_the_one_before_ended_unless_something_came_between():
    clock = clock_of(0.0, 1.0, 2.0, 3.0, 5.0, asynchronous=True)
    assert (clock.start(), clock.end(), clock.start(), clock.end()) == (0.0, 1.0, 1.0, 2.0)
    clock.pause()
    assert (clock.start(), clock.end()) == (3.0, 5.0)


def test_a_cpu_s_step_begins_when_it_is_begun():
    clock = clock_of(0.0, 1.0, 4.0, 5.0)
    assert (clock.start(), clock.end(), clock.start(), clock.end()) == (0.0, 1.0, 4.0, 5.0)
