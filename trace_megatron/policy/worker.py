"""The policy as one object over all trainer ranks: rank 0 drives, the others repeat what it calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from trace_megatron.algorithm.pack import with_old_logprobs
from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.memfd import share
from trace_megatron.policy import checkpoint, parallel, shared_weights
from trace_megatron.policy.broadcast import Command, receive_command, send_command
from trace_megatron.policy.flops import attention_blocks, model_flops, peak_memory_bytes, peak_tflops
from trace_megatron.policy.forward import EdgeForward
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.hf_weights import export_hf, hf_tensor_infos, iter_hf_weights, load_hf_weights
from trace_megatron.policy.model import DTYPES, build_model
from trace_megatron.policy.trainer import Trainer, Update, pack_logprobs
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo, TrainStats, TreeBatch

MicroBatches = Sequence[Sequence[TreeBatch]]
"""[data_parallel][the same number of packs on every replica]."""


Repeat = Callable[[Mapping[str, Any], Sequence[torch.Tensor]], None]
"""What the other ranks do with a call of another part: (JSON values, tensors)."""


@dataclass(frozen=True, slots=True)
class SharedRanks:
    """The trainer ranks for another part's use, between the policy's own calls."""

    rank: int
    size: int
    command_group: dist.ProcessGroup

    def send(self, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """From the driver to what ``Policy.serve`` was given on every other rank."""
        send_command(Command("repeat", arguments, tensors=tensors), self.command_group)

    def add(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks, on all of them."""
        dist.all_reduce(tensor)


class Policy:
    """Built on every rank, with the same arguments. Then rank 0 calls the methods, and the others call ``serve``.

    Under ``with`` the other ranks are told to stop at the end, whatever happened.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        *,
        temperature: float = 1.0,
        total_steps: int = 1,
        seed: int = 0,
    ):
        """Raises UserError for a model folder, a layout or a number of processes that do not fit."""
        self._config, self._loss = policy, loss
        self._hf = read_hf_config(policy.model)
        self._ranks = parallel.initialize(policy, seed)
        self._forward = EdgeForward(temperature, self._hf.vocab_size, self._ranks.device)
        model = build_model(self._hf, policy)
        if self._ranks.device.type == "cpu":
            share(parameter for chunk in model for parameter in chunk.parameters())
        load_hf_weights(model, policy.model, self._hf)
        self._reference = None
        if loss.kl_coef:
            self._load_reference(loss.reference_model or policy.model)
        self._gathering: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._save: checkpoint.Save | None = None
        self._trainer = Trainer(model, self._forward, optimizer, loss, total_steps, self._ranks)
        self._places = shared_weights.find_places(model)
        self._shared = shared_weights.connect(model, self._places, self._hf, self._ranks.command_group)

    @property
    def is_driver(self) -> bool:
        """True on rank 0, which calls the methods below; the other ranks call ``serve``."""
        return self._ranks.is_driver

    @property
    def data_parallel_size(self) -> int:
        return self._ranks.data_size

    @property
    def shared_ranks(self) -> SharedRanks:
        """All trainer ranks, for a part that computes on them too."""
        return SharedRanks(self._ranks.rank, self._ranks.world_size, self._ranks.command_group)

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resumed checkpoint included."""
        return self._trainer.step

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self.is_driver:
            return
        try:
            self.stop()
        except RuntimeError:  # a rank is gone, and what the caller met says more about it
            if error is None:
                raise

    # What the driver calls.

    def train_step(self, micro_batches: MicroBatches) -> TrainStats:
        """One optimizer step; the packs' weights are normalised over the whole batch."""
        self._check(micro_batches)
        self._send(Command("train_step", micro_batches=micro_batches))
        start_s = time.perf_counter()
        update, peak_memory_gib = self._train_step(micro_batches)
        seconds = time.perf_counter() - start_s
        real = [batch for row in micro_batches for batch in row if batch.num_unpacked_tokens]
        num_tokens = sum(batch.num_tokens for batch in real)
        visited_blocks, dense_blocks = attention_blocks(real)
        return TrainStats(
            loss=update.sums.total("loss"),
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            clip_share=update.sums.mean("clipped"),
            ratio_mean=update.sums.mean("ratio"),
            ratio_tail=float(update.sums.tail),
            mismatch_kl=update.sums.mean("mismatch_kl"),
            reference_kl=update.sums.mean("reference_kl"),
            entropy=update.sums.mean("entropy"),
            num_tokens=num_tokens,
            num_unpacked_tokens=sum(batch.num_unpacked_tokens for batch in real),
            visited_blocks=visited_blocks,
            dense_blocks=dense_blocks,
            tokens_per_s=num_tokens / seconds,
            flop_utilisation=self._flop_utilisation(real, seconds),
            peak_memory_gib=peak_memory_gib,
        )

    def logprobs(self, micro_batches: MicroBatches) -> list[list[torch.Tensor]]:
        """[T] float32 per pack: logprob of every trained token at the sampling temperature, 0 elsewhere."""
        self._check(micro_batches)
        self._send(Command("logprobs", micro_batches=micro_batches))
        return self._logprobs(micro_batches)

    def reference_logprobs(self, micro_batches: MicroBatches) -> list[list[torch.Tensor]]:
        """As ``logprobs``, of the frozen reference model. Raises ValueError unless ``loss.kl_coef`` asked for one."""
        if self._reference is None:
            raise ValueError("expected a reference model, found none: it is loaded where loss.kl_coef is not 0")
        self._check(micro_batches)
        self._send(Command("reference_logprobs", micro_batches=micro_batches))
        return self._reference_logprobs(micro_batches)

    def prepare(self, micro_batches: MicroBatches) -> list[list[TreeBatch]]:
        """Fill in what the loss asks of the trainer: decoupled old logprobs, the reference's logprobs."""
        prepared = [list(row) for row in micro_batches]
        if self._loss.old_logprobs == "decoupled":
            old = self.logprobs(prepared)
            cap = self._loss.importance_cap
            prepared = [
                [with_old_logprobs(batch, values, cap) for batch, values in zip(*rows, strict=True)]
                for rows in zip(prepared, old, strict=True)
            ]
        if self._reference is not None:
            reference = self.reference_logprobs(prepared)
            prepared = [
                [replace(batch, reference_logprobs=values) for batch, values in zip(*rows, strict=True)]
                for rows in zip(prepared, reference, strict=True)
            ]
        return prepared

    def offload(self) -> None:
        """On all ranks, give up the memory that only training needs: gradients, and optimizer states to the host."""
        self._send(Command("offload"))
        self._trainer.offload()

    def onload(self) -> None:
        """On all ranks, take back what ``offload`` gave up."""
        self._send(Command("onload"))
        self._trainer.onload()

    def weights(self) -> tuple[list[TensorInfo], Iterator[tuple[str, torch.Tensor]]]:
        """Every HF tensor's metadata, and an iterator of (name, whole tensor) in the same order.

        The other ranks join when the first tensor is asked for. If the caller stops early, the rest is gathered before
        the next call. A tensor may share memory with the model: copy what outlives the next step.
        """
        return hf_tensor_infos(self._hf, DTYPES[self._config.dtype]), self._iter_weights()

    def weights_in_place(self) -> tuple[list[TensorInfo], Iterator[tuple[str, torch.Tensor | SplitTensor]]]:
        """As ``weights``, but of tensors that this rank can read where they are kept, whichever rank keeps them, the
        parts, uncopied: what they hold is right until the next step."""
        infos, tensors = self.weights()
        return infos, tensors if self._shared is None else self._iter_in_place()

    def start_checkpoint(self, folder: str | Path) -> None:
        """Copy weights, optimizer state and step, to be written into ``folder`` while the caller goes on.

        Raises UserError if it exists. ``finish_checkpoint`` comes before the next one.
        """
        _refuse_existing(folder)
        self._send(Command("start_checkpoint", {"folder": str(folder)}))
        self._start_checkpoint(folder)

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Let the folder of a checkpoint that was started appear, complete; False where it is not written yet.

        Without ``wait`` a rank that is still writing is not waited for.
        """
        if self._save is None:
            return True
        if not wait and not self._save.written.done():
            return False
        self._send(Command("finish_checkpoint", {"wait": wait}))
        return self._finish_checkpoint(wait)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from a checkpoint. Raises UserError, with nothing changed, for what cannot be read here."""
        checkpoint.check(folder, self._describe())
        self._send(Command("load_checkpoint", {"folder": str(folder)}))
        self._load_checkpoint(folder)

    def export_hf(self, folder: str | Path) -> None:
        """Write an HF folder that transformers and vLLM load. Raises UserError if it exists."""
        _refuse_existing(folder)
        self._send(Command("export_hf", {"folder": str(folder)}))
        self._export_hf(folder)

    def stop(self) -> None:
        """End ``serve`` on the other ranks."""
        self._send(Command("stop"))

    # What the other ranks do.

    def serve(self, repeat: Repeat | None = None) -> None:
        """Repeat the driver's calls until it says stop; ``repeat`` does what it sends through ``shared_ranks``."""
        while True:
            command = receive_command(self._ranks.command_group)
            match command.name:
                case "train_step":
                    self._train_step(command.micro_batches)
                case "logprobs":
                    self._logprobs(command.micro_batches)
                case "reference_logprobs":
                    self._reference_logprobs(command.micro_batches)
                case "weights":
                    for _ in iter_hf_weights(self._trainer.model_chunks, self._hf):
                        pass
                case "weights_in_place":
                    self._weights_stay()
                case "offload":
                    self._trainer.offload()
                case "onload":
                    self._trainer.onload()
                case "start_checkpoint":
                    self._start_checkpoint(command.arguments["folder"])
                case "finish_checkpoint":
                    self._finish_checkpoint(command.arguments["wait"])
                case "load_checkpoint":
                    self._load_checkpoint(command.arguments["folder"])
                case "export_hf":
                    self._export_hf(command.arguments["folder"])
                case "repeat" if repeat is not None:
                    repeat(command.arguments, command.tensors)
                case "stop":
                    return
                case name:
                    raise AssertionError(f"no such command: {name}")

    # What every rank does.

    def _send(self, command: Command) -> None:
        for _ in self._gathering:  # of a caller that stopped early; the other ranks are in it to its end
            pass
        send_command(command, self._ranks.command_group)

    def _train_step(self, micro_batches: MicroBatches) -> tuple[Update, list[float]]:
        """The update, and the peak memory of every rank in GiB."""
        update = self._trainer.train_step(micro_batches[self._ranks.data_rank])
        peaks = torch.zeros(self._ranks.world_size, dtype=torch.float64)
        peaks[self._ranks.rank] = peak_memory_bytes(self._ranks.device) / 2**30
        dist.all_reduce(peaks, group=self._ranks.command_group)
        return update, peaks.tolist()

    def _flop_utilisation(self, batches: Sequence[TreeBatch], seconds: float) -> float | None:
        peak = self._config.peak_tflops or peak_tflops(self._ranks.device)
        if not peak:
            return None
        return model_flops(self._hf, batches) / (seconds * self._ranks.world_size * peak * 1e12)

    def _logprobs(self, micro_batches: MicroBatches) -> list[list[torch.Tensor]]:
        return self._on_driver(micro_batches, self._trainer.logprobs(micro_batches[self._ranks.data_rank]))

    def _reference_logprobs(self, micro_batches: MicroBatches) -> list[list[torch.Tensor]]:
        mine = micro_batches[self._ranks.data_rank]
        return self._on_driver(micro_batches, pack_logprobs(self._reference, mine, self._forward))

    def _on_driver(self, micro_batches: MicroBatches, mine: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Bring every replica's [T] tensors to the driver: the ranks add their own into one long vector of zeros."""
        lengths = [[batch.num_tokens for batch in row] for row in micro_batches]
        rows = [torch.zeros(sum(row)) for row in lengths]
        if self._ranks.reports:
            rows[self._ranks.data_rank] = torch.cat(mine)
        everything = torch.cat(rows)
        dist.reduce(everything, dst=0, group=self._ranks.command_group)
        return [
            list(row.split(sizes)) for row, sizes in zip(everything.split([*map(sum, lengths)]), lengths, strict=True)
        ]

    def _iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._send(Command("weights"))
        self._gathering = iter_hf_weights(self._trainer.model_chunks, self._hf)
        for item in self._gathering:  # noqa: UP028, "yield from" would end it where the caller stops
            yield item

    def _iter_in_place(self) -> Iterator[tuple[str, torch.Tensor | SplitTensor]]:
        self._send(Command("weights_in_place"))
        yield from self._shared if self._weights_stay() else self._iter_weights()

    def _weights_stay(self) -> bool:
        """When every rank has ended its part of the last step: whether all parameters are where they were at first."""
        moved = torch.tensor(int(shared_weights.find_places(self._trainer.model_chunks) != self._places))
        dist.all_reduce(moved, group=self._ranks.command_group)
        return not moved

    def _start_checkpoint(self, folder: str | Path) -> None:
        self._save = checkpoint.start_save(folder, self._trainer, self._describe())

    def _finish_checkpoint(self, wait: bool) -> bool:
        finished = checkpoint.finish_save(self._save, wait, self._ranks.command_group)
        self._save = None if finished else self._save
        return finished

    def _load_checkpoint(self, folder: str | Path) -> None:
        checkpoint.load(folder, self._trainer)

    def _describe(self) -> dict[str, Any]:
        return checkpoint.describe(self._hf, self._config)

    def _export_hf(self, folder: str | Path) -> None:
        export_hf(self._trainer.model_chunks, self._hf, self._config.model, folder)

    def _load_reference(self, folder: str) -> None:
        hf = read_hf_config(folder)
        if hf.vocab_size != self._hf.vocab_size:
            raise UserError(
                f"expected a reference model with the policy's vocabulary of {self._hf.vocab_size}, found "
                f"{hf.vocab_size} in '{folder}': set loss.reference_model to a model of the same tokenizer"
            )
        self._reference = build_model(hf, self._config)
        load_hf_weights(self._reference, folder, hf)
        for chunk in self._reference:
            chunk.requires_grad_(False)

    def _check(self, micro_batches: MicroBatches) -> None:
        counts = [len(row) for row in micro_batches]
        if len(counts) != self.data_parallel_size or len(set(counts)) != 1 or counts[0] < 1:
            raise ValueError(
                f"expected {self.data_parallel_size} rows of equally many micro-batches, found rows of {counts}"
            )
        for batch in (batch for row in micro_batches for batch in row):
            if batch.num_tokens < 1 or bool((batch.predecessor[batch.weight > 0] < 0).any()):
                raise ValueError("expected packs of at least one token whose trained tokens have a predecessor")


def _refuse_existing(folder: str | Path) -> None:
    # Before the other ranks are told: an error that they all raised would end them.
    if Path(folder).exists():
        raise UserError(f"expected no folder at '{folder}', found one: remove it or choose another name")
