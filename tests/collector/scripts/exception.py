"""Ends with an exception, after others that it catches."""

from training import describe, train

train(3)
try:
    train("three")  # type: ignore[arg-type]
except TypeError as error:
    print("caught", error)
train()
describe()
raise ValueError("of the job")
