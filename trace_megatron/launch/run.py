"""`trace-megatron launch`: check, then print, run here or submit."""

from __future__ import annotations

from trace_megatron.config import Config
from trace_megatron.errors import UserError
from trace_megatron.launch.job import LaunchRequest, check_request
from trace_megatron.log import say


def launch_job(request: LaunchRequest, config: Config, *, follow: bool, only_print: bool) -> int:
    """Returns the exit code. Raises UserError for what cannot be launched."""
    check_request(request, config)
    nemo = _nemo()
    if only_print:
        for text in nemo.dry_run(request, config):
            print(text)
        return 0
    if request.executor == "local":
        return nemo.run_here(request, config)
    submitted = nemo.submit(request, config)
    for job_id, folder in zip(submitted.job_ids, submitted.folders, strict=True):
        say(f"job {job_id} submitted; its logs: {folder}/log-*_{job_id}_*.out")
    if not follow:
        return 0
    from trace_megatron.launch.follow import follow_jobs

    return follow_jobs(submitted.tunnel, submitted.job_ids, submitted.folders)


def _nemo():
    try:
        from trace_megatron.launch import nemo
    except ImportError as error:
        if error.name and error.name.split(".")[0].startswith("trace_megatron"):
            raise
        raise UserError(
            f"expected NeMo-Run for `launch`, found: {error}; it needs an environment of its own, which 'make "
            f"install-launch' makes (docs/launch.md): .venv-launch/bin/trace-megatron launch ..."
        ) from error
    return nemo
