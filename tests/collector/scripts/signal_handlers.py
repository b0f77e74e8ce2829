"""Has handlers for signals that arrive in the middle of operators."""

import os
import signal
import threading

import torch
from training import describe, train


def count(number: int, _frame: object) -> None:
    arrived[signal.Signals(number).name] = True
    torch.ones(2) + 1


arrived: dict[str, bool] = {}
for name in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGHUP, signal.SIGPROF):
    signal.signal(name, count)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
train(4)
for name in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPROF):
    os.kill(os.getpid(), name)
    signal.pthread_kill(threading.main_thread().ident, name)
train()
signal.setitimer(signal.ITIMER_REAL, 0)
print("arrived", sorted(arrived))
describe()
