"""The memory of a device: an exact simulation of PyTorch's caching allocator, run on the requests of a snapshot."""
