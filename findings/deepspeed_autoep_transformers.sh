#!/usr/bin/env bash
# DeepSpeed's expert parallelism (AutoEP) takes no Mixtral of transformers 5.24, and takes one of transformers 5.20.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, two ranks.
# Expected: deepspeed.initialize() with "expert_parallel": {"enabled": true, "autoep_size": 2} splits the experts.
# Seen: with transformers 5.24.0 it raises "TypeError: _CanRecordRegistry.get() takes 2 positional arguments but 3 were
# given", since DeepSpeed takes a registry of transformers for a dict. With transformers 5.20.0 the model trains.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy
cat >"$folder/finding.py" <<'PYTHON'
import deepspeed
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "expert_parallel": {"enabled": True, "autoep_size": 2},
}
try:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(64, (1, 16))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    seen = "it trains"
except TypeError as error:
    seen = f"TypeError: {error}"
if dist.get_rank() == 0:
    print(seen, flush=True)
PYTHON
cd "$folder"
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for version in 5.24.0 5.20.0; do
    "$folder/env/bin/pip" install -q "transformers==$version"
    echo "transformers $version"
    "$folder/env/bin/python" -m torch.distributed.run --standalone --nproc_per_node 2 finding.py 2>"$folder/log" ||
        tail -n 5 "$folder/log" >&2
done | tee "$folder/out"
expected="$(printf '%s\n' "transformers 5.24.0" \
    "TypeError: _CanRecordRegistry.get() takes 2 positional arguments but 3 were given" \
    "transformers 5.20.0" "it trains")"
[[ "$(grep -E "^(transformers|TypeError|it trains)" "$folder/out")" == "$expected" ]]
