import signal
import subprocess
import sys
import time

from trace_megatron.launch.local import run_ranks

RANK_FAILS = "import os, sys, time; sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(60)"
MEET = """
import os, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["TRACE_RENDEZVOUS_FILE"],
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
"""


def test_the_first_failure_ends_all_ranks_and_its_code_is_returned():
    start = time.monotonic()
    assert run_ranks([sys.executable, "-c", RANK_FAILS], 3) == 2
    assert time.monotonic() - start < 30


def test_ranks_meet_through_the_file_and_a_clean_end_is_zero():
    assert run_ranks([sys.executable, "-c", MEET], 2) == 0


def test_a_terminated_launcher_takes_its_ranks_with_it(tmp_path):
    rank = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(60)"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from trace_megatron.launch.local import run_ranks; run_ranks({[sys.executable, '-c', rank]!r}, 2)",
        ]
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.terminate()
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM
    for path in tmp_path.iterdir():
        assert subprocess.run(["kill", "-0", path.name], capture_output=True).returncode != 0
