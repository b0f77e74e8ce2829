"""Forks before it trains: the child is the one that trains."""

import os
import sys

from training import describe, train

child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train()
describe(numbers=False)
sys.exit(6)
