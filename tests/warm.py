"""Imported by the fork server alone: one run, so that its forks find everything loaded."""

import os
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot share a GPU, nor autograd's threads for it

import torch

import coterie

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    coterie.compare(
        {
            "data": {"name": "digits"},
            "partition": {"name": "concept_shift", "clients": 3, "groups": 2},
            "model": {"name": "linear"},
            "engine": {"name": "vmap", "chunk": 3},
            "run": {"rounds": 1, "methods": ["fedfomo"], "out": folder},
        }
    )
