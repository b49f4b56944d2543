"""Print what jobs write, until Slurm has no more of them."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence

from nemo_run.core.tunnel.client import Tunnel

from trace_megatron.log import say

_POLL_S = 3.0


def follow_jobs(tunnel: Tunnel, job_ids: Sequence[str], folders: Sequence[str]) -> int:
    """Copy the jobs' logs to our output; returns 0 if the last one completed, else 1. Interrupting ends only this."""
    printed: dict[str, int] = {}
    states: dict[str, str] = {}
    try:
        while True:
            waiting = [job_id for job_id in job_ids if _is_waiting(tunnel, job_id, states)]
            for job_id, folder in zip(job_ids, folders, strict=True):
                _print_news(tunnel, f"{shlex.quote(folder)}/log-*_{job_id}_*.out", printed)
            if not waiting:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        say(f"the jobs go on without us; end them with: scancel {' '.join(job_ids)}")
        return 130
    return 0 if states[job_ids[-1]] == "COMPLETED" else 1


def _is_waiting(tunnel: Tunnel, job_id: str, states: dict[str, str]) -> bool:
    """Whether Slurm still has work for the job; notes its state. Slurm forgets a job some minutes after its end."""
    answer = tunnel.run(f"scontrol show job {job_id}", warn=True)
    if answer.failed:
        states.setdefault(job_id, "UNKNOWN")
        return False
    state = re.search(r"JobState=(\S+)", answer.stdout)[1]
    if state != states.get(job_id):
        say(f"job {job_id}: {state}")
    states[job_id] = state
    return state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")


def _print_news(tunnel: Tunnel, pattern: str, printed: dict[str, int]) -> None:
    for path in tunnel.run(f"ls -1 {pattern} 2> /dev/null", warn=True).stdout.split("\n"):
        if path:
            seen = printed.get(path, 0)
            news = tunnel.run(f"tail -c +{seen + 1} {shlex.quote(path)}", warn=True).stdout
            printed[path] = seen + len(news.encode())
            sys.stdout.write(news)
            sys.stdout.flush()
