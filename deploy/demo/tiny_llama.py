"""The demo's model and tokenizer: a Llama of one million parameters that reads characters."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from penstock.common.files.modes import share

CONTEXT_TOKENS = 64

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_CHARACTERS = "0123456789+-="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a new tokenizer of single characters, digits and +-=; encoding adds no special token.

    Its 17 tokens are these 13 and <pad>, <bos>, <eos>, <unk>; any other character becomes <unk>.
    Example: `37+45=` becomes six tokens, and the two tokens of `82` decode to `82`.
    """
    tokens = [*_SPECIAL.values(), *_CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
        **_SPECIAL,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a new Llama with random weights in fp32, drawn from torch's global generator.

    Its vocabulary and special tokens are the tokenizer's. The head size of 32 is the smallest that
    vLLM's attention runs on a CPU.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configurations and tokenizer into `folder`, for `from_pretrained` and for vLLM.

    The files get the folder's rights. A missing folder is made. The generation configuration of `model`
    is replaced by one with the special tokens alone; progress bars of transformers are off from now on.
    """
    disable_progress_bar()
    model.generation_config = GenerationConfig(
        pad_token_id=model.config.pad_token_id,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share(folder)
