"""The plan of a run: model, data, contract and number of steps, made before anything starts."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.misplaced import misplaced_values
from penstock.common.errors import ConfigError
from penstock.common.files.disk import failure_of
from penstock.common.files.reading import absence
from penstock.common.log import get_logger
from penstock.common.own_code import split_source
from penstock.common.text import short
from penstock.common.transfer.hub import outage_of, was_answered
from penstock.common.transfer.model_folder import shared_files
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.reward_spec import split_kind
from penstock.learner.data.chat_formats import resolve_format
from penstock.learner.data.episode_specs import resolve_episodes
from penstock.learner.data.order import Question
from penstock.learner.data.probe import probe_texts
from penstock.learner.data.questions import load_questions
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.learner.data.templates import Template, is_chat
from penstock.learner.data.tickets import TicketSource

if TYPE_CHECKING:  # it takes seconds, which `penstock try-reward` need not wait
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

log = get_logger(__name__)

_ACCEPT = "accept the bias with LEARNER_ACCEPT_SAMPLING_BIAS=true"


@dataclass(frozen=True, slots=True)
class Plan:
    """The model to start from, the contract, the source of tickets; `steps` is the number of Updates.

    The log-probabilities of `probe_texts`, token ids (L,) each, are published with each version.
    """

    model_folder: Path
    vocab_size: int
    contract: Contract
    source: TicketSource
    steps: int
    reward_weights: dict[str, float]
    probe_texts: tuple[np.ndarray, ...] = ()


def make_plan(settings: LearnerSettings) -> Plan:
    """Return the plan that the settings describe: model folder, contract, questions, number of Updates.

    Models and data sets of the hub are downloaded. The user's own loss is imported here, own tools in a
    sandbox process. Log settings that mean something else in TRL. Raise ConfigError if the settings lack
    a data set or contradict each other or the model, or if model, template or the code of a reward, tool
    or loss is not found or usable. Raise DataError if a data set cannot be read, and ServerUnavailable
    as `resolve_model`.
    """
    _check_settings(settings)
    model_folder = _find_model(settings)
    tokenizer, config = read_model(model_folder, settings.trust_remote_code)
    check_length(settings, config)
    template = Template(settings, tokenizer)
    episodes = resolve_episodes(settings, template)
    questions, eval_questions = load_questions(settings, template, episodes)
    steps = count_steps(settings, len(questions))
    samples = [questions.at(place) for place in range(min(len(questions), 100) or 1)]
    columns = shared_columns([*(questions if len(questions) else samples), *eval_questions])
    form = completions_form(settings, tokenizer)
    adapter = _published_adapter(settings, config)
    contract = Contract(
        model=str(model_folder),
        tokenizer_hash=hash_tokenizer(model_folder),
        dtype=settings.dtype,
        tokens_per_sequence=settings.max_prompt_length + settings.max_completion_length,
        rewards=resolve_rewards(settings, {"columns": columns, "max_steps": steps, "completions": form}),
        filter_zero_std=settings.filter_zero_std,
        groups_per_step=settings.groups_per_step,
        credit=settings.credit,
        multi_objective_aggregation=settings.multi_objective_aggregation,
        episodes=episodes,
        chat=resolve_format(settings, template, model_folder, episodes),
        model_files=shared_files(model_folder, with_weights=adapter is not None),
        cast_lm_head_to_fp32=settings.cast_lm_head_to_fp32,
        share_device=settings.share_device,
        adapter=adapter,
        largest_group=settings.max_group_mib << 20,
    )
    return Plan(
        model_folder=model_folder,
        vocab_size=config.vocab_size,
        contract=contract,
        source=TicketSource(questions, eval_questions, settings, contract.hash),
        steps=steps,
        reward_weights=contract.reward_weights,
        probe_texts=probe_texts([one.prompt_ids for one in samples], contract.tokens_per_sequence),
    )


def _published_adapter(settings: LearnerSettings, config: "PreTrainedConfig") -> AdapterSpec | None:
    """Return what the contract says of LoRA adapters, None if whole weights are published.

    Raise ConfigError if the settings name layers that the model of this config has not, or its head.
    """
    if not settings.lora_rank or settings.lora_publish_merged:
        return None
    from penstock.learner.policy.lora import adapted_modules

    return AdapterSpec(settings.lora_rank, settings.lora_alpha, adapted_modules(config, settings))


def _check_settings(settings: LearnerSettings) -> None:
    """Log settings that mean something else in TRL, and import the user's own loss.

    Raise ConfigError for a biased sampling that is not accepted, or a loss that is not usable.
    """
    check_sampling(settings)
    for text in misplaced_values(settings):
        log.warning(text)
    if settings.loss:
        from penstock.learner.algorithm.own_loss import load_loss

        load_loss(settings.loss)


def _find_model(settings: LearnerSettings) -> Path:
    """Return the folder of the model, which is downloaded if it is on the hub.

    Raise ConfigError if no model is set or found, or no data set is set to train it on, and
    ServerUnavailable if the hub is away.
    """
    folder = resolve_model(settings.model, settings.trust_remote_code, settings.model_revision)
    if not (settings.dataset or settings.evaluate_only):
        raise ConfigError("LEARNER_DATASET is not set: name a file, a folder or a hub id in it")
    return folder


def shared_columns(questions: Sequence[Question]) -> list[str]:
    """Return the names of the columns that all of the questions have, in order."""
    return sorted(frozenset.intersection(*{frozenset(question.columns) for question in questions}))


def completions_form(settings: LearnerSettings, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the form in which the user's own rewards get completions: "auto", "text" or "messages".

    This is LEARNER_REWARD_COMPLETIONS, but "auto" becomes "messages" if a chat template makes the
    prompts (by settings and `tokenizer`). In this case log why, if a reward is a user's own function.
    """
    form = settings.reward_completions
    if form != "auto" or not is_chat(settings, tokenizer):
        return form
    if any(split_source(asked)[0] for asked in settings.rewards if not split_kind(asked)):
        log.info(
            "Own reward functions get messages as completions, as in TRL, because a chat template makes "
            "the prompts. LEARNER_REWARD_COMPLETIONS=text gives texts."
        )
    return "messages"


def check_sampling(settings: LearnerSettings) -> None:
    """Raise ConfigError if the sampling biases the importance ratio, unless accept_sampling_bias is set.

    top_p below 1, top_k and min_p above 0, and structured outputs leave tokens out: they are refused. A
    repetition_penalty other than 1 leaves none out, and the engine reports the log-probabilities after
    the penalty. It is refused unless decoupled_loss is true, importance_sampling_correction is not
    "off", and loss_type is not "dppo": with these three the loss corrects for the penalty, by the ratio
    to the sampler.
    """
    if settings.accept_sampling_bias:
        return
    _check_generation(settings)
    found = {
        f"LEARNER_TOP_P={settings.top_p}": settings.top_p < 1,
        f"LEARNER_TOP_K={settings.top_k}": settings.top_k > 0,
        f"LEARNER_MIN_P={settings.min_p}": settings.min_p > 0,
    }
    narrowed = ", ".join(text for text, narrows in found.items() if narrows)
    if narrowed:
        raise ConfigError(
            f"{narrowed}: the sampler then renormalises the log-probabilities over the kept tokens. "
            "The learner does not know these tokens, so the importance ratio is biased (its mean is "
            "about 0.90 at top_p 0.8). Sample from the full distribution (LEARNER_TOP_P=1, "
            f"LEARNER_TOP_K=0, LEARNER_MIN_P=0), or {_ACCEPT}"
        )


def _check_generation(settings: LearnerSettings) -> None:
    """Raise ConfigError for structured outputs, or a repetition_penalty that the loss does not correct.

    decoupled_loss with importance_sampling_correction not "off" and loss_type not "dppo" corrects it.
    """
    options = settings.sampling_options
    if options.keys() & {"regex", "choice"}:
        raise ConfigError(
            "LEARNER_GENERATION_KWARGS: structured_outputs renormalises the log-probabilities over the "
            "tokens that fit. The learner does not know these tokens, so the importance ratio is "
            f"biased. Leave it out and reward the form, or {_ACCEPT}"
        )
    off = settings.importance_sampling_correction == "off" or settings.loss_type == "dppo"
    if options.get("repetition_penalty", 1.0) != 1.0 and (off or not settings.decoupled_loss):
        raise ConfigError(
            "LEARNER_GENERATION_KWARGS: repetition_penalty changes the distribution that is sampled, so "
            "the loss would clip tokens that the policy did not change. Correct for it with "
            "LEARNER_DECOUPLED_LOSS=true, LEARNER_IMPORTANCE_SAMPLING_CORRECTION other than off and "
            f"LEARNER_LOSS_TYPE other than dppo, or {_ACCEPT}"
        )


def count_steps(settings: LearnerSettings, questions: int) -> int:
    """Return the number of Updates of a run whose epoch has `questions` questions.

    This is max_steps if it is not 0, else what num_train_epochs fill with groups_per_step, rounded up:
    10 questions, 2 epochs, 4 groups per step make 5. With evaluate_only it is 0.
    """
    exact = questions * settings.num_train_epochs / settings.groups_per_step
    by_epochs = math.ceil(round(exact, 9))  # 100 * 1.1 is 110.00000000000001
    return 0 if settings.evaluate_only else settings.max_steps or by_epochs


def resolve_model(name: str, trust_remote_code: bool = False, revision: str = "") -> Path:
    """Return the absolute path of the model folder `name`, or of the downloaded copy of this hub id.

    A folder's content is not looked at. What an earlier download left is used again. Python files are
    downloaded only with `trust_remote_code`. `revision` is a branch, tag or commit of the id, "" for its
    main branch. Raise ConfigError if the name is empty, if it is a folder and `revision` is not "", or
    if the download fails, for example because there is no such id, or because the hub does not answer
    and the name looks like a folder's; ServerUnavailable if it does not answer else, or is busy or
    broken: a restart may help; DiskFailed if the disk does.
    """
    if not name:
        raise ConfigError("LEARNER_MODEL is not set: name a Hugging Face model folder or a hub id")
    folder = Path(name)
    if os.path.isdir(folder):
        if revision:
            raise ConfigError(
                f"LEARNER_MODEL_REVISION={revision}: {name} is a folder here, which has no revisions, "
                "expected a hub id; leave the revision out"
            )
        return folder.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    patterns = ["*.json", "*.safetensors", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (HFValidationError, HTTPError, OSError) as error:
        away = outage_of(error, f"LEARNER_MODEL={name}")
        away = None if _may_be_path(name) and not was_answered(error) else away
        if failed := failure_of(error) or away:
            raise failed from error
        problem = f"{absence(folder)}; nor is it a model that can be downloaded"
        remedy = "Correct the name, or see whether the hub can be reached"
        raise ConfigError(f"LEARNER_MODEL={name}: {problem}: {error}. {remedy}") from error


def _may_be_path(name: str) -> bool:
    """Return whether a name that is no folder looks like one: a link, or in a folder that is here."""
    return os.path.islink(name) or os.path.isdir(os.path.dirname(name))


def read_model(
    folder: Path, trust_remote_code: bool = False
) -> "tuple[PreTrainedTokenizerBase, PreTrainedConfig]":
    """Return the tokenizer of a model folder, and the configuration of its language model.

    Code in the folder is run only with `trust_remote_code`. Raise ConfigError if config.json or
    tokenizer.json is missing or cannot be read, if no *.safetensors, the weights, is there, or if the
    folder needs its code and this is not trusted.
    """
    from transformers import AutoConfig, AutoTokenizer

    for name in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(path.is_file() for path in folder.glob(name)):
            expected = "expected a Hugging Face model folder: complete it, or name another one"
            raise ConfigError(f"LEARNER_MODEL={folder}: no {name} is there; {expected}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        ).get_text_config()
    except Exception as error:  # of files that others wrote: transformers and tokenizers raise any
        raise ConfigError(
            f"LEARNER_MODEL={folder}: cannot be read: {short(error, 500)}. Repair the folder, name "
            "another model, or, where it needs code of its own that you trust, set "
            "LEARNER_TRUST_REMOTE_CODE=true and ACTOR_TRUST_REMOTE_CODE=true"
        ) from error
    return tokenizer, config


def check_length(settings: LearnerSettings, config: "PreTrainedConfig") -> None:
    """Raise ConfigError if the longest prompt and completion together exceed the model's context.

    These are max_prompt_length and max_completion_length, in tokens. `config` is the model's; a model
    whose configuration states no max_position_embeddings takes any length.
    """
    wanted = settings.max_prompt_length + settings.max_completion_length
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"LEARNER_MAX_PROMPT_LENGTH ({settings.max_prompt_length}) + LEARNER_MAX_COMPLETION_LENGTH "
            f"({settings.max_completion_length}) is {wanted} tokens, but the model takes {limit}: "
            f"lower them to {limit} together, such as {limit // 2} each"
        )


def describe(settings: LearnerSettings, plan: Plan) -> dict[str, int | str]:
    """Return the figures of a plan that --dry-run prints, by title, in the order of the lines.

    These are the numbers of questions in an epoch (0: a stream), of held-out questions, of steps
    (Updates), and of groups and completions over all steps; the most tickets that are open at once
    (settings.credit), and the hash of the contract.
    """
    groups = plan.steps * settings.groups_per_step
    return {
        "questions": len(plan.source.questions),
        "held-out questions": len(plan.source.eval_questions),
        "steps": plan.steps,
        "groups": groups,
        "completions": groups * settings.num_generations,
        "tickets outstanding at most": settings.credit,
        "contract": plan.contract.hash,
    }
