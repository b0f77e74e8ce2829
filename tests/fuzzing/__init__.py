"""A fuzzer of readers and verbs: mutated traces of every format through every command.

``python -m fuzzing`` (with ``tests`` on PYTHONPATH) runs it; ``make fuzz-verbs`` does. A case is a number: with the same seed
it is the same input and the same commands. The fuzzer of the native parsers, which runs them under sanitizers, is
``fuzz/fuzz.cpp``.
"""
