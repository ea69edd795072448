"""Options of torchrun, deepspeed and accelerate launch, and what to write for zero-launch instead."""

from __future__ import annotations

# The advice by options, which have hyphens for underscores here and stand without their leading hyphens; "{}" is the
# value. Options of which zero-launch has one of the same name are missing.
_ADVICE = {
    "nproc-per-node num-gpus num-accelerators": "write --nproc {}",
    "num-processes": "write --nproc {}, and count the processes of one node, not of all nodes",
    "num-nodes num-machines": "write --nnodes {}, and --hostfile FILE with their names",
    "min-elastic-nodes max-elastic-nodes": "write --nnodes MIN:MAX",
    "elastic-training": "leave it out: a run with --nnodes MIN:MAX is elastic",
    "node-rank machine-rank": "leave it out: zero-launch is started once, on one node, and reaches the others of its "
    "--hostfile over ssh",
    "main-process-ip local-addr": "write --master-addr {}",
    "main-process-port": "write --port {}",
    "rdzv-endpoint": "leave it out: zero-launch opens the store on the first node; --master-addr and --port say where",
    "rdzv-backend rdzv-id rdzv-conf standalone same-network": "leave it out: zero-launch brings the ranks together "
    "itself, and every run has a store of its own",
    "H deepspeed-hostfile mpirun-hostfile": "write --hostfile {}",
    "i deepspeed-inclusion-filter": "write --include {}",
    "e deepspeed-exclusion-filter": "write --exclude {}",
    "launcher-args": "write --ssh 'ssh {}'",
    # Options of earlier versions of zero-launch.
    "submit sbatch": "write a batch script and submit it with sbatch: docs/launch/slurm.md has one",
    "deepspeed-multinode-launcher": "write --launcher ssh, slurm, mpi, k8s or ray",
    "ssh-port": "write --ssh 'ssh -p {}'",
    "no-ssh": "write --launcher slurm, mpi, k8s or ray, whichever starts the nodes",
    "no-ssh-check": "leave it out: all hosts are checked at the same time, which takes seconds",
    "force-multi": "leave it out: a hostfile with one host is enough",
    "venv-script": "leave it out: the nodes run the same Python as this one, with its virtual environment",
    "no-python run-path": "leave it out: zero-launch starts Python scripts, and modules with -m",
    "no-local-rank": "leave it out: no --local_rank is passed; a rank reads the variable LOCAL_RANK",
    "virtual-local-rank": "leave it out: a rank finds its device by LOCAL_RANK",
    "r redirects enable-each-rank-log": "write --log-dir DIR, which has a file for each rank",
    "t tee local-ranks-filter log-line-prefix-template duplicate-stdout-filters duplicate-stderr-filters": "leave it "
    "out: the output of every rank is shown with its number, and --log-dir DIR also writes it to files",
    "print-completion": "leave it out: zero-launch --help lists the options",
    "logs-specs event-log-handler save-pid monitor-interval role start-method shutdown-timeout signals-to-handle": (
        "leave it out: zero-launch watches the ranks itself, reports who failed first, and forwards signals"
    ),
    "q quiet log-level debug": "leave it out: zero-launch prints nothing of its own unless something fails",
    "bind-cores-to-rank bind-core-list enable-cpu-affinity numa-binding": "write --bind cores or --bind numa",
    "num-cpu-threads-per-process": "write --env OMP_NUM_THREADS={}",
    "gpu-ids": "set CUDA_VISIBLE_DEVICES={} before the command",
    "multi-gpu use-deepspeed use-fsdp use-megatron-lm use-parallelism-config": "leave it out: there is a process for "
    "each GPU, and the script calls zeroengine.initialize",
    "mixed-precision": "write --set {}.enabled=true",
    "deepspeed-config deepspeed-config-file": "write --config {}; DeepSpeed's keys are understood",
    "config-file": "leave it out: options of zero-launch stand on the command line; --config names a configuration",
    "zero-stage": "write --set zero_optimization.stage={}",
    "offload-optimizer-device": "write --set zero_optimization.offload_optimizer.device={}",
    "offload-optimizer-nvme-path": "write --set zero_optimization.offload_optimizer.nvme_path={}",
    "offload-param-device": "write --set zero_optimization.offload_param.device={}",
    "offload-param-nvme-path": "write --set zero_optimization.offload_param.nvme_path={}",
    "gradient-accumulation-steps": "write --set gradient_accumulation_steps={}",
    "gradient-clipping": "write --set gradient_clipping={}",
    "parallelism-config-tp-size": "write --set tensor_parallel.autotp_size={}",
    "parallelism-config-sp-size": "write --set sequence_parallel_size={}",
    "zero3-init-flag": "leave it out: zeroengine.meta_init() in the script builds a model without its memory",
    "zero3-save-16bit-model": "leave it out: engine.full_state_dict() gathers the weights at every stage",
    "autotuning": "leave it out: zero-plan compares stages, offloads and micro-batches",
    "tpu": "leave it out: there are GPUs and CPUs only",
    "downcast-bf16 main-training-function": "leave it out: it is for TPUs",
}
ADVICE = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
# Whole families of options, by what they begin with.
PREFIXES = {
    "fsdp-": "leave it out: --set zero_optimization.stage=N says what is partitioned",
    "dynamo-": "leave it out: call torch.compile in the script",
    "megatron-lm-": "leave it out: --set tensor_parallel.autotp_size=N splits layers, and there is no pipeline",
    "parallelism-config-": "leave it out: --set zero_optimization.stage=N says what is partitioned",
    "fp8-": "leave it out: there is no fp8",
    "tpu-": "leave it out: there are GPUs and CPUs only",
}
# Where one value of an option needs advice of its own; also for options whose name zero-launch has.
VALUES = {
    ("nproc-per-node", "gpu"): "write --nproc auto",
    ("nproc-per-node", "cpu"): "write --nproc N --cpu",
    ("mixed-precision", "no"): "leave it out: without bf16 or fp16 in the configuration the model keeps its dtype",
    ("mixed-precision", "fp8"): "leave it out: there is no fp8; write --set bf16.enabled=true",
    ("launcher", "pdsh"): "write --launcher ssh",
    **dict.fromkeys(
        [("launcher", name) for name in ("openmpi", "mpich", "impi", "mvapich")],
        "let mpirun start it: mpirun -n 8 zero-launch --launcher mpi train.py",
    ),
}
# Options without a value.
SWITCHES = {
    *"elastic-training standalone same-network no-ssh no-ssh-check force-multi no-python run-path submit".split(),
    "no-local-rank",
    *"virtual-local-rank save-pid q quiet debug bind-cores-to-rank enable-cpu-affinity multi-gpu use-deepspeed".split(),
    *"use-fsdp use-megatron-lm use-parallelism-config tpu downcast-bf16 tpu-use-sudo".split(),
    *"dynamo-use-dynamic dynamo-use-fullgraph dynamo-use-regional-compilation".split(),
}


def advice_of(name: str, value: str | None) -> str | None:
    """Return what to write instead of another launcher's option, or None if no launcher is known to have it.

    Args:
        name: The option with hyphens for underscores, without its leading hyphens, such as "nproc-per-node".
        value: Its value, or None where it has none.
    """
    by_prefix = next((advice for prefix, advice in PREFIXES.items() if name.startswith(prefix)), None)
    advice = VALUES.get((name, value or ""), ADVICE.get(name, by_prefix))
    return None if advice is None else advice.format(value if value is not None else "N")
