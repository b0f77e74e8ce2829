"""Records ranks of a job of any size on one machine without GPUs: nothing is computed and nothing is communicated.

The user's script runs unchanged under PyTorch's fake tensors, which have shapes but no data, on a CUDA device without
hardware (native/device.cpp), in a process group of PyTorch's backend "fake". Each rank runs alone. A dispatch mode
records the operators that would have run on the device, and the memory of their results.

    fake_cuda            torch.cuda without a device
    fake_distributed     process groups and object collectives of one rank
    fake_objects         objects that ranks send each other: files from earlier ranks
    fake_kernels         shapes of operators of the device that torch does not have
    attention            keeps attention one operator
    data_defaults        values, and shapes that depend on data
    host_side            data loaders, pinned memory, NVTX
    failures             why a script failed, in one line
    dispatch_recorder    operators and memory
    memory_kinds         what a storage is for: parameters, activations, ...
    request_history      births and deaths of storages, as a memory snapshot
    trace_file           the file of a rank, in PyTorch's format
    session              starts all of it in a process of the job

Loaded by launcher/bootstrap/sitecustomize.py with `--fake-world` only.
"""

FACTS_NAME = "fake_rank_{rank}.json"
"""File with facts about a rank: its steps, number of operators and peak memory."""
FAILURE_NAME = "fake_rank_{rank}_failure.txt"
"""File with the reason why the script of a rank failed, which the launcher reads and removes."""
LIBRARY_VARIABLE = "ETLOOM_FAKE_DEVICE"
"""The environment variable that names the library of the fake device, for the processes of the job."""
