"""Trains, and nothing else."""

from training import describe, train

train()
describe()
