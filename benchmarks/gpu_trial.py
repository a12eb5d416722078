"""The agent beside a real PyTorch job on real GPUs.

    python benchmarks/gpu_trial.py --seconds 60

Needs root, a GPU, PyTorch with NCCL in the interpreter that runs it, and `failslow-agent` on the path. One process per
GPU trains a small model; the agent looks at it meanwhile (`failslow-agent check`) and measures what that costs
(`failslow-agent bench`). It is not part of the tests, and has not been run on a machine with GPUs yet.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time

_SIZE = 4096
_LAYERS = 8
_JOB = "failslow-gpu-trial"


def train(seconds: float) -> None:
    """Train as one rank until the time is over."""
    import torch  # noqa: PLC0415 (not a dependency: it is there or the trial cannot be made)
    import torch.distributed as dist  # noqa: PLC0415

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    layers = [torch.nn.Linear(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(_LAYERS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    until_s, n_iterations = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        loss = model(torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        loss.item()
        n_iterations += 1
    print(f"rank {dist.get_rank()}: {n_iterations} iterations in {seconds:.0f} s")
    dist.destroy_process_group()


def main() -> int:
    """Start the job, look at it, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.seconds)
        return 0
    if importlib.util.find_spec("torch") is None:
        print("no PyTorch here: run this with the interpreter of a training environment", file=sys.stderr)
        return 2
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)  # noqa: S607
    n_gpus = len(listed.stdout.splitlines())
    if not n_gpus:
        print(f"no GPU here: nvidia-smi -L says {listed.stdout + listed.stderr!r}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n_gpus}", f"--rdzv-id={_JOB}"]
    command += [__file__, "--train", "--seconds", str(options.seconds)]
    with subprocess.Popen(command) as job:
        time.sleep(min(15.0, options.seconds / 3))  # until the communicators are made
        looked = subprocess.run(["failslow-agent", "check", "--seconds", "5"], check=False)  # noqa: S607
        subprocess.run(["failslow-agent", "bench"], check=False)  # noqa: S607
        return looked.returncode or job.wait()


if __name__ == "__main__":
    sys.exit(main())
