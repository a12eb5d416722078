"""Programs in the kernel: what they observe of NCCL, CUDA and the scheduler, and how their records are read."""
