"""One process is measured from outside; no runner is timed here, small scripts stand in for them."""

import json
import sys
import textwrap

import numpy as np
import pytest
from benchmarks.measuring import (
    RunnerFailed,
    Turn,
    difference,
    last_report,
    measure,
    reason,
    summarise,
    tree_peak_mb,
)


def script(text):
    return [sys.executable, "-c", textwrap.dedent(text)]


def turn(seconds, startup=1.0, peak=100.0, weights=()):
    return Turn(list(seconds), startup, peak, list(weights))


def test_a_process_is_measured(tmp_path):
    """The stand-in says that its first round ended at 5 s on the clock that started the process, so start-up is what
    lies between; it writes two trainings, which come back in the order of their numbers (2 before 10)."""
    np.savez(tmp_path / "weights-10.npz", a=np.array([10.0]))
    np.savez(tmp_path / "weights-2.npz", a=np.array([2.0]))
    command = script("""
        import json, time
        now = time.perf_counter()
        print("a framework talks")
        print(json.dumps({"seconds": [0.5, 0.25], "first_round_at": now, "last_round_at": now + 100}))
        print("and goes on talking")
    """)
    done = measure(command, tmp_path)
    assert done.seconds == [0.5, 0.25]
    assert 0 < done.startup_seconds < 60
    assert done.peak_rss_mb > 0
    assert [model["a"].item() for model in done.weights] == [2.0, 10.0]


def test_memory_after_the_last_round_does_not_count(tmp_path):
    """Looks at memory after ``last_round_at`` are left out: 300 MB that are taken after it do not show."""
    command = script("""
        import json, time
        now = time.perf_counter()
        time.sleep(0.5)
        end = time.perf_counter()
        late = bytearray(300 * 2**20)
        time.sleep(0.5)
        print(json.dumps({"seconds": [], "first_round_at": now, "last_round_at": end}))
    """)
    assert measure(command, tmp_path).peak_rss_mb < 200


def test_memory_of_children_counts(tmp_path):
    """A parent with a child that holds 200 MB has at least 200 MB, and the parent alone has not."""
    command = script("""
        import json, subprocess, sys, time
        hold = "held = bytearray(b'x' * 200 * 2**20); print(flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.5)
        now = time.perf_counter()
        child.communicate(b"\\n")
        print(json.dumps({"seconds": [], "first_round_at": now, "last_round_at": now}))
    """)
    assert measure(command, tmp_path).peak_rss_mb > 200


def test_a_process_that_is_gone_has_no_memory():
    assert tree_peak_mb(2**22 + 1) == 0


def test_a_crash_is_told_with_its_last_words(tmp_path):
    with pytest.raises(RunnerFailed, match="status 1: ValueError: no such thing"):
        measure(script("raise ValueError('no such thing')"), tmp_path)


def test_a_runner_without_a_report_failed(tmp_path):
    with pytest.raises(RunnerFailed, match="status 0: hello"):
        measure(script("print('hello')"), tmp_path)


def test_a_runner_that_does_not_end_is_stopped(tmp_path):
    with pytest.raises(RunnerFailed, match="not finished after 0 s"):
        measure(script("import time; time.sleep(600)"), tmp_path, limit=0.3)


def test_the_report_is_found_among_other_lines():
    line = {"seconds": [1.0], "first_round_at": 1.0, "last_round_at": 2.0}
    assert last_report(f"x\n{json.dumps(line)}\n{{'not json'\n[1]\n{{}}\n") == line
    assert last_report("nothing\n3\n") is None


def test_the_reason_prefers_what_was_said_as_an_error():
    assert reason(2, "output", "first\nlast\n\n") == "status 2: last"
    assert reason(-9, "", "") == "status -9: it said nothing"


def test_summary_of_turns():
    """Rounds 1, 2, 3, 4, 5 from two turns: median 3, quartiles 2 and 4, so spread 2; best start-up, worst memory."""
    m = summarise("W", "plain-pytorch", [turn([5.0, 1.0], 9.0, 50.0), turn([3.0, 2.0, 4.0], 7.0, 80.0)])
    assert (m.seconds_per_round, m.spread, m.startup_seconds, m.peak_rss_mb) == (3.0, 2.0, 7.0, 80.0)


def test_summary_of_a_single_round_has_no_spread():
    m = summarise("W", "plain-pytorch", [turn([4.0])])
    assert (m.seconds_per_round, m.spread) == (4.0, 0.0)


def test_difference_is_the_largest_of_any_parameter_of_any_training():
    """|1 − 1.5| = 0.5 in the first training, |2 − 4| = 2 in the second."""
    one = [{"a": np.array([1.0, 0.0])}, {"a": np.array([2.0])}]
    other = [{"a": np.array([1.5, 0.0])}, {"a": np.array([4.0])}]
    assert difference(one, other) == 2.0
    assert difference(one, one) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([{"b": np.zeros(2)}], id="another name"),
        pytest.param([{"a": np.zeros(3)}], id="another shape"),
        pytest.param([], id="nothing left behind"),
    ],
)
def test_other_models_are_infinitely_far(other):
    assert difference([{"a": np.zeros(2)}], other) == float("inf")
