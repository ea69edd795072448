#!/usr/bin/env bash
# The backward of torch.distributed.nn.functional.all_gather fails in a group of some of the ranks.
#
# Version: torch 2.13.0, on the CPU, Gloo, four ranks in the groups [0, 2] and [1, 3].
# Expected: the gradient of each rank's tensor is the sum over its group, as in the group of all ranks.
# Seen: all four ranks get "ValueError: Global rank 1 (or 0) is not part of group": the backward numbers the ranks of the
# group from 0, and takes these for global ranks. In the group [0, 1] of two ranks the numbers are right by chance.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/finding.py" <<'PYTHON'
import warnings

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
x = torch.ones(2, requires_grad=True)
try:
    torch.cat(all_gather(x, groups[rank % 2])).sum().backward()
    seen = x.grad.tolist()
except ValueError as error:
    seen = str(error).partition(" <")[0]
found = [None] * 4
dist.all_gather_object(found, seen)
if rank == 0:
    print(found)
    refused = [f"Global rank {number} is not part of group" for number in (1, 0)]
    print("as before" if found == refused * 2 else "changed")
dist.destroy_process_group()
PYTHON
cd "$folder"
"$folder/env/bin/python" -m torch.distributed.run --standalone --nproc_per_node 4 finding.py 2>"$folder/log" | tee "$folder/out"
grep -q "^as before" "$folder/out"
