"""What is done with Chakra files beside reading them as traces: check them, run them as a simulator would.

files     the messages of a file, and the files of a job
lint      what keeps a simulator from running them, or from being right
between   the same, between the files of several ranks
findings  each of it explained
schedule  nodes one after the other on the resources of a rank
"""
