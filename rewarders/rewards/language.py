"""The reward `language_consistency`: the share of words in the target language.

DeepSeek-R1 (arXiv:2501.12948, section 2.3.2) rewards the proportion of target language words in the
chain of thought. Here the script of a word decides: this separates Chinese from English, but not French
from English.
"""

import re
import unicodedata
from functools import cache
from typing import Any

from penstock.common.wire.reward_spec import LANGUAGES

_FORMULAS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[A-Za-z]+|</?\w+>", flags=re.DOTALL)
_LETTERS = re.compile(r"[^\W\d_]+")


def language_consistency(
    prompts: list[Any], completions: list[str], target_language: str = "en", **columns: Any
) -> list[float]:
    """Return the share of words, 0.0 to 1.0, in the target language's script; 0.0 without words.

    Formulas, LaTeX commands, tags and numbers are not words. In scripts without spaces each character is
    a word.

    Example:
        >>> language_consistency([""], ["Four is the answer, \u56db"], "en")
        [0.8]
    """
    scripts = LANGUAGES[target_language]
    return [_share(words(completion), scripts) for completion in completions]


def words(text: str) -> list[str]:
    """Return the script of each word of a text, such as "LATIN", by the Unicode names of letters."""
    found = []
    for run in _LETTERS.findall(_FORMULAS.sub(" ", text)):
        scripts = [_script(letter) for letter in run]
        for position, script in enumerate(scripts):
            new = position == 0 or script != scripts[position - 1]
            if new or script in _ONE_EACH:
                found.append(script)
    return found


_ONE_EACH = ("CJK", "HIRAGANA", "KATAKANA", "THAI")


@cache
def _script(letter: str) -> str:
    """Return the first word of a letter's Unicode name: "LATIN" for "a"."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]


def _share(found: list[str], scripts: tuple[str, ...]) -> float:
    """Return the share of `found` that is among `scripts`; 0.0 for an empty list."""
    return sum(script in scripts for script in found) / len(found) if found else 0.0
