"""The native observer with other users: processes that name one file, children that record, threads that hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library
from etloom.formats import observer

pytestmark = [pytest.mark.torch, pytest.mark.slow]

HEAD = """import os, sys, threading, time, torch
from etloom.collector.observer import ExecutionTraceObserver
torch.set_num_threads(1)
x = torch.ones(8)
def register(path): return ExecutionTraceObserver().register_callback(path)
"""
SLOW = """#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static int first(void) { return syscall(SYS_gettid) == getpid(); }
int fallocate(int file, int mode, off_t from, off_t size) {
  int result = syscall(SYS_fallocate, file, mode, from, size);
  if (getenv("SLOW_DISK") && from > 4096 && !first()) {
    fclose(fopen("blocked", "w"));
    while (access("released", F_OK) != 0) usleep(1000);
  }
  return result;
}
int clock_gettime(clockid_t clock, struct timespec* now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (getenv("SLOW_STOP") && clock == CLOCK_REALTIME && first()) usleep(2000);
  return result;
}
"""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(str(error))


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def names(path: Path) -> dict[str, int]:
    counted = observer.read(path).nodes["name"].cast(str).value_counts()
    return dict(counted.rows())


def lost(path: Path) -> list[str]:
    rows = observer.read(path).stats.filter(severity="data_loss")
    return rows["name"].to_list() + observer.read(path).stats.filter(severity="error")["name"].to_list()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that is loaded first, which makes the disk and the stop of a window slow where it is told to."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler, or no Linux")
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.c").write_text(SLOW)
    subprocess.run([compiler, "-shared", "-fPIC", "slow.c", "-o", "slow.so"], cwd=folder, check=True)
    return str(folder / "slow.so")


def test_a_child_of_fork_records_only_into_its_file(tmp_path: Path) -> None:
    script = """o = register("parent.etob"); o.start()
for _ in range(50): x + 1
if (pid := os.fork()) == 0:
    c = register("child.etob"); c.start()
    for _ in range(500): x * 2
    c.stop(); c.unregister_callback(); os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(50): x - 1
o.stop(); o.unregister_callback()
"""
    found = run(script, tmp_path)
    assert found.returncode == 0, found.stderr
    parent, child = (names(tmp_path / f"{who}.etob") for who in ("parent", "child"))
    assert (parent["aten::add"], parent["aten::sub"], parent.get("aten::mul")) == (50, 50, None)
    assert (child["aten::mul"], child.get("aten::add"), child.get("unknown")) == (500, None, None)
    assert lost(tmp_path / "parent.etob") == lost(tmp_path / "child.etob") == []


def test_two_processes_with_the_same_path_do_not_interfere(tmp_path: Path) -> None:
    """What is mapped and then cut off ends the process that touches it."""
    script = """import subprocess
o = register("same.etob"); o.start()
x + 1
other = sys.argv[1] if len(sys.argv) > 1 else None
if "OTHER" not in os.environ:
    again = subprocess.run([sys.executable, "-c", os.environ["SCRIPT"]], env={**os.environ, "OTHER": "1"})
    assert again.returncode == 0
    for _ in range(2000): x + 1
o.stop(); o.unregister_callback()
"""
    found = run(script, tmp_path, SCRIPT=HEAD + script)
    assert found.returncode == 0, found.stderr
    assert names(tmp_path / "same.etob")["aten::add"] == 1  # the later one's


def test_a_link_is_written_through_and_a_pipe_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "link.etob").symlink_to(tmp_path / "there.etob")
    os.mkfifo(tmp_path / "pipe.etob")
    script = """o = register("link.etob"); o.start(); x + 1; o.stop(); o.unregister_callback()
o = register("pipe.etob"); o.start()
"""
    found = run(script, tmp_path)
    assert found.returncode == 1 and "pipe.etob" in found.stderr
    assert (tmp_path / "link.etob").is_symlink() and (tmp_path / "pipe.etob").is_fifo()
    assert names(tmp_path / "there.etob")["aten::add"] == 1


def test_a_thread_blocked_by_the_disk_may_return_after_the_end(tmp_path: Path, slow: str) -> None:
    script = """o = register("stuck.etob"); o.start()
go = True
def work():
    while go: x + 1
thread = threading.Thread(target=work); thread.start()
while not os.path.exists("blocked"): time.sleep(0.01)
o.stop(); print(o.counters()["stuck"]); o.unregister_callback()
open("released", "w").close(); go = False; thread.join(); print("in order")
"""
    found = run(script, tmp_path, LD_PRELOAD=slow, SLOW_DISK="1")
    assert (found.returncode, found.stdout.split("\n")[:2]) == (0, ["1", "in order"]), found.stderr


def test_threads_ending_during_stop_do_not_damage_the_next_window(tmp_path: Path, slow: str) -> None:
    script = """from etloom.formats import observer
done = False
def short():
    for _ in range(3): x + 1
def spawn():
    while not done:
        threads = [threading.Thread(target=short) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
spawning = [threading.Thread(target=spawn) for _ in range(2)]
for thread in spawning: thread.start()
until = time.time() + 10
while time.time() < until:
    o = register("window.etob"); o.start(); time.sleep(0.01); o.stop(); o.unregister_callback()
    stats = observer.read("window.etob").stats
    bad = stats.filter(stats["severity"].is_in(["error", "data_loss"]))
    assert not bad.height, bad.rows()
done = True
for thread in spawning: thread.join()
print("in order")
"""
    found = run(script, tmp_path, LD_PRELOAD=slow, SLOW_STOP="1")
    assert (found.returncode, found.stdout.strip()) == (0, "in order"), found.stderr
