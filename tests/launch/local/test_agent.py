"""A run from start to end: output, exit codes, and what is left on the screen when a rank fails."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, Script


def test_every_line_is_prefixed_and_whole(launch: Launch, script: Script) -> None:
    name = script("for i in range(200): print('x' * 5000 + str(i)); print('err', i, file=sys.stderr)")
    result = launch(name)
    assert result.code == 0
    for rank in (0, 1):
        assert [line for line in result.out.splitlines() if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {'x' * 5000}{i}" for i in range(200)
        ]
        assert result.err.count(f"[rank {rank}] err ") == 200
    assert len(result.out.splitlines()) == 400


def test_ranks_find_the_environment_of_torch_distributed(launch: Launch, script: Script) -> None:
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    result = launch("--nproc", "3", script(f"print(*(os.environ[name] for name in {names}), sep=',')"))
    lines = sorted(result.out.splitlines())
    assert [line.split(",")[:4] for line in lines] == [
        [f"[rank {rank}] {rank}", "3", "3", "127.0.0.1"] for rank in range(3)
    ]
    assert all(int(line.split(",")[4]) >= 1 and line.endswith(",") for line in lines)


@pytest.mark.slow  # the ranks of test_nodes and of the examples do
def test_ranks_form_a_process_group(launch: Launch, script: Script) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""
    assert sorted(launch(script(body)).out.splitlines()) == ["[rank 0] 3.0", "[rank 1] 3.0"]


def test_arguments_arrive_unchanged(launch: Launch, script: Script) -> None:
    arguments = ["--", "--nproc", "a b", "", "$$x ${local_rank} $(id)", "new\nline", "'\"\\", "--", "-m"]
    result = launch(script("import json; print(json.dumps(sys.argv))"), *arguments)
    lines = result.out.splitlines()
    assert [json.loads(line.partition("] ")[2]) for line in lines] == [["train.py", *arguments]] * 2


def test_configuration_reaches_the_ranks(launch: Launch, script: Script, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"train_batch_size": 4}')
    name = script("print(os.environ['ZEROENGINE_CONFIG'], os.environ['ZEROENGINE_OVERRIDES'])")
    result = launch("--config", "zero.json", "--set", "zero_optimization.stage=3", name)
    assert f'[rank 1] {tmp_path}/zero.json ["zero_optimization.stage=3"]' in result.out.splitlines()


def test_the_first_failure_is_last_on_the_screen(launch: Launch, script: Script, tmp_path: Path) -> None:
    result = launch(script("if rank == 1:\n    raise ValueError('boom')\ntime.sleep(60)"))
    assert result.code == 1
    assert result.err.splitlines() == [
        "zero-launch: rank 1 failed (exit code 1)",
        "[rank 1] Traceback (most recent call last):",
        f'[rank 1]   File "{tmp_path}/train.py", line 4, in <module>',
        "[rank 1]     raise ValueError('boom')",
        "[rank 1] ValueError: boom",
    ]


def test_the_cause_is_named_and_not_its_consequence(launch: Launch, script: Script) -> None:
    """Rank 0 fails right after rank 1, and its process ends before rank 1's does."""
    body = """
if rank == 1:
    import atexit
    atexit.register(time.sleep, 0.5)
    atexit.register(open, "closed", "w")
    sys.exit(7)
while not os.path.exists("closed"): pass
raise ConnectionError("Connection closed by peer")
"""
    result = launch(script(body))
    assert result.code == 7
    assert result.err.splitlines()[-1] in (
        "zero-launch: rank 1 failed first (exit code 7)",
        "zero-launch: rank 1 failed (exit code 7)",
    )


def test_a_failure_in_a_process_group_reads_like_any_other(launch: Launch, script: Script) -> None:
    """torch's own excepthook would print it in the midst, with a prefix of its own."""
    body = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    result = launch(script(body + "if rank == 1: raise ValueError('boom')\ndist.barrier()"))
    assert result.err.count("Traceback") == 1
    assert result.err.splitlines()[-1] == "[rank 1] ValueError: boom"


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("sys.exit(3)", 3, "zero-launch: rank 1 failed (exit code 3)"),
        ("sys.exit('no data in data/')", 1, "[rank 1] no data in data/"),
        ("print('the reason', file=sys.stderr); os._exit(5)", 5, "[rank 1] the reason"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            "zero-launch: rank 1 failed (exit code 139: killed by SIGSEGV)",
            marks=pytest.mark.slow,
        ),
        ("raise KeyboardInterrupt", 130, "[rank 1] KeyboardInterrupt"),
        ("raise SystemError('a\\nb')", 1, "[rank 1] b"),
    ],
)
@pytest.mark.usefixtures("short_waits")
def test_exit_codes_are_passed_on(launch: Launch, script: Script, body: str, code: int, last: str) -> None:
    result = launch(script(f"if rank == 1:\n    {body}\ntime.sleep(60)"))
    assert result.code == code
    assert result.err.splitlines()[-1] == last


@pytest.mark.usefixtures("short_waits")
def test_the_report_of_a_killed_rank_ends_with_the_signal(launch: Launch, script: Script) -> None:
    body = "if rank == 0:\n    print('a notice', file=sys.stderr, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    lines = launch(script(f"{body}\ntime.sleep(60)")).err.splitlines()
    assert lines[-2] == "[rank 0] a notice"
    assert lines[-1].startswith("zero-launch: rank 0 failed (exit code 137: killed by SIGKILL, often because")


def test_after_a_sudden_death_the_others_are_heard(launch: Launch, script: Script) -> None:
    body = """
if rank == 1:
    open("gone", "w")
    os._exit(5)
while not os.path.exists("gone"): time.sleep(0.1)
time.sleep(1)
raise RuntimeError("rank 1 is gone at blocks.4")
"""
    result = launch(script(body))
    assert result.code == 5
    assert result.err.splitlines()[-2:] == [
        "zero-launch: rank 0 failed as well: RuntimeError: rank 1 is gone at blocks.4",
        "zero-launch: rank 1 failed first (exit code 5)",
    ]


def test_after_a_kill_the_others_are_ended_without_being_heard(launch: Launch, script: Script) -> None:
    body = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(4)
raise RuntimeError("rank 1 is gone at blocks.4")
"""
    result = launch(script(body))
    assert (result.code, "blocks.4" in result.err) == (137, False)


@pytest.mark.usefixtures("short_waits")
def test_a_rank_that_hangs_after_its_failure_is_ended(launch: Launch, script: Script) -> None:
    body = """
import threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(60,)).start()
if rank == 0: raise ValueError('boom')
"""
    result = launch(script(body))
    assert result.code == 1
    assert result.err.splitlines()[-1] == "[rank 0] ValueError: boom"


def test_restarts_begin_again(launch: Launch, script: Script) -> None:
    body = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < 2 and rank == attempt: raise ValueError(f"attempt {attempt}")
while attempt < 2: time.sleep(0.1)
print("attempt", attempt)
"""
    result = launch("--max-restarts", "2", script(body))
    assert result.code == 0 and sorted(result.out.splitlines()) == ["[rank 0] attempt 2", "[rank 1] attempt 2"]
    assert [line for line in result.err.splitlines() if "launch: restart" in line or "] ValueError" in line] == [
        "[rank 0] ValueError: attempt 0",
        "zero-launch: restart 1 of 2",
        "[rank 1] ValueError: attempt 1",
        "zero-launch: restart 2 of 2",
    ]


def test_the_store_of_a_run_on_one_machine_is_on_loopback_alone(launch: Launch, script: Script) -> None:
    body = """
port = f"{int(os.environ['MASTER_PORT']):04X}"
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
listening = {words[1] for words in lines if words[3] == "0A"}
print({address for address in listening if address.endswith(f":{port}")} == {f"0100007F:{port}"})
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for options in ([], ["--port", str(port)]):
        result = launch(*options, script(body))
        assert sorted(result.out.splitlines()) == ["[rank 0] True", "[rank 1] True"], result.err


def test_a_restart_uses_the_port_of_the_round_before(launch: Launch, script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    body = "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else print(os.environ['MASTER_PORT']))"
    result = launch("--port", str(port), "--max-restarts", "1", script(body))
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == [f"[rank 0] {port}", f"[rank 1] {port}"]


def test_zero_launch_knows_that_a_step_was_taken(launch: Launch, script: Script) -> None:
    body = """
import torch, zeroengine
from zeroengine.utils.launcher import STEP_FILE
path = os.environ[STEP_FILE]
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
engine = zeroengine.initialize(torch.nn.Linear(4, 4), config=config)
for _ in range(2):
    print(os.path.exists(path))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
"""
    result = launch("--nproc", "1", script(body))
    assert result.out.splitlines() == ["[rank 0] False", "[rank 0] True"], result.err


# Both ranks have printed before one fails.
LATE = """
print('out', rank)
open(f'out{rank}', 'w')
while not os.path.exists('out0'): time.sleep(0.01)
if rank: raise ValueError('boom')
"""


def test_log_dir_holds_a_file_per_rank(launch: Launch, script: Script, tmp_path: Path) -> None:
    result = launch("--log-dir", "logs/new", script(LATE))
    assert result.code == 1
    assert (tmp_path / "logs/new/rank0.log").read_text() == "out 0\n"
    log = (tmp_path / "logs/new/rank1.log").read_text()
    assert log.startswith("out 1\n") and log.endswith("ValueError: boom\n")
