"""The part of a prose text that is its answer: the last number, formula or choice, or its sentence."""

import re

from penstock.rewarders.rewards.words import has_sentence

_PHRASE = re.compile(
    r"\b(?:answer[\s*]*:|(?:answer|option|choice) (?:is|(?:would|will|must|should) be)\b\s*:?)"
    r"|(?:答案|故选|应选)[是为:：]*",  # noqa: RUF001
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"$|.*:$|(?:in)?(?:correct|valid)\b|(?:right|reasonable|verified|confirmed|clear|positive|negative|round(?:ed)?"
    r"|simplified|exact|unique|known|as|an?|the|given|shown|obtained|found|displayed|presented|written|stated"
    r"|below|above|then|thus|therefore|simply|in|to|what|easy|this|that|here)\b",
    re.IGNORECASE,
)
"""What stands behind "answer is" and is no answer itself: "correct", "as follows", "an integer"."""
_MAYBE = "or|maybe|perhaps|possibly|alternatively"
_SEVERAL = re.compile(
    r"\W*+(?:[a-z]+ly )?(?:(?:not|never|neither|either|both|between|any|anything|one of|from .*\bto"
    r"|at (?:least|most)|negative|minus|half|twice|log|ln|(?:less|more|fewer|greater) than)\b"
    r"|(?:(?=[^\s,;|&]*\d)[^\s,;|&]++|\(?[A-J]\)?)"
    rf"(?:,\s|\s*[;|&/]|\s+(?:and|to|vs|as well as|{_MAYBE})\b|\s*\((?:{_MAYBE})\b|(?<=\))\s*(?=\())"
    rf"\W*+(?:(?:but|it|that|could|might|may|be|also|{_MAYBE})\W+)*+(?:\d|[a-z] ?= ?-?\d|[A-J]\b))"
    r"|.*\bor\b",
    re.IGNORECASE | re.DOTALL,
)
"""More than one answer, or none, behind "answer is": "5 and 6", "B, C", "5 or maybe 6", "not 5"."""
_CHOICE = re.compile(
    r"[\s*]*(?:(?:the )?(?:option|choice|letter) )?"
    r"(\([A-J]\)|[A-J]\b(?!'| ?(?:[-+/=^<>]|\*(?!\*))))(?! (?:is|was) (?:wrong|not|false|incorrect)\b)"
    r"(?!(?<=[AI]) (?!(?:because|since|as|with|for|by|from|due|when|if|and|but|not|which|that|given|in"
    r"|is|at|on|according|based|of|only|while|where|so|to|here)\b)[a-z])"
)
_CHOSEN = re.compile(
    r"(?:^|[.!?:] |[.!?:]\n|\n\n)[*(]*(?i:(?:so|thus|hence|therefore),? )?"
    r"(?i:option |choice |answer )?[*(]*([A-J])[*)]* (?:is|must be) "
    r"(?:(?:the|only|therefore|thus) )*(?:correct|right|best)"
    r"(?: (?:answer|option|choice|one))?[.!*]*$"
)
"""The last sentence of a text, of at most _TAIL characters, that says which choice is right."""
_TAIL = 100
_LETTER = re.compile(r"(?<![\w'])[A-J](?![\w'])")
_BOLD = re.compile(
    r"(?i:(?:so|thus|hence|therefore),? )?(?i:it|the \w+(?: of [\w ]+)?) (?:is|was) "
    r"\*\*([^*\n]{1,80})\*\*[.!]*"
)
_VERDICT = re.compile(r"[\s*]*(yes|no|true|false)[*]*, (?:as|since|because|for)\b", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:not|cannot|never|neither|none?|nobody|nothing|but|however|wait|otherwise|wrong|false|incorrect"
    r"|impossible|untrue|unlikely|doubt|if|unless|only|though|although|maybe|perhaps|could|or|except|fails?"
    r"|actually|instead|exclud\w*|eliminat\w*|rule|mistake|least)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
"""Words with which a sentence may deny or take back what else it says."""
_FUNCTION = "(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log[₀-₉]*|ln|exp)"
_VALUE = r"\$?-?\d[\d./]*"  # in a list such as "1, 2, and 3"
_CUT_BEFORE = re.compile(
    r"(?:\b(?:not|not equals?(?: to)?|never|than|negative|minus|(?:any|every|no)thing but|all but|except"
    r"|either|excluding|divisible by|exceeds|above|below|(?:square|cube|root|multiples?|powers?) of"
    r"|maybe|perhaps|possibly|alternatively|(?<=\d )or|(?:between|both)\b[^.\n]*\band"
    r"|one of (?:[\d., ]|and\b|or\b)*)"
    r"|n't|(?<![-=\n])[<>]=?|[≤≥≠√±\u00d7^_]|\\(?:[lg]eq?|neq?|[lg]t)"
    r"|(?:\b[a-zA-Z]|[\d)]|\b(?:equals|is|be|was))[ \t][-\u2212] ?\(?"
    rf"|[\w)] \+|\b(?:{_FUNCTION}|mod(?:ulo)?|base|half of|double|twice|up to|cannot (?:be|equal))"
    rf"|\d (?:plus|times|choose|divided by|out of)|\d ?x|\^\(|[\d$)}}],? (?:and|&)|[\d$)}}] or"
    rf"|\b(?:are|[a-z] ?=) (?:{_VALUE}\$?, )+|\d\$?, {_VALUE}\$?, or|\b1 in"
    r"|\b(?:ratio|odds)\b(?![^.\n]*\bfrom )[^.\n]*\d to"
    r"|\w\(|[(\[{][^()\[\]{}]*,) *\$?$",
    re.IGNORECASE,
)
_CUT_BEHIND = re.compile(
    r" ?(?:[√±\u00d7·÷^π]|\\(?:pm|times|cdot|sqrt|pi)|\+ ?[\w(\\]|\*\*[\w(]"
    r"|[-\u2212*/] ?(?:[b-zB-Z]\b|\\|\d)|\(\d*[a-z] ?[-+*/]"
    r"|[<>≤≥](?![<>])|\\[lg](?:eq?|t)(?![a-z])"
    rf"|[xX] ?\d|[a-z]\^|{_FUNCTION}\b(?! [a-z]{{2}}))"
    r"| (?:plus|minus|squared|cubed|factorial|dozens?|halves|thirds"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred)ths"
    r"|(?:times|multiplied by|divided by|of|out of|mod|choose) \d|over \d++(?! [a-z])"
    r"|to the (?:power|second|third|(?:four|fif|six|seven|eigh|nin)th|\d|[a-z]\b))"
)
"""Words and signs before or behind a number that is denied, one of several, or a part of a formula."""
_SAME_NAME = re.compile(
    r"\b([a-zA-Z]) ?= ?[^\s=,;]+(?: [-+*/±] ?[^\s=,;]+)*(?:,(?: and| or)?| and| or) \$?\1 ?=[^=\n]*$"
)
"""The last of several values of a name: x = 2 or x = 3."""
_UNITS = (
    ("weeks?", "[0-6]", "days?"),
    ("days?", r"1?\d|2[0-3]", "(?:hour|hr)s?"),
    ("(?:hour|hr)s?", r"[0-5]?\d(?:\.\d+)?", "min(?:ute)?s?"),
    ("min(?:ute)?s?", r"[0-5]?\d(?:\.\d+)?", "sec(?:ond)?s?"),
    ("yards?", "[0-2]", "(?:feet|foot|ft)"),
    ("(?:feet|foot|ft)", r"\d(?:\.\d+)?|1[01]", "in(?:ches|ch)?"),
    ("(?:pound|lb)s?", r"\d|1[0-5]", "(?:ounces?|oz)"),
    ("(?:dollar|euro)s?", r"\d?\d", "cents?"),
    ("(?:kilogram|kg)s?", r"\d{1,3}", "g(?:rams?)?"),
    ("(?:kilometer|km)s?", r"\d{1,3}", "m(?:eters?)?"),
    ("m(?:eters?)?", r"\d?\d", "c(?:m|entimeters?)"),
)
"""A unit, numbers that may stand before the next smaller one, and that unit."""
_QUANTITY = re.compile(
    "|".join(
        rf"(?<![\d.,])\d+ {large}"
        rf"(?:(?:,? and)? (?:{number}) {small}\b|, (?:{number}) {small}(?=[.!?\n]|$))"
        for large, number, small in _UNITS
    )
)
"""A quantity of two units: 2 hours and 30 minutes. Not "In 1 hour, 30 minutes are ..."."""
_INTRODUCTION = re.compile(r"[A-Z][a-z]+(?: [a-zA-Z]+){0,6}, (?=.*\d)")
"""Words before a comma at a sentence's begin: "Therefore, ", "By the theorem of Pythagoras, "."""
_NEXT = re.compile(rf"[.!?](?!\w)(?!\s*(?:{_MAYBE})\b)|\n", re.IGNORECASE)
_SENTENCES = re.compile(r"[.!?:]\s+[A-Z]|\n(?!\s*\\|&)|\w\s*[!?]\s+\w")
_NUMERAL = (
    r"(?:\d+ ?[\u00bc-\u00be\u2150-\u215e](?!\w)"
    r"|\d(?:[\d.,:'%/^!\w]|\*(?!\*(?:\W|$)))*(?<![.,:'])(?:(?<=\^)\{?-?\w+\}?)?"
    r"|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})"
)
_PART = re.compile(
    r"\$\$[^$]+\$\$|(?<![\\\d])\$[^$\n]+(?<!\\)\$(?!\d)|\\\([^\n]{1,500}?\\\)|\\\[.{1,500}?\\\]"
    rf"|(?<!mod )(?<![^\s=(*\"'“$€£¥₹:~≈→])[-+\u2212]?[$€£¥₹]?"
    rf"{_NUMERAL}(?:(?:\s?[-+*/=^ ]\s?| : )[-+]?\(?{_NUMERAL}\)?)*"
    r"(?: ?\\?%|\\(?:sqrt|[dt]?frac) ?(?:\{[^{}]*\})+|\\pi\b| pi\b"
    r"| (?:hundred|thousand|lakhs?|million|crores?|billion|trillion)\b|(?<=\d) ?[AaPp]\.?[Mm]\b)?",
    re.DOTALL,
)


def last_part(text: str) -> str:
    """Return the part of a text after its last "answer is" or "answer:", else the text's last part.

    A part is a formula in dollars, or a number with what belongs to it, such as 3 million; of "x = 5"
    the 5. Directly behind "answer is" a choice from A to J is a part too. In the sentence behind
    "answer is", the first part with a digit counts. For several answers there ("5 and 6"), a denied
    one ("not 5"), a part of a formula ("2 ± 1"), and up to three words, return the whole rest of the
    sentence. Without "answer is", return the sentence of the last part for those.
    """
    phrases = [found.end() for found in _PHRASE.finditer(text)]
    tail = text[phrases[-1] :].strip(" \t\r\n*:") if phrases else text
    display = re.match(r"\$\$.+?\$\$|\\\[.+?\\\]", tail, re.DOTALL)
    rest = (display[0] if display else _NEXT.split(tail)[0]) if phrases else ""
    if _SEVERAL.match(rest):
        return rest
    if choice := _CHOICE.match(rest):
        return choice[1]
    is_words = phrases and rest.count(" ") < 3 and not _FILLER.match(rest.strip())
    parts = [*_PART.finditer(rest)] or ([] if is_words else [*_PART.finditer(text)][-1:])
    part = next((part for part in parts if re.search(r"\d", part[0])), parts[0] if parts else None)
    if part is None:
        return rest
    if quantity := _quantity(part):
        return quantity
    if _is_cut(part):
        return rest if phrases else _sentence(part)
    return _whole(part)


def _quantity(part: re.Match[str]) -> str:
    """Return the quantity of two units that a part belongs to: 2 hours and 30 minutes; "" without."""
    begin = max(0, part.start() - 100)
    start, end = part.start() - begin, part.end() - begin
    for found in _QUANTITY.finditer(part.string[begin : part.end() + 40]):
        if found.start() < end and found.end() > start:
            return found[0]
    return ""


def _sentence(part: re.Match[str]) -> str:
    """Return the sentence or line of a text around a part, without introduction and final point."""
    ends = [found.span() for found in _NEXT.finditer(part.string)]
    begin = max((end for _, end in ends if end <= part.start()), default=0)
    said = part.string[begin : min((at for at, _ in ends if at >= part.end()), default=None)].strip()
    return said[found.end() :] if (found := _INTRODUCTION.match(said)) else said


def _is_cut(part: re.Match[str]) -> bool:
    """Return whether a part is denied, one of several, or cut from a formula; but not 2 in "1 x 2=2"."""
    before, behind = part.string[max(0, part.start() - 100) : part.start()], part.string[part.end() :]
    return bool(
        _SAME_NAME.search(before + part[0][:100])
        or ("=" not in part[0] and _CUT_BEFORE.search(before))
        or _CUT_BEHIND.match(behind)
    )


def _whole(part: re.Match[str]) -> str:
    """Return a part that `_PART` found: a formula in dollars, or what stands behind its last "="."""
    text = part[0]
    return text if text.endswith("$") or text.startswith("\\") else text.rpartition("=")[2]


def said_in_words(text: str) -> str:
    """Return the choice, words or verdict that a text without "answer is" states; else "".

    Examples: "So B is correct.", "The capital is **Paris**." and "Yes, as 4 is even.", with yes, no,
    true or false. Nothing is stated beside words such as "but" and "not", or another choice's letter.
    One line of at most 200 characters states words and verdicts.
    """
    text = text.strip()
    if has_phrase(text):
        return ""
    if chosen := _CHOSEN.search(text[-_TAIL:]):
        is_alone = set(_LETTER.findall(text)) == {chosen[1]} and not _DOUBT.search(text)
        return chosen[1] if is_alone else ""
    verdict = _VERDICT.match(text)
    said = verdict or _BOLD.fullmatch(text)
    if not said or len(text) > 200 or "\n" in text or _DOUBT.search(text, said.end(1) if verdict else 0):
        return ""
    return said[1]


def has_phrase(text: str) -> bool:
    """Return whether a text has "answer is" or "answer:", in any case, or such words in Chinese.

    "option is" and "choice is" count too.
    """
    return bool(_PHRASE.search(text))


def is_prose(text: str) -> bool:
    """Return whether a text has two words, and more than one sentence or line or over 200 characters."""
    return has_sentence(text) and (len(text) > 200 or bool(_SENTENCES.search(text.strip())))
