"""One of two ranks that save a drafter together: `python two_ranks.py FOLDER WEIGHTS.safetensors RANK`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

folder, weights, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = {
    # by columns as well, as tensor parallel layers are; every other one by rows, as FSDP does
    name: distribute_tensor(weight, mesh, [Shard(1 if name.endswith("o_proj.weight") else 0)])
    for name, weight in load_file(weights).items()
}
moments = {name: {"exp_avg": torch.zeros_like(weight)} for name, weight in model.items()}
dcp.save({"model": model, "optimizer": {"state": moments}, "step": 40}, checkpoint_id=f"{folder}/step_40")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # threads of gloo that are still there can abort an ordinary exit
