"""Listing live objects while other threads run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from etloom.collector.options import RecordingOptions
from etloom.collector.session.model_facts import list_instances, list_subclasses


class Base:
    pass


class Left(Base):
    pass


class Right(Base):
    pass


class Both(Left, Right):
    pass


@pytest.mark.slow
def test_list_instances_and_subclasses() -> None:
    base, left, both = Base(), Left(), Both()
    assert set(list_subclasses(Base)) == {Base, Left, Right, Both}
    assert set(list_instances(list_subclasses(Base))) == {base, left, both}
    assert list_instances([Left]) == [left]
    assert list_instances([]) == []


def create_guard() -> None:
    from etloom.collector.session.profiler_guard import ProfilerGuard

    ProfilerGuard(lambda _profiler: None, RecordingOptions("out", "scratch")).remove()


def inspect_model() -> None:
    from etloom.collector.session.model_facts import collect_model_facts

    collect_model_facts()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("look", [create_guard, inspect_model])
def test_a_thread_of_the_job_can_build_tuples_meanwhile(look: Callable[[], None]) -> None:
    """tuple(generator) raises SystemError if another thread refers to the unfinished tuple at its end."""
    pytest.importorskip("torch")
    interval_s = sys.getswitchinterval()
    built, finished = [0], threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(20):
            if number == 5:
                time.sleep(0.0001)  # the other thread runs
            yield number

    def build() -> None:
        try:
            while not finished.is_set():
                built[0] += len(tuple(numbers())) == 20
        except SystemError:
            built[0] = -1
        finished.set()

    thread = threading.Thread(target=build)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(5):
            look()
    finally:
        finished.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert built[0] > 0


_HOOKED = """
import sys, threading, time
from etloom.collector.session.model_facts import list_instances

def build():
    while not finished.is_set():
        tuple(number for number in range(20) if number != 5 or not time.sleep(0.0001))

class Base:
    pass

finished = threading.Event()
thread = threading.Thread(target=build)
sys.setswitchinterval(1e-5)
sys.addaudithook(lambda event, arguments: None)
thread.start()
for _ in range(10):
    list_instances([Base])
finished.set()
thread.join()
"""


def test_audit_hooks_of_the_job_run_outside_of_the_list_of_objects() -> None:
    process = subprocess.run([sys.executable, "-c", _HOOKED], capture_output=True, text=True, check=True)
    assert process.stderr == ""
