"""Trains in a process that multiprocessing starts by spawn."""

import multiprocessing

from training import describe, train

if __name__ == "__main__":
    train(5)
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
    print("process", process.exitcode)
    train()
    describe()
