"""Rewards for the form of a text: tags around reasoning and answer, repeated words, the language."""

import re
import unicodedata
from functools import cache
from typing import Any

from penstock.common.wire.reward_spec import LANGUAGES

_BLOCK = r"<{0}>(?:(?!</?(?:think|answer)>).)*</{0}>"
_THINK, _ANSWER = _BLOCK.format("think"), _BLOCK.format("answer")
_FORMAT = re.compile(rf"\s*{_THINK}\s*{_ANSWER}\s*", flags=re.DOTALL)
_STRICT = re.compile(_THINK + _ANSWER, flags=re.DOTALL)
_XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_FORMULAS = re.compile(r"\$[^$]*\$(?!\d)|\\\(.*?\\\)|\\\[.*?\\\]|\\[A-Za-z]+|</?\w+>", flags=re.DOTALL)
_LETTERS = re.compile(r"[^\W\d_]+")
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI")


def has_structure(completion: str) -> bool:
    """Return whether a text is <think>..</think><answer>..</answer> with only white space beside.

    Both parts may be empty, and have none of these four tags inside.
    """
    return _FORMAT.fullmatch(completion) is not None


def think_answer(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 where a completion is <think>..</think><answer>..</answer> and white space, else 0.0.

    Both parts may be empty. A part with one of these four tags in it gets 0.0. `prompts` and `columns`
    are ignored. Source: DeepSeek-R1 (arXiv:2501.12948). Example: "<think>2 + 2</think>
    <answer>4</answer>" gets 1.0.
    """
    return [float(has_structure(completion)) for completion in completions]


def strict_think_answer(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 where a completion is exactly <think>..</think><answer>..</answer>, else 0.0.

    Both parts may be empty, and have none of these four tags inside. `prompts` and `columns` are
    ignored.
    Example: "<think>2 + 2</think> <answer>4</answer>" gets 0.0, because of the space.
    """
    return [1.0 if _STRICT.fullmatch(completion) else 0.0 for completion in completions]


def xml_tags(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return for each completion 0.2 per tag in it: <reasoning>, </reasoning>, <answer>, </answer>.

    A tag that occurs twice counts once. `prompts` and `columns` are ignored.
    Example: "<answer>4</answer>" gets 0.4, and "4" gets 0.0.
    """
    return [round(0.2 * sum(tag in text for tag in _XML_TAGS), 1) for text in completions]


def repetition(
    prompts: list[Any],
    completions: list[str],
    repetition_n_grams: int = 3,
    repetition_max_penalty: float = -1.0,
    **columns: Any,
) -> list[float]:
    """Return (1 - distinct / all word n-grams) * repetition_max_penalty for each completion.

    n is repetition_n_grams, above 0. Fewer than n words give 0.0. Words are separated by white space and
    compared in lower case. `prompts` and `columns` are ignored. Source: arXiv:2502.03373. Example:
    "a a a a a" has three 3-grams, one of them distinct, and gets -2/3.
    """
    shares = [share_repeated(completion, repetition_n_grams) for completion in completions]
    return [share * repetition_max_penalty if share else 0.0 for share in shares]  # no -0.0


def share_repeated(text: str, n: int) -> float:
    """Return the share of a text's word n-grams that occurred before; 0.0 for fewer than n words.

    Words are separated by white space and compared in lower case. `n` is above 0. Example: "A b a b a"
    with n 2 gives 0.5.
    """
    words = text.lower().split()
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def language_consistency(
    prompts: list[Any], completions: list[str], target_language: str = "en", **columns: Any
) -> list[float]:
    """Return each completion's share of words in the target language's script; 0.0 without words.

    `target_language` is a key of LANGUAGES, such as "en". `prompts` and `columns` are ignored.
    DeepSeek-R1 (arXiv:2501.12948, section 2.3.2) rewards the proportion of target language words. Here a
    word's script decides: this separates Chinese from English, but not French from English. Formulas,
    LaTeX commands, tags and numbers are not words. In scripts without spaces each character is a word.
    Raise KeyError for a language that is not in LANGUAGES.
    Example: "Four is the answer, \u56db" gets 0.8 for "en".
    """
    targets = LANGUAGES[target_language]
    found = [word_scripts(completion) for completion in completions]
    return [sum(word in targets for word in words) / len(words) if words else 0.0 for words in found]


def word_scripts(text: str) -> list[str]:
    """Return the script of each word of a text, in order, such as "LATIN", by Unicode names of letters.

    Formulas, LaTeX commands, tags and numbers are no words. Where the script changes, a new word begins.
    In CJK, HIRAGANA, KATAKANA and THAI, each letter is a word.
    """
    found = []
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        end = text.rfind(closing) + 1
        text = text[:end] + text[end:].replace(opening, " ")  # else each costs a search of the rest
    for run in _LETTERS.findall(_FORMULAS.sub(" ", text)):
        previous = ""
        for script in map(_script, run):
            if script != previous or script in _WITHOUT_SPACES:
                found.append(script)
            previous = script
    return found


@cache
def _script(letter: str) -> str:
    """Return the first word of a letter's Unicode name, up to a hyphen: "LATIN" for "a".

    Without a name return "UNKNOWN".
    """
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]
