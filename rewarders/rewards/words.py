r"""Words beside a formula: units, "x is", "the answer is". Products such as xy are not words."""

import re

_NO_WORDS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt lim max min gcd "
        "lcm mod det pi inf arg deg dim ker sup hundred thousand lakh lakhs million crore "
        "crores billion trillion 万 亿",
    )
)
_SHORT_WORDS = frozenset(
    re.findall(
        r"\w+",
        "no to is of at in by as or on it so we and was day had has may way man any all us am pm hr hrs "
        "yr yrs cm mm nm km dm kg mg ml cl lb lbs ft oz sq yd pt gal kw mw kwh hz khz mhz ghz kb mb gb "
        "mph kmh kph rpm bpm ppm rad cal kcal kpa atm usd cad aud nzd gbp chf jpy cny rmb inr krw brl "
        "mxn rs kr rp rm dkk sek nok thb pln czk huf zar hkd sgd idr myr php vnd ils aed",
    )
)
_MEANING = frozenset(
    re.findall(
        r"\w+",
        "than least most not minus negative plus half quarter third twice under over root double triple "
        "doubled tripled quadrupled halved quadruple "
        "except excluding without but none no wrong divisible exceed exceeds exceeding above "
        "below between less "
        "dozen dozens off halves thirds quarters fourths fifths sixths eighths tenths hundredths "
        "thousandths fifth sixth eighth tenth hundredth thousandth millionth",
    )
)
_COMPUTED = re.compile(
    r"不(?!同)|大于|小于|多于|少于|至少|至多|超过|以上|以下|平方(?!厘?米|千米|分米)|倍数|根号"
    r"|一半|相反数|倒数|[\d})] *(?:squared|cubed|factorial)\b|\b(?:square|cube|multiples?|powers?) of\b"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten) (?:in|of|out of)\b",
    re.IGNORECASE,
)
_OPPOSITES = re.findall(
    r"(\w+)/(\w+)",
    "increas/decreas profit/loss gain/loss east/west north/south maxim/minim converg/diverg "
    "clockwis/counterclockwis clockwis/anticlockwis upward/downward older/younger earl/late "
    "faster/slower 向东/向西 增加/减少 盈利/亏损 and/or",
)
"""Beginnings of words of opposite directions. "and" and "or" are that between inequalities alone."""
_NO_SYMBOL = re.compile(
    r"\\(?:frac|sqrt|times|cdot|pi|left|right)(?![a-z])|[^\W\d_]{2,}|(?<=\d) ?x ?(?=\d)"
    r"|(?<=\d)[eE](?=[-+\d])"
)
_FACTOR = re.compile(r"(?!\\(?:,|text|cdot|times)|/[a-z])(?:\\[a-z]|[(+/-])| \\(?:sin|cos|tan)")
_GLUED = re.compile("at|is|as|so|no|to|on|by|we|us|am|pm|mg|nm|pt|in|or|it|of")
"""Words and units that are products of symbols when they are written at once behind a formula."""
_CLAUSE = re.compile(r"\b(?:it|is|are|was|were|be|has|have|we|you|he|she|they|this|that|there)\b", re.I)
_POWER = r"(?: ?\^ ?\{? ?(?:-[123]|[23]) ?\}?|[23](?!\w))?"
_SIGNS = r"(?:[lg][et]|ne|in|pm|mp|cup|cap|times|cdot|sqrt|frac|infty|pi)(?![a-z])"
_UNIT_SIGN = r"(?:[kMGµμm]?(?:Pa|eV|Hz|Ω)|[kMGµμm][JNVA]|dB|ha)(?![a-zA-Z])"
_UNIT = r"(?:[a-zA-Z]+|\\Omega(?![a-zA-Z]))"
_WORD = re.compile(
    rf"(?<![\\a-zA-Z])((?<=[\d}})] )(?:[msghLJNWVKCFAΩ]|{_UNIT_SIGN}){_POWER}(?![\w^(+*=-])"
    rf"|\\Omega(?![a-zA-Z])|\\mu ?[a-zA-Z](?!\w)|[^\W\d_]{{2,}}|[\u3040-\u9fff]){_POWER}"
    rf"(?: ?(?:/|\\cdot) ?{_UNIT}{_POWER}| {_UNIT} ?\^ ?\{{? ?-[123] ?\}}?)*"
)
_SYMBOL = (
    r"(?:da|[YZEPTGMkhdcmunpfµμ])?(?:mol|eV|Hz|Pa|bar|atm|cal|erg|rad|rev|min|yr|hr|pc|Bq|Gy|Sv|Wb|lm|lx|cd"
    r"|dyn|torr|\\Omega|\\AA|[msgAKNJWCVFTHLlMDBhGSΩÅ])(?![a-zA-Z])"
)
_UPRIGHT = re.compile(
    r"(?<=[\d}])(?:[\s~]|\\[,;:! ])*\\(?:mathrm|text|rm|mbox) ?\{(?! *A\.?M)"
    rf"(?:[\s~/.()*${{}}]|\\[,;: ]|\\cdot(?![a-z])|\\(?:text|mathrm|rm|mbox|mu)(?![a-z])"
    rf"|\^ ?(?:\{{ ?-? ?\d ?\}}|-?\d)|{_SYMBOL})*$"
)
"""Upright units at the end, behind a number: 9.8\\,\\mathrm{m\\,s^{-2}}."""
_RUN = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")
_BETWEEN = " .:,=/"


def is_word(letters: str) -> bool:
    """Return whether a run of letters is a word, and no function of mathematics or product of symbols.

    A word is in a list of short words such as cm, or has three letters with an e, i, o or u, more than
    three letters, or letters beyond a to z. Functions and scales (sin, million) are none. Case does not
    matter. Example: "cm" and "day" are words, "xy" and "sin" are not.
    """
    lower = letters.lower()
    if lower in _NO_WORDS:
        return False
    if lower in _SHORT_WORDS or len(letters) > 3 or not letters.isascii():
        return True
    return len(letters) == 3 and bool(set(lower) & set("eiou"))


def has_sentence(text: str) -> bool:
    """Return whether a text has two words or more, LaTeX commands, xy, sin and the like not counted."""
    return sum(is_word(run) for run in _RUN.findall(text)) > 1


def is_words(text: str) -> bool:
    """Return whether a text has words and no formula: "San Francisco", "x-axis", "F major".

    A digit, or one of = + * ^ < > { } | $ and the backslash, makes a formula. Letters from Cyrillic on,
    such as Chinese ones, are words.
    """
    if re.search(r"[\d\\=+*^<>{}|$\u2983]", text):
        return False
    runs = re.findall(r"[^\W\d_]+", text)
    return any(is_word(run) for run in runs if len(run) > 1) or any(run > "\u0400" for run in runs)


def plain_words(text: str) -> str | None:
    """Return a text in lower case, without a leading the, a or an, fonts and punctuation but .:/-.

    The result may be "". Return None for a sentence, which has a verb or pronoun such as "is", and no
    digit. Example: "The Eiffel Tower!" becomes "eiffel tower".
    """
    text = re.sub(r" ?(\\[a-z]+|[<>=+*^|]) ?", r" \1 ", text)
    bare = re.sub(rf"\\(?!{_SIGNS})[a-z]+|[^\w\s.:/<>=+*^|\\-]", " ", text)
    literal = " ".join(bare.casefold().split())
    if _CLAUSE.search(literal) and not re.search(r"\d", literal):
        return None
    return re.sub("^(?:the|an?) (?=[^ ]{2})", "", literal)


def without_words(text: str) -> str | None:
    r"""Return a text without the words before and after its formula.

    Return the same text if there are no words, and None if words are between parts of the formula or
    part of the meaning: "at least 3", "5 of 7". Example: "x = 5 cm" becomes "x = 5", "total of 5" "5".
    """
    spans = [found.span() for found in _WORD.finditer(text) if _stands_alone(found)]
    if _COMPUTED.search(text) or any(text[slice(*span)].lower() in _MEANING for span in spans):
        return None
    last = len(text.rstrip(_BETWEEN))  # a letter within a formula is a symbol
    spans = [
        one for one in spans if one[1] >= last or not re.fullmatch(r"[a-zA-Z][\W\d]*", text[slice(*one)])
    ]
    begin, end = 0, len(text)
    while spans and not text[begin : spans[0][0]].strip(_BETWEEN):
        begin = spans.pop(0)[1]
    while spans and not text[spans[-1][1] : end].strip(_BETWEEN):
        end = spans.pop()[0]
    if spans:
        return None
    if (begin, end) == (0, len(text)):
        return text
    return re.sub(r"(?<=\d)-$", "", text[begin:end].strip(_BETWEEN))  # "10-day"


def directions(text: str) -> frozenset[str]:
    """Return the words of direction in a text, such as "increas"; none of a pair that is there whole."""
    signs = [found.start() for found in re.finditer(r"[<>]|\\[lg][et](?![a-z])", text)] or [0]
    is_joined = re.search(r"\b(?:and|or)\b", text[signs[0] : signs[-1]])
    pairs = _OPPOSITES if is_joined else _OPPOSITES[:-1]
    found = [[word for word in pair if re.search(rf"(?<![\\a-z]){word}", text, re.I)] for pair in pairs]
    return frozenset(words[0] for words in found if len(words) == 1)


def are_opposite(one: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether two results of `directions` have opposite words: "increas" and "decreas"."""
    return any((a in one and b in other) or (b in one and a in other) for a, b in _OPPOSITES)


def without_upright_units(text: str) -> str:
    r"""Return a text without the upright units (\mathrm, \text) behind the number at its end.

    Without such units the same text is returned. Units stay if the text before them has open braces, an
    index, or upright text of its own. A dollar sign that the units closed is added. Example:
    "9.8\,\mathrm{m\,s^{-2}}" becomes "9.8".
    """
    found = _UPRIGHT.search(text)
    before = text[: found.start()] if found else ""
    if not found or before.count("{") != before.count("}") or re.search(r"_|\\(?:text|math|rm)", before):
        return text
    return before + "$" * (text.count("$") % 2 == 0 and before.count("$") % 2)


def _stands_alone(found: re.Match[str]) -> bool:
    """Return whether a match of the pattern `_WORD` is a word or a unit and no part of a formula.

    A match is a part of a formula within braces, behind an index (COOH in CH_3COOH), or as a word of
    under four letters behind an operator (at in v_0 + at).
    """
    before = found.string[: found.start()]
    if re.search(r"_ ?\{? ?\d+ ?\}?$", before):  # COOH in CH_3COOH
        return False
    if before.count("{") != before.count("}"):
        return False
    if before.rstrip()[-1:] in tuple("+-*/^") and is_words(found[0]) and len(found[0]) < 4:
        return False
    if _is_product(found[1], before, found.string[found.end() :]):
        return False
    if re.match(_UNIT_SIGN, found[1]):
        return True
    return found[1][0] == "\\" or found[1][1:2] in ("", " ", "^", "2", "3") or is_word(found[1])


def _is_product(letters: str, before: str, behind: str) -> bool:
    """Return whether one to three letters are symbols of a formula: mg in mg\\sin x, h in r^2 h.

    `before` and `behind` are the texts around them.
    """
    if len(letters) > 3 or not letters.isascii() or not letters.isalpha():
        return False
    if len(letters) == 1:
        return bool(re.search(r"[^\W\d_]", _NO_SYMBOL.sub("", before.rpartition("=")[2])))
    is_glued = _GLUED.fullmatch(letters) and re.search(r"[}a-zA-Z)]$", before)
    return bool(_FACTOR.match(behind) or is_glued)
