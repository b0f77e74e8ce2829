"""Forks in one thread while another one trains.

Never in the middle of an operator: a child would wait for ever for torch's locks that the other thread held.
"""

import os
import threading
import time

from training import describe, train, train_apart


def fork_often() -> None:
    for _ in range(10):
        with between_steps:
            child = os.fork()
        if not child:
            train_apart(1)
            os._exit(5)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


statuses: list[int] = []
between_steps = threading.Lock()
train(2)
thread = threading.Thread(target=fork_often)
thread.start()
for _ in range(20):
    with between_steps:
        train(1, 0)
    time.sleep(0.01)
thread.join()
print("children", statuses)
describe()
