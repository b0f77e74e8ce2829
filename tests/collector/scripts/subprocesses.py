"""Starts programs in every way, which see the environment of the job."""

import os
import subprocess
import sys

from training import describe, environment, train

train(5)
program = ["/bin/sh", "-c", "echo child; echo error >&2; exit 7"]
print(subprocess.run(program, capture_output=True, text=True, check=False))
print(subprocess.run(program, capture_output=True, text=True, check=False, preexec_fn=os.setsid))
print(subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True, env={"A": "1"}).stdout)
names = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
added = {line.partition("=")[0] for line in names.splitlines()} - set(environment())
print(
    "added", added - {"PYTHONPATH", "ETLOOM_COLLECT", "TORCH_FR_BUFFER_SIZE", "_", "SHLVL", "PWD", "OLDPWD"}
)
print(os.system("exit 3"), flush=True)
child = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 9"], os.environ)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
listing = "import os; print(len(os.listdir('/proc/self/fd')))"
kept = subprocess.run([sys.executable, "-S", "-c", listing], capture_output=True, text=True, check=True)
print("descriptors of a child", kept.stdout)
train()
describe()
