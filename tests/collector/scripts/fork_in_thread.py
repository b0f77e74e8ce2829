"""Forks in one thread while another one trains."""

import os
import threading

from training import describe, train, train_apart


def fork_often() -> None:
    for _ in range(10):
        child = os.fork()
        if not child:
            train_apart(1)
            os._exit(5)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


statuses: list[int] = []
train(2)
thread = threading.Thread(target=fork_often)
thread.start()
train(20)
thread.join()
print("children", statuses)
describe()
