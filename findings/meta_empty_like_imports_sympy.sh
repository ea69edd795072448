#!/usr/bin/env bash
# The first torch.empty_like() or addition of a tensor on the meta device imports sympy: 0.3 seconds and 30 MiB or more.
#
# Version: torch 2.13.0, on the CPU.
# Expected: a tensor on the meta device has no values, so its shape is all that empty_like() needs. torch.empty() and
# torch.empty_strided() on that device, and empty_like() of a tensor with values, import nothing.
# Seen: some 480 modules of sympy and others are imported in the call, in each process. A program that makes its model on
# the meta device on every rank pays for that at its start. empty_strided() with the shape and the strides serves as well.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/finding.py" <<'PYTHON'
import sys
import time

import torch

made = torch.empty(4, 4, device="meta")
torch.empty_strided((4, 4), (4, 1), device="meta")
torch.empty_like(torch.ones(4, 4))
before, modules = "sympy" in sys.modules, len(sys.modules)
begin = time.perf_counter()
if sys.argv[1] == "empty_like":
    torch.empty_like(made)
else:
    made + 1
seconds = time.perf_counter() - begin
print(f"{sys.argv[1]}: {len(sys.modules) - modules} modules, {seconds:.2f} s", file=sys.stderr)
print(sys.argv[1], before, "sympy" in sys.modules)
PYTHON
for operation in empty_like addition; do
    "$folder/env/bin/python" "$folder/finding.py" "$operation"
done | tee "$folder/out"
[[ "$(cat "$folder/out")" == "$(printf '%s\n' "empty_like False True" "addition False True")" ]]
