"""The policy in training: it takes batches, makes optimizer steps and exports weights."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.reading import parse_json, reading
from penstock.common.phases import Phases
from penstock.learner.algorithm.batch import Batch, TrainSequence
from penstock.learner.algorithm.entropy import EntropyControl, adapt, applied_coef, control_of
from penstock.learner.algorithm.loss import (
    LossOptions,
    LossTerms,
    LossTokens,
    aggregation_weights,
    high_entropy,
    policy_loss,
)
from penstock.learner.policy.collective import Form
from penstock.learner.policy.deepspeed_engine import DeepSpeedEngine, OptimizerStep, leave_process_group
from penstock.learner.policy.export import on_cpu, whole_state, write_model
from penstock.learner.policy.flops import FlopCounter
from penstock.learner.policy.lora import save_adapter, write_adapter
from penstock.learner.policy.memory import explaining_lack_of_memory
from penstock.learner.policy.model import load_policy
from penstock.learner.policy.optimizer import adamw_options, learning_rate
from penstock.learner.policy.packing import Row, build_row, moved, rows_of_ranks, token_counts
from penstock.learner.policy.processes import gather, rank, world_size
from penstock.learner.policy.reference import FrozenCopyReference, make_reference
from penstock.learner.policy.update import TokenRecord, Update

_ENTROPY = "entropy.json"
"""A checkpoint's file with the state of adaptive entropy."""


@dataclass(frozen=True, slots=True)
class FixedValues:
    """Values of tokens that are constant in an Update: a (T,) array per sequence, None if unused."""

    proximal: (
        list[np.ndarray] | None
    )  # log-probabilities under the policy before the Update; for the decoupled loss
    reference: list[np.ndarray] | None  # log-probabilities under the reference policy; for the KL term
    high_entropy: list[np.ndarray] | None  # bool: of top_entropy_quantile, before the Update


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The sequences of one optimizer step."""

    sequences: np.ndarray  # (S,): indices in the batch
    weights: np.ndarray  # (S,): the weight of each token of a sequence, see `aggregation_weights`
    first: bool  # whether it is the first optimizer step of its Update


class Policy:
    """A TrainablePolicy: a model under DeepSpeed and its reference. All ranks call a method together.

    Creating one loads the weights of the folder `start`, or if that is None of `model_folder`, whose
    model is the reference. `steps` is the number of Updates of the run, over which the learning rate
    falls. Raise ConfigError if settings, model and machine do not fit. Joins the process group, which
    `close` leaves. `phases` records the time of an Update's parts.
    """

    def __init__(
        self, model_folder: Path, settings: LearnerSettings, steps: int, start: Path | None = None
    ) -> None:
        self.phases = Phases()
        self._settings, self._steps = settings, steps
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_folder, trust_remote_code=settings.trust_remote_code
        )
        module, self._adapter = load_policy(start or model_folder, settings)
        self._flops = FlopCounter(module.model)
        self._engine = DeepSpeedEngine(module, settings)
        self._reference = make_reference(model_folder, settings, self._engine, self._adapter)
        self._options = LossOptions.from_settings(settings)
        self._set_entropy(EntropyControl(settings.entropy_coef, None))

    @property
    def model(self) -> PreTrainedModel:
        """Return the Hugging Face model in training."""
        return self._engine.module.model

    def update(self, batch: Batch, step: int) -> Update:
        """Train on the batch: make all optimizer steps of Update `step` + 1, and return the Update.

        `step` counts the Updates made before. The reference and the optimizer are changed first if their
        schedules say so. The result depends only on weights, reference, optimizer state, coefficient of
        adaptive entropy, batch, step and settings: a replay repeats it. An optimizer step whose
        gradients are not finite is skipped; loss and grad_norm are means over the others, None if all
        were skipped. Raise ConfigError if the memory is not enough.
        """
        with explaining_lack_of_memory(batch.sequences, self._settings):
            return self._train(batch, step)

    def _train(self, batch: Batch, step: int) -> Update:
        """Make the optimizer steps of Update `step` + 1, as `update` describes; return the Update."""
        self._apply_schedules(step)
        rate = learning_rate(self._settings, step, self._steps)
        self._engine.set_optimizer_options(adamw_options(self._settings, rate))
        with self.phases.enter("scoring before the Update"):
            fixed = self._score_fixed(batch)
        packing = self._settings.packing
        passes = sum(part is not None for part in (fixed.proximal, fixed.reference, fixed.high_entropy))
        flops = passes * self._flops.forward(token_counts(batch.sequences, packing))
        steps: list[OptimizerStep] = []
        losses, records = [], []
        for mini in self._mini_batches(batch, step):
            loss, record = self._gradients(batch, mini, fixed)
            with self.phases.enter("making an optimizer step"):
                steps.append(self._engine.step())
            self._adapt_entropy(steps[-1], record)
            losses.append(loss)
            records.append(record)
            flops += self._flops.training(
                token_counts([batch.sequences[i] for i in mini.sequences], packing)
            )
        made = [number for number, done in enumerate(steps) if not done.skipped]
        return Update(
            loss=float(np.mean([losses[number] for number in made])) if made else None,
            grad_norm=float(np.mean([steps[number].grad_norm for number in made])) if made else None,
            learning_rate=rate, optimizer_steps=len(steps), skipped=len(steps) - len(made), flops=flops,
            tokens=TokenRecord.join(records),
            entropy_coef=self._entropy.coef if self._settings.use_adaptive_entropy else None,
        )  # fmt: skip

    def _adapt_entropy(self, step: OptimizerStep, record: TokenRecord) -> None:
        """Adapt the entropy coefficient to the mean entropy of `record`, an optimizer step's tokens.

        Do nothing without adaptive entropy, after a skipped `step`, and for a record without tokens.
        """
        if self._settings.use_adaptive_entropy and not step.skipped and len(record.entropy):
            self._set_entropy(adapt(self._entropy, float(record.entropy.mean()), self._settings))

    def _set_entropy(self, control: EntropyControl) -> None:
        """Store `control`, the state of adaptive entropy.

        With use_adaptive_entropy the loss uses the coefficient that `applied_coef` gives for `control`
        from now on. Otherwise the coefficient of the loss stays entropy_coef.
        """
        self._entropy = control
        if self._settings.use_adaptive_entropy:
            coef = applied_coef(control, self._settings)
            self._options = replace(self._options, entropy_coef=coef)

    def _apply_schedules(self, step: int) -> None:
        """If due after `step` Updates, mix the policy into a frozen reference, or copy it there.

        With sync_ref_model, ref_model_sync_steps 10 mixes at steps 10, 20, 30, with
        ref_model_mixup_alpha as the policy's part. outer_iteration_steps 10 copies then, and resets the
        optimizer, with or without a reference. If both are due, the copy counts. Nothing is due at 0.
        """
        settings, reference = self._settings, self._reference
        mixes = step and settings.sync_ref_model and step % settings.ref_model_sync_steps == 0
        restarts = step and settings.outer_iteration_steps and step % settings.outer_iteration_steps == 0
        if isinstance(reference, FrozenCopyReference) and (mixes or restarts):
            alpha = 1.0 if restarts else settings.ref_model_mixup_alpha
            reference.soft_update(self._engine.full_parameters(), alpha)
        if restarts:
            self._engine.reset_optimizer()

    def _score_fixed(self, batch: Batch) -> FixedValues:
        """Return the values of the batch's tokens that stay fixed in all steps of the Update.

        Each takes a forward pass, and is None if the settings do not use it. `proximal` is used with
        decoupled_loss and several optimizer steps, `reference` if there is a reference (beta is not 0),
        and `high_entropy` with top_entropy_quantile below 1.
        """
        sequences, settings, reference = batch.sequences, self._settings, self._reference
        # With a single optimizer step the proximal policy is the current one.
        several = settings.num_iterations * settings.num_mini_batches > 1
        return FixedValues(
            proximal=self.logprobs(sequences) if settings.decoupled_loss and several else None,
            reference=self._score(sequences, reference.logprobs) if reference else None,
            high_entropy=self._high_entropy(sequences) if settings.top_entropy_quantile < 1 else None,
        )

    def _high_entropy(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Return for each token, (T,) per sequence, whether its entropy is in the batch's highest.

        The share of these tokens is top_entropy_quantile. The entropies take a forward pass, without
        gradient.
        """
        with torch.no_grad():
            entropies = self._score(sequences, lambda row: self._engine(row)[1])
        masks = [sequence.mask for sequence in sequences]
        return high_entropy(entropies, masks, self._settings.top_entropy_quantile)

    def _mini_batches(self, batch: Batch, step: int) -> list[MiniBatch]:
        """Return the mini-batches of Update `step` + 1, one per optimizer step, in order.

        Each of num_iterations splits the batch's rollouts into num_mini_batches parts, at most one per
        rollout; 2 iterations of 3 parts give 6. They follow the batch's order, or with
        shuffle_mini_batch one drawn from seed, step and iteration. Only the first of all has `first`
        True. The sequences of a rollout stay together, and weigh as much as another's single one.
        """
        settings = self._settings
        minis: list[MiniBatch] = []
        rollout_S = batch.rollout_S
        lengths = np.bincount(rollout_S, [sequence.mask.sum() for sequence in batch.sequences])
        count, tokens = min(settings.num_mini_batches, len(lengths)), max(1, batch.trained_tokens)
        for iteration in range(settings.num_iterations):
            order = np.arange(len(lengths))
            if count > 1 and settings.shuffle_mini_batch:
                order = np.random.default_rng([settings.seed, step, iteration]).permutation(order)
            for chosen in np.array_split(order, count):
                weights = aggregation_weights(
                    lengths[chosen], loss_type=settings.loss_type, batch_tokens=tokens,
                    mini_batches=count, max_completion_length=settings.max_completion_length,
                )  # fmt: skip
                parts = [np.flatnonzero(rollout_S == rollout) for rollout in chosen]
                of_S = np.repeat(weights, [len(part) for part in parts])
                minis.append(MiniBatch(np.concatenate(parts), of_S, first=not minis))
        return minis

    def _gradients(self, batch: Batch, mini: MiniBatch, fixed: FixedValues) -> tuple[float, TokenRecord]:
        """Add up a mini-batch's gradients, row by row; return its loss and trained tokens, of all ranks.

        The loss is the sum over rows. `fixed` has values of the batch's tokens. No weight changes here.
        """
        sequences = [batch.sequences[index] for index in mini.sequences]
        rows = self._rows_of_this_rank(sequences)
        results: list[tuple[Tensor, Tensor]] = []
        for number, members in enumerate(rows, 1):
            # An empty row computes a sequence at weight 0: other ranks wait for its gradient exchange.
            chosen, weights = (members, mini.weights[members]) if members else ([0], np.zeros(1))
            with self.phases.enter("running forward"):
                row = build_row([sequences[index] for index in chosen], self._engine.device)
                tokens = self._loss_tokens(row, weights, mini.sequences[chosen], fixed)
                terms = policy_loss(tokens, self._options)
            with self.phases.enter("running backward"):
                self._engine.accumulate(terms.loss, last=number == len(rows))
            if members:
                results.append((terms.loss.detach(), _token_values(row, tokens, terms, mini.first)))
        # Only now, so that a GPU need not wait for the next row.
        own = [(loss.item(), _token_record(values_KN.cpu().numpy())) for loss, values_KN in results]
        of_rows = [of_row for of_rank in gather(own) for of_row in of_rank]
        return sum(loss for loss, _ in of_rows), TokenRecord.join([record for _, record in of_rows])

    def _rows_of_this_rank(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        """Return this rank's rows, each as indices of `sequences`. Without packing a row has one.

        A row has at most micro_batch_tokens, unless one sequence is longer. Sequences with the same
        prompt are put into one row, as far as they fit. All ranks get the same number of rows, so that a
        row may be empty.
        """
        budget = self._settings.micro_batch_tokens if self._settings.packing else 1
        return rows_of_ranks(sequences, budget, world_size())[rank()]

    def _loss_tokens(
        self, row: Row, weights: np.ndarray, indices: np.ndarray, fixed: FixedValues
    ) -> LossTokens:
        """Return the row's tokens for the loss, after a forward pass with gradient.

        `weights` has a token's weight per sequence of the row, `indices` the sequences' places in batch
        and `fixed`. old_N: the behaviour's log-probabilities, or with decoupled_loss the proximal's.
        """
        logprobs_N, entropy_N = self._engine(row)
        proximal = fixed.proximal  # None: the proximal policy is the current one
        proximal_N = _values_of_row(proximal, indices, row) if proximal else logprobs_N.detach()
        old_N = proximal_N if self._settings.decoupled_loss else row.behaviour_N
        return LossTokens(
            logprobs_N=logprobs_N, entropy_N=entropy_N, old_N=old_N, behaviour_N=row.behaviour_N,
            reference_N=_values_of_row(fixed.reference, indices, row) if fixed.reference else None,
            weight_N=moved(torch.as_tensor(weights).float(), row.mask_N.device)[row.sequence_N],
            advantages_N=row.advantages_N, mask_N=row.mask_N, sequence_N=row.sequence_N,
            high_entropy_N=_values_of_row(fixed.high_entropy, indices, row) > 0
            if fixed.high_entropy else None, sequences=row.sequences,
        )  # fmt: skip

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Return the log-probabilities of each sequence's completion, (T,), in the order of `sequences`.

        They are after temperature, in nats, without gradient. All ranks call together, and get all.
        """
        with torch.no_grad():
            return self._score(sequences, lambda row: self._engine(row)[0])

    def score(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of each text's tokens (L,) after the first, (L - 1,), in nats.

        They are at temperature 1. All ranks call together, and get all.
        """
        return self.logprobs([_as_sequence(text) for text in texts]) if texts else []

    def _score(
        self, sequences: Sequence[TrainSequence], score: Callable[[Row], Tensor]
    ) -> list[np.ndarray]:
        """Return the values of each sequence's completion, (T,) each, in the order of `sequences`.

        `score` gives a row's values, (N,). All ranks call together, and get all values.
        """
        found: dict[int, np.ndarray] = {}
        for members in self._rows_of_this_rank(sequences):
            chosen = members or [0]  # a rank with an empty row takes part in the collective forward
            values_N = score(build_row([sequences[index] for index in chosen], self._engine.device))
            lengths = [len(sequences[index].token_ids) for index in chosen]
            parts = np.split(values_N.cpu().numpy(), np.cumsum(lengths)[:-1])
            found |= dict(zip(members, parts, strict=False))
        scored = {index: part for of_rank in gather(found) for index, part in of_rank.items()}
        return [scored[index] for index in range(len(sequences))]

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, adaptive entropy's state, and a changed reference, for `load`.

        `folder` exists. All ranks call together; the call returns once every rank has written its part.
        """
        self._engine.save(folder)
        if self._settings.use_adaptive_entropy and rank() == 0:
            (folder / _ENTROPY).write_text(json.dumps(asdict(self._entropy)))
        if isinstance(self._reference, FrozenCopyReference) and rank() == 0:
            self._reference.save(folder)
        gather(None)  # return on rank 0 only after every rank has written its part

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote into the folder, exactly. All ranks call together.

        Without a file of the adaptive entropy or the reference, these stay. Raise ConfigError for a
        damaged file of the entropy, and if a LoRA adapter was trained with another base model.
        """
        before = self._frozen_sums()
        self._engine.load(folder)
        if self._frozen_sums() != before:
            raise ConfigError(
                f"the adapter in {folder} was trained with other weights than those in LEARNER_MODEL, "
                "to which actors would add it: set LEARNER_MODEL back, or start a new run"
            )
        if (folder / _ENTROPY).is_file():
            with reading(folder / _ENTROPY, "Resume from another checkpoint"):
                self._set_entropy(control_of(parse_json((folder / _ENTROPY).read_bytes())))
        if isinstance(self._reference, FrozenCopyReference):
            self._reference.load(folder)

    def _frozen_sums(self) -> dict[str, float]:
        """Return, with LoRA, the sum of each weight that is not trained. All ranks call together."""
        every = self._engine.full_parameters() if self._adapter is not None else ()
        return {
            name: weight.detach().float().sum().item()
            for name, weight in every
            if not weight.requires_grad
        }

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        """Write the weights as a Hugging Face model, with tokenizer. All ranks call together.

        Rank 0 writes. Files have up to LEARNER_MAX_SHARD_SIZE. With LoRA the adapter is merged, and a
        checkpoint has it alone in folder/adapter too; the form "adapter" is this adapter and nothing
        else. Raise NotFinite on every rank, and write nothing, if a weight is NaN or infinite.
        """
        state = whole_state(self._engine, trained=form == "adapter")
        if rank() != 0:
            return
        if form == "adapter" and self._adapter is not None:
            return write_adapter(self._adapter, on_cpu(state), folder)
        write_model(folder, self.model, self._tokenizer, state, self._settings)
        if form == "checkpoint" and self._adapter is not None:
            save_adapter(self._adapter, on_cpu(state), folder / "adapter")

    def offload(self) -> None:
        """Move all that is on the device to the CPU's memory, until `reload`. All ranks call together.

        A reference on LEARNER_REF_DEVICE stays there.
        """
        if isinstance(self._reference, FrozenCopyReference) and not self._settings.ref_device:
            self._reference.move_to(torch.device("cpu"))
        self._engine.offload()

    def reload(self) -> None:
        """Move back to the device, unchanged, what `offload` moved away. All ranks call together."""
        self._engine.reload()
        if isinstance(self._reference, FrozenCopyReference) and not self._settings.ref_device:
            self._reference.move_to(self._engine.device)

    def close(self) -> None:
        """Leave the process group. Call this at the end, on all ranks."""
        leave_process_group()


def _as_sequence(text: np.ndarray) -> TrainSequence:
    """Return a text (L,) as a sequence to be scored: its prompt is the first token."""
    zeros = np.zeros(len(text) - 1, dtype=np.float32)
    return TrainSequence(
        prompt_ids=text[:1], token_ids=text[1:], behaviour=zeros, mask=zeros == 0,
        staleness=zeros.astype(np.int64), advantage=0.0, temperature=1.0,
    )  # fmt: skip


def _values_of_row(per_sequence: list[np.ndarray], indices: np.ndarray, row: Row) -> Tensor:
    """Return the values of the row's tokens, (N,), as fp32 on the row's device. True becomes 1.

    `per_sequence` has an array (T,) per sequence of the batch; `indices` are the row's sequences in it.
    """
    values = np.concatenate([per_sequence[index] for index in indices])
    return moved(torch.as_tensor(values, dtype=torch.float32), row.input_ids.device)


def _token_values(row: Row, tokens: LossTokens, terms: LossTerms, first: bool) -> Tensor:
    """Return what `_token_record` needs of each token of the row, (12, N), as float64 on its device.

    `tokens` and `terms` are the input and result of the row's loss. `first` says whether this is the
    first optimizer step of its Update, and is stored for each token.
    """
    oldest_S = row.staleness_N.new_zeros(row.sequences)
    oldest_S = oldest_S.scatter_reduce(0, row.sequence_N, row.staleness_N, "amax")
    values = (
        row.mask_N, tokens.logprobs_N.detach(), tokens.behaviour_N, terms.ratio_N,
        tokens.entropy_N.detach(), terms.kl_N, terms.clipped_low_N, terms.clipped_high_N,
        terms.bounded_N, row.staleness_N, oldest_S[row.sequence_N], torch.full_like(row.mask_N, first),
    )  # fmt: skip
    return torch.stack([value.to(torch.float64) for value in values])


def _token_record(values_KN: np.ndarray) -> TokenRecord:
    """Return the record of the trained tokens; `values_KN` as `_token_values` returns them."""
    return TokenRecord(*values_KN[1:, values_KN[0] > 0])
