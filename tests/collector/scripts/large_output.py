"""Prints some megabytes from two threads, line by line."""

import sys
import threading

from training import describe, train


def write(letter: str) -> None:
    for _ in range(2000):
        sys.stdout.write(letter * 300 + "\n")


threads = [threading.Thread(target=write, args=(letter,)) for letter in "a"]
for thread in threads:
    thread.start()
train()
for thread in threads:
    thread.join()
sys.stderr.write("b" * 200_000 + "\n")
describe()
