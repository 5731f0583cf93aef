r"""One spelling for what data sets and models write in many: digits, signs, brackets, currencies, units.

Example: "$\dfrac{1}{2}\,$", "\frac12" and "½" become "\frac{1}{2}", "\frac12" and "1/2".
"""

import re
import unicodedata
from collections.abc import Callable

from penstock.rewarders.rewards.words import without_upright_units

# ruff: noqa: RUF001 - characters that look alike get one spelling here

_SUPERSCRIPTS = re.compile("[¹²³ʰ-ʸ\u2070-ⁿᴬ-ᵡ]+")
_SUBSCRIPTS = re.compile("(?<![A-Z)])(?<![A-Z][a-z])[₀-ₜᵢ-ᵪ]+")  # not of chemistry: H₂O
_ROOT = re.compile(r"√ ?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\))")
_CHINESE = re.compile("(?<!\\d)[零〇一二两三四五六七八九十百千万亿]+")
_CHINESE_DIGITS = str.maketrans("零〇一二三四五六七八九", "00123456789")
_CHINESE_FORMS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile("一(?=[共起])"), ""),
    (re.compile("百分之([\\d.点零〇一二两三四五六七八九十百千]+)"), r"\1%"),
    (re.compile("负(?=[\\d零一二两三四五六七八九十百千万亿])"), "-"),
    (
        re.compile("点([零〇一二三四五六七八九]++)(?![十百千分])"),
        lambda found: f".{found[1]}".translate(_CHINESE_DIGITS),
    ),
    (re.compile("(?<=\\d) ?十(?![一二三四五六七八九])"), "*10"),
    (re.compile("(?<=\\d) ?百"), " hundred "),
    (re.compile("(?<=\\d) ?千(?!万)"), " thousand "),
]
"""Percent, minus, decimals and scales behind digits, each with what it becomes."""
_CHINESE_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ",
    "∩": r"\cap ",
    "或": " or ", "和": " and ",
    "∈": r"\in ", "±": r"\pm ", "、": ",", "。": ".", "√": r"\sqrt ", "’": "'", "′": "'",
    "∅": r"\emptyset ", "∠": r"\angle ", "∶": ":",
})  # fmt: skip
_CURRENCY = r"(?:\b[A-Z]{1,3})?\\?[$€£¥₹₽₩₪₫฿₺₴₦]"
_DEGREES = r"(?:\^ *\{? *\\circ *\}?|\\degrees?|°)"
_FONTS = re.compile(
    r"\\(?:text(?!\w*size|color)\w*|mbox|underline|emph|bm|boldsymbol|math(?:rm|bf|it|sf|tt)|rm|bf)"
    r" ?\{([^{}]*)\}"
)
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![\da-zA-Z)*])\*\*(\d[^*\n]*)\*\*", r"\1"),
        (r"(?<![.,\d])(\d+),(?=\d\d(?!\d)\s*[€£])|(?<=[€£])(\s*\d+),(?=\d\d(?!\d))", r"\1\2."),
        (r"(?<=[$€£])( ?\d[\d.,]*) ?[kK](?![\w$])", r"\1 k"),
        (r"(?<=[$€£])( ?\d[\d.,]*) ?M(?![\w$])", r"\1 million"),
        (rf"(?<!\w){_CURRENCY}(?=\s*[\d.])|(?<=[\d.])\s*\\?[€£¥₹₽₩₪₫฿₺₴₦¢]", " "),
        (r"\\?\$|(?<!\\)\\[()\[\]](?!\s*[a-z]*\\\\)|\\displaystyle|\\!\s*", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])", ""),
        (r"\{,\}|\\,(?=\d{3}(?!\d))(?<=\d\\,)", ","),
        (r"(?<!\\)\\(?:[,;: >]|q?quad(?![a-z]))|~|\s", " "),
        (r" {2,}", " "),
        (r"\\[dtc]?(frac|binom)", r"\\\1"),
        (r"\{ ?(\w+) ?\\choose ?(\w+) ?\}", r"\\binom{\1}{\2}"),
        (
            rf"\\(sin|cos|tan|cot|sec|csc) *+[({{]? *+(-?\d+(?:\.\d+)?) *{_DEGREES} *[)}}]?",
            r"\\\1 (\\frac{\2 \\pi}{180})",
        ),
        (r"(?:(?<!\s)\s++)?(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?|°)(?:\s*[CF](?![a-z]))?", " "),
        (r"\\operatorname\*? ?\{ ?((?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log) ?\}", r"\\\1 "),
        (r"\\var(epsilon|phi|theta|rho)(?![a-z])", r"\\\1"),
        (r"\\colon|\\ratio|\{:\}", ":"),
        (r"(?<=\w)\*\*(?=[\w(])", "^"),
        (r"^\s*(?:\\approx(?![a-z])|≈)", " "),
        (r"\\(?:lbrace|\{)", "\u2983"),
        (r"\\(?:rbrace|\})", "\u2984"),
        (r"\\langle", "("),
        (r"\\rangle", ")"),
        (r"\\%|\bper ?cent(?:age)?\b", "%"),
        (r"\+ ?/ ?-", r"\\pm "),
        (r"(?<!\d)(\d+)分之(\d+)", r"\2/\1"),
        (r"(?<=\d) ?(?:min|sec|deg|max)(?= *(?:$|[.,;/)]|and\b|per\b))", " minutes"),  # a unit
        (r"^(\\?[a-zA-Z]) (?:is|equals)(?: equal to)? (?=[-+.\d\\(\[{])", r"\1 = "),
        (r"(?<=\d) ?([万亿])", r" \1 "),
        (r"\\bar(?= ?\{? ?\d)", r"\\overline"),
        (r"\\(ne|le|ge)q(?:slant)?(?![a-z])", r"\\\1 "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\infin(?![a-z])", r"\\infty"),
        (r"\\varnothing", r"\\emptyset"),
        (r"</s>|<\|[a-z_]+\|>|\\(?:text)?color ?\{\w+\}|\\(?:bf|it|rm|sf|tt)(?![a-z]| ?\{)", " "),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        (
            r"(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|log|ln) ?"
            r"(?=[(^|]|(?<= )(?:\d|[a-zA-Zα-ω](?![a-zA-Z])))",
            r"\\\1 ",
        ),
        (r"(?<![\\a-zA-Z])sqrt ?(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
        (
            r"(\d (?:week|day|hour|minute|yard|feet|foot|pound|dollar|euro)s?)(?:,|,? and) "
            r"(?=\d+ (?:hour|minute|second|inch|ounce|cent)s?(?:es)?\b)",
            r"\1 ",
        ),
        (r"(?<![\\a-zA-Z])exp ?\(([^()]*)\)", r"e^{\1}"),
        (r"(?<![\\a-zA-Z])abs ?\(([^()]*)\)", r"|\1|"),
        (r"\^ ?-(\d+|[a-zA-Z])(?!\w)", r"^{-\1}"),
        (r"^ ?\((\w+)\) ?_", r"\1_"),
        (r"\\dot ?\{? ?(\d) ?\}?(?:(\d*)\\dot ?\{? ?(\d) ?\}?)?$", r"\\overline{\1\2\3}"),
        (r"(?<=\d\.)(\d*)\((\d+)\)$", r"\1\\overline{\2}"),
        (r"\\overline ?(\d)(?!\d)", r"\\overline{\1}"),
    )
]
_ROWS = re.compile(r"(?:\w+ ?= ?)?\[[][ \d.eE+-]*\]")
_EMPHASIS = ' *`"“”'
_AROUND = re.compile(
    r"^(?:=>?|->|→|⇒|∴|\\therefore|✅|👉|#+) *"
    r"|(?<=[\w}]) *(?:[✓✅∎□,;]|\\checkmark|\\blacksquare|\\qed)$"
)
"""Marks before an answer (therefore) and behind it (a tick, the end of a proof)."""


def spell(text: str) -> str:
    r"""Return a text in one spelling, without dollar signs, currencies, degrees and emphasis.

    Upright LaTeX units behind a number, a leading plus and a final point are removed too, and several
    spaces become one. Other signs for the same become one: "÷" is "/", "三" is 3. Set braces are written
    ⦃⦄, so that {} only group. Example: "$\dfrac{1}{2}\,$" becomes "\frac{1}{2}".
    """
    text = _SUPERSCRIPTS.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}", text.strip())
    text = _SUBSCRIPTS.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = without_upright_units(text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text.replace("º", "°"))
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    for pattern, replacement in _CHINESE_FORMS:
        text = pattern.sub(replacement, text)
    text = _CHINESE.sub(lambda run: str(chinese_number(run[0])), text)
    for _ in range(2):  # one within another
        text = _FONTS.sub(r" \1 ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = re.sub(" +", " ", text).strip(_EMPHASIS)
    text = _AROUND.sub("", text).strip(_EMPHASIS)
    if text.startswith("{") and text.find("}") == len(text) - 1:
        text = text[1:-1].strip()
    text = re.sub(r"(?<=[^.])\.$", "", text).removeprefix("+").strip(_EMPHASIS)
    return _with_commas(text) if _ROWS.fullmatch(text) else text


def _with_commas(rows: str) -> str:
    """Return numbers in square brackets, as numpy prints them, with commas in place of spaces.

    Dots that end a number are removed. Example: "[[1. 2.] [3. 4.]]" is "[[1,2],[3,4]]".
    """
    rows = re.sub(r"(?<=\d)\.(?=[] ])", "", re.sub(r"(?<=\[) +| +(?=\])", "", rows))
    return re.sub(r"(?<=[\d\]]) +(?=\[|[+-]?[.\d])", ",", rows)


def chinese_number(numerals: str) -> int:
    """Return the value of a text of Chinese numerals: 三百零五 is 305, and 二〇二四 is 2024.

    Raise ValueError for another character.
    """
    total = section = digit = 0
    for numeral in numerals.replace("两", "二").replace("〇", "零"):
        unit = _CHINESE_UNITS.get(numeral, 0)
        if unit >= 10**4:
            total, section, digit = (total + section + digit or 1) * unit, 0, 0
        elif unit:
            section, digit = section + (digit or 1) * unit, 0
        else:
            digit = digit * 10 + "零一二三四五六七八九".index(numeral)
    return total + section + digit
