"""Tensors here are tiny: one thread per worker is faster than several that wait for each other."""

import torch

torch.set_num_threads(1)
