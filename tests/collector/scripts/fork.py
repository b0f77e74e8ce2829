"""Forks at random moments of the training; the children train, and leave in every way: fork.py [CHILDREN [FIRST]].

FIRST is the number of the first child: of the numbers below 4 each one leaves in another way.
"""

import os
import random
import sys
import threading
import time

import torch
from training import train

CHILDREN = int(sys.argv[1]) if len(sys.argv) > 1 else 8
FIRST = int(sys.argv[2]) if len(sys.argv) > 2 else 0
EXITS = {"exit": 3, "return": 0, "raise": 1, "leave": 4}


def work() -> None:
    train(1, 0)
    thread = threading.Thread(target=lambda: torch.ones(3) + 1)  # callbacks are on in every new thread
    thread.start()
    thread.join()


def end(how: str) -> None:
    if how == "exit":
        sys.exit(EXITS[how])
    if how == "leave":
        os._exit(EXITS[how])
    if how == "raise":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise KeyError


train(3)
for number in range(FIRST, FIRST + CHILDREN):
    # Each way first; then mostly the last one, because an exit of Python costs as much as many forks.
    how = (
        list(EXITS)[number if number < 4 else number // 16 % 4] if number < 4 or number % 16 == 0 else "leave"
    )
    deadline = time.monotonic() + random.random() / 50
    while time.monotonic() < deadline:
        train(1, 0)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        work()
        end(how)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != EXITS[how]:
        print("child", number, how, "ended with", status)
else:
    print("forked", CHILDREN)
    sys.stdout.flush()
