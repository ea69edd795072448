"""Measures forwards of a model that is larger than its memory, beside accelerate's disk offload and DeepSpeed's.

    pip install .[bench] transformers accelerate
    python benchmarks/inference.py --folder /local_nvme --rounds 3
    python benchmarks/inference.py --folder /local_nvme --small
    python benchmarks/inference.py --folder /local_nvme --only plain-4bit zeroengine-4bit  # needs bitsandbytes

A Llama with random weights in bf16 is saved once as safetensors. Each engine loads it in a process of its own, and
generates and scores tokens with a quarter of the weights' bytes; the engines take turns. `plain` has all of them in
memory, and its logits are what the others are compared with.

Memory: each engine is configured for a quarter of the weights, and nothing ends one that takes more. `MiB` is the peak
of anonymous memory (RssAnon) in generation, above that after the forward of a tiny model; "!" marks more than a quarter
and 96 MiB. Pages of mapped files (RssFile), which the kernel can drop, are counted apart. A thread drops the weights'
files from the page cache all the time, because a machine whose memory is full keeps none of them. `of disk` is the rate
of the reads with batch 1 as a fraction of what the disk gives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.disk.probe import tune
from zeroengine.disk.queue import Descriptors, DiskQueue

ENGINES = ["plain", "zeroengine", "zeroengine-in-place", "zeroengine-cpu", "accelerate", "deepspeed"]
# TinyLlama's shape, and one that takes seconds.
SHAPES = {
    False: {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000},
    True: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4000},
}
DROP_SECONDS = 0.02
# Of the memory, what is for activations and what the heap keeps.
RESERVE = 96 << 20


# -- an engine's process ---------------------------------------------------------------------------


def status(key: str) -> int:
    """Return a value of /proc/self/status, in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(key + ":"))


class Watch:
    """Samples this process's memory, and drops files of weights from the page cache, until ``stop``."""

    def __init__(self, folders: list[Path]) -> None:
        self.start, self.peak_anon, self.peak_file = status("RssAnon"), 0, 0
        self._folders, self._fds, self._stopped = folders, dict[Path, int](), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        mapped = status("RssFile")
        while not self._stopped.wait(DROP_SECONDS):
            self.peak_anon = max(self.peak_anon, status("RssAnon") - self.start)
            self.peak_file = max(self.peak_file, status("RssFile") - mapped)
            for path in [path for folder in self._folders for path in folder.rglob("*") if path.is_file()]:
                if path not in self._fds:
                    self._fds[path] = os.open(path, os.O_RDONLY)
                os.posix_fadvise(self._fds[path], 0, 0, os.POSIX_FADV_DONTNEED)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def plain(folder: Path, scratch: Path, limit: int, largest: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def ours(
    folder: Path, scratch: Path, limit: int, largest: int, device: str = "nvme", *, in_place: bool = False
) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    import zeroengine

    config = AutoConfig.from_pretrained(folder)
    # What stays in memory, what is read ahead, and one unit in use are a quarter of the weights. "cpu" keeps all.
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    zero = {"stage": 3, "prefetch_bucket_size": largest // 2}
    if device == "nvme":
        ratio = 1 - max(limit - 2 * largest - RESERVE, 0) / whole
        place = {"device": "nvme", "nvme_path": str(scratch), "ratio": ratio, "in_place": in_place}
        zero["offload_param"] = place
    with zeroengine.meta_init(values=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    engine = zeroengine.initialize(model, {"zero_optimization": zero})
    engine.load_weights(folder)
    # The engine lives as long as the model is used.
    model.engine_of_benchmark = [engine]
    return model


def plain_quantized(folder: Path, scratch: Path, limit: int, largest: int, bits: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


def ours_quantized(folder: Path, scratch: Path, limit: int, largest: int, bits: int) -> torch.nn.Module:
    import zeroengine

    model = plain_quantized(folder, scratch, limit, largest, bits).requires_grad_(False)
    place = {"device": "nvme", "nvme_path": str(scratch)}
    zero = {"stage": 3, "prefetch_bucket_size": largest // 2, "offload_param": place}
    model.engine_of_benchmark = [zeroengine.initialize(model, {"zero_optimization": zero})]
    return model


def with_accelerate(folder: Path, scratch: Path, limit: int, largest: int) -> torch.nn.Module:
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    # Of this memory it sets the largest layer aside, for what comes from the disk.
    device_map = infer_auto_device_map(
        model, {"cpu": limit}, no_split_module_classes=["LlamaDecoderLayer"], dtype=torch.bfloat16
    )
    load_checkpoint_in_model(model, folder, device_map, offload_folder=scratch, dtype=torch.bfloat16)
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=scratch)


def with_deepspeed(folder: Path, scratch: Path, limit: int, largest: int) -> torch.nn.Module:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = AutoConfig.from_pretrained(folder)
    largest = config.hidden_size * max(config.vocab_size, config.intermediate_size)
    # Each parameter under way takes a buffer, whose size is the largest parameter's.
    offload = {
        "device": "nvme", "nvme_path": str(scratch), "pin_memory": False,
        "buffer_count": 5, "buffer_size": largest, "max_in_cpu": max(limit - 3 * largest, 0) // 2,
    }  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True, "single_submit": False},
        "zero_optimization": {
            "stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
        },
    }  # fmt: skip
    deepspeed.init_distributed("gloo")
    # from_pretrained then partitions the parameters while it loads them, as long as this object lives.
    keep = HfDeepSpeedConfig(settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    engine.module.engine_of_benchmark = [keep, engine]
    return engine.module


MAKERS: dict[str, Callable[..., torch.nn.Module]] = {
    "plain": plain,
    "zeroengine": ours,
    "zeroengine-in-place": lambda *args: ours(*args, in_place=True),
    "zeroengine-cpu": lambda *args: ours(*args, device="cpu"),
    "accelerate": with_accelerate,
    "deepspeed": with_deepspeed,
    "plain-8bit": partial(plain_quantized, bits=8),
    "zeroengine-8bit": partial(ours_quantized, bits=8),
    "plain-4bit": partial(plain_quantized, bits=4),
    "zeroengine-4bit": partial(ours_quantized, bits=4),
}
IMPORTS = dict.fromkeys((name for name in MAKERS if name.startswith("zeroengine")), "zeroengine")


def warm_up() -> None:
    """Import and allocate what a first forward of any model does, which counts as no engine's memory."""
    tiny = llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=64)
    tiny.generate(torch.zeros(1, 8, dtype=torch.long), max_new_tokens=2, do_sample=False, pad_token_id=0)


@contextlib.contextmanager
def seconds(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start


def child(args: argparse.Namespace) -> None:
    """Load the model with one engine, generate, score, and print the figures as JSON."""
    import transformers  # noqa: F401

    with contextlib.suppress(ImportError):
        __import__(IMPORTS.get(args.engine, args.engine))
    torch.set_num_threads(args.threads)
    warm_up()
    scratch = Path(tempfile.mkdtemp(dir=args.folder))
    nbytes = sum(path.stat().st_size for path in args.model.glob("*.safetensors"))
    times: dict[str, float] = {}
    try:
        watch = Watch([args.model, scratch])
        with seconds(times, "load"):
            model = MAKERS[args.engine](args.model, scratch, nbytes // 4, args.largest).eval()
        load_peak = watch.peak_anon
        torch.manual_seed(0)
        vocab = model.config.vocab_size
        watch.peak_anon = watch.peak_file = 0
        # Not inference_mode, in which torch multiplies the weights that accelerate makes far slower.
        with torch.no_grad():
            prompt = torch.randint(vocab, (16, 8))
            options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            model.generate(prompt[:1], max_new_tokens=2, **options)
            logits = model(prompt[:2]).logits
            read = read_bytes()
            for batch in (1, 16):
                with seconds(times, f"generate {batch}"):
                    model.generate(prompt[:batch], max_new_tokens=args.tokens, **options)
            read = (read_bytes() - read) / (2 * args.tokens)
            anon, file, watch.peak_anon = watch.peak_anon, watch.peak_file, 0
            rows, length = args.score
            text = torch.randint(vocab, (rows, length))
            with seconds(times, "score"):
                hidden = model.model(text)[0]
                for row, tokens in zip(hidden, text, strict=True):
                    torch.nn.functional.cross_entropy(model.lm_head(row[:-1]).float(), tokens[1:])
        watch.stop()
        torch.save(logits, args.logits)
        tokens = {"generate 1": args.tokens, "generate 16": 16 * args.tokens, "score": rows * length}
        figures = {name: count / times[name] for name, count in tokens.items()}
        print(
            json.dumps(
                {**figures, "load": times["load"], "anon": anon, "file": file, "score anon": watch.peak_anon,
                 "load anon": load_peak, "read": read, "weights": nbytes}
            )
        )  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    # What an engine does at the end of its process is no part of this.
    os._exit(0)


def read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    with open("/proc/self/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))


# -- the engines in turn ---------------------------------------------------------------------------


def save_model(folder: Path, small: bool) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8 if small else 32, "num_key_value_heads": 4}
    llama(**SHAPES[small], **heads).save_pretrained(folder)


def llama(**shape: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**shape, dtype="bfloat16")).to(torch.bfloat16)


class File:
    """A file that a queue can read."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = str(path), path.stat().st_size
        self.descriptors = Descriptors(os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT))


def disk_rate(path: Path) -> float:
    """Return the bytes a second of a sequential read of ``path`` past the page cache, two pieces at a time."""
    settings, file = tune(path.parent), File(path)
    piece = min(64 << 20, file.nbytes // 4096 * 4096)
    buffers, reads = [aligned_zeros(piece, torch.uint8) for _ in range(2)], deque[Any]()
    with DiskQueue(settings.queue_depth, settings.block_size, settings.backend) as queue:
        start = time.perf_counter()
        for index, offset in enumerate(range(0, file.nbytes - piece + 1, piece)):
            if len(reads) == 2:
                reads.popleft().wait_host()
            reads.append(queue.read(file, offset, buffers[index % 2]))
        while reads:
            reads.popleft().wait_host()
        return file.nbytes // piece * piece / (time.perf_counter() - start)


def measure(engine: str, args: argparse.Namespace, model: Path, logits: Path) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--engine", engine, "--model", str(model), "--logits", str(logits)]
    command += ["--folder", str(args.folder), "--tokens", str(args.tokens), "--score", *map(str, args.score)]
    command += ["--threads", str(args.threads), "--largest", str(args.largest)]
    env = {**os.environ, "DS_SKIP_CUDA_CHECK": "1", "DS_ACCELERATOR": "cpu"}
    if engine == "deepspeed":
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{engine} failed:\n{done.stdout[-500:]}\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--small", action="store_true", help="a model of 50 MB, in less than a minute")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="new tokens")
    parser.add_argument("--score", type=int, nargs=2, default=(32, 512), metavar=("ROWS", "TOKENS"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", choices=MAKERS, default=ENGINES, help="the engines")
    parser.add_argument("--model", type=Path, help="a saved model")
    for name in ("engine", "logits"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--largest", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        child(args)
        return
    shape: dict[str, Any] = SHAPES[args.small]
    hidden = shape["hidden_size"]
    args.largest = 2 * hidden * max(shape["vocab_size"], 3 * (hidden + shape["intermediate_size"]))
    args.score = (4, 64) if args.small else args.score
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        model = args.model or Path(temporary, "model")
        if not model.exists():
            save_model(model, args.small)
            os.sync()
        rates: list[float] = []
        results: dict[str, list[dict[str, float]]] = {engine: [] for engine in args.only}
        for _ in range(args.rounds):
            rates.append(disk_rate(max(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)))
            for engine in args.only:
                figures = measure(engine, args, model, Path(temporary, engine))
                if figures is not None:
                    results[engine].append(figures)
                    print(engine, json.dumps(figures), file=sys.stderr, flush=True)
        print_table(args, results, statistics.median(rates), Path(temporary))


def print_table(
    args: argparse.Namespace, results: dict[str, list[dict[str, float]]], rate: float, logits: Path
) -> None:
    names = ("generate 1", "generate 16", "score")
    described = describe_machine(("torch", "transformers", "accelerate", "deepspeed"))
    print(f"{described}; {args.threads} threads, {args.rounds} rounds, {args.tokens} tokens, scored {args.score}")
    print(f"disk {rate / 1e9:.2f} GB/s")
    titles = ("tokens/s: batch 1", "batch 16", "scoring", "MiB", "mapped", "MB/token", "of disk", "load s", "logits")
    print(f"{'engine':<20}" + "".join(f"{title:>{len(title) + 2}}" for title in titles))
    for engine, rows in results.items():
        if not rows:
            continue
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        share = middle["read"] / rate * middle["generate 1"]
        same = "-"
        if engine != "plain" and "plain" in results:
            expected, found = (torch.load(logits / name).float() for name in ("plain", engine))
            same = "equal" if torch.equal(expected, found) else f"{(expected - found).abs().max():.1e}"
        cells = [f"{middle[name]:.2f}" for name in names]
        over = "!" if middle["anon"] > middle["weights"] / 4 + RESERVE else ""
        cells += [f"{middle['anon'] / 2**20:.0f}{over}", f"{middle['file'] / 2**20:.0f}", f"{middle['read'] / 1e6:.0f}"]
        cells += [f"{share:.2f}", f"{middle['load']:.1f}", same]
        print(f"{engine:<20}" + "".join(f"{cell:>{len(t) + 2}}" for cell, t in zip(cells, titles, strict=True)))


if __name__ == "__main__":
    main()
