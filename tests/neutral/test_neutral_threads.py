"""Torch's worker threads are the script's: they start when it calls them, not when a summary would like them.

libgomp's workers do not survive a fork: a child that calls an operation over all of them waits for ever, unless its
parent never had any. And a worker keeps the floating-point mode of the moment it was started in.
"""

import os
import re

import pytest

SCRIPT = """
import os, signal, time
import torch
from torch import nn

torch.set_num_threads(2)

class Seen(nn.Module):
    def forward(self, values):
        return values

for _ in range(4):  # the first large tensor is never shared
    Seen()(torch.empty(1 << 20))
child = os.fork()
if not child:
    torch.ones(1 << 20).mul_(2)
    os._exit(7)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        print("child ended", os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.05)
else:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("child hung")
torch.set_flush_denormal(True)
tiny = torch.full((1 << 20,), 1e-30).mul(1e-10)
torch.set_flush_denormal(False)
print(torch.count_nonzero(tiny.view(torch.int32)).item(), "subnormal")
"""


def printed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout, re.sub(r"pid=\d+", "pid", done.stderr)  # python from 3.12 on warns of forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_large_summaries_start_no_workers_of_torch(tmp_path, forks):
    """By the kernels, and of tensors that are saved whole."""
    (tmp_path / "script.py").write_text(SCRIPT)
    bare = printed(forks.python("script.py", cwd=tmp_path))
    assert bare[0] == "child ended 7\n0 subnormal\n"
    capture = ("capture", "-q", "--force", "-o", "run")
    assert printed(forks(*capture, "script.py", cwd=tmp_path)) == bare
    assert printed(forks(*capture, "--save-tensors", "*", "script.py", cwd=tmp_path)) == bare
