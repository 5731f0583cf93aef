"""Golds of 48 kinds, made from numbers, for `benchmarks.golds` and its test."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

PRIME = 97
WORDS = re.findall(
    r"\w+",
    "east west north south Monday Friday parallel ellipse circle triangle hyperbola Evelyn Smith blue "
    "green rhombus Paris London Lima even odd always never increasing decreasing convergent March "
    "tangent scalene Venus Saturn copper iron oxygen none both neither",
)
CHINESE = "零一二三四五六七八九"

KINDS: dict[str, Callable[[int, int], str]] = {
    "whole numbers": lambda a, b: f"{a * PRIME + b}",
    "negative numbers": lambda a, b: f"-{a * PRIME + b}",
    "decimals": lambda a, b: f"{a}.{b:02d}",
    "fractions": lambda a, b: rf"\frac{{{a}}}{{{PRIME}}}",
    "fractions in a line": lambda a, b: f"{a}/{PRIME}",
    "mixed numbers": lambda a, b: rf"{b}\frac{{{a}}}{{{PRIME}}}",
    "thousands": lambda a, b: f"{a},{b + 100},{a + 200}",
    "thousands by space": lambda a, b: rf"{a}\,{b + 100}",
    "scientific notation": lambda a, b: rf"{a}.{b:02d} \times 10^{{-{a % 30 + 3}}}",
    "computer notation": lambda a, b: f"{a % 9 + 1}.{b:02d}e-{a}",
    "percent": lambda a, b: rf"{a}.{b}1\%",
    "dollars": lambda a, b: rf"\${a},{b + 100}.50",
    "euros": lambda a, b: f"€{a}.{b:02d}",
    "yen": lambda a, b: f"{a},{b + 100} yen",
    "lengths": lambda a, b: rf"{a}.{b}1\text{{ cm}}",
    "areas": lambda a, b: rf"{a * PRIME + b} \mathrm{{m}}^2",
    "speeds": lambda a, b: f"{a}.{b}1 km/h",
    "angles": lambda a, b: rf"{a}.{b}1^\circ",
    "times": lambda a, b: f"{a % 12 + 1}:{b % 50 + 10} {'AM' if a % 2 else 'p.m.'}",
    "ratios": lambda a, b: f"{a}:{b}",
    "dates": lambda a, b: f"{('March', 'July', 'October')[a % 3]} {b % 28 + 1}, {1900 + a}",
    "lists": lambda a, b: f"{a}, {b}, {a + b}",
    "pairs": lambda a, b: f"({a}, {b})",
    "triples": lambda a, b: rf"\left({a}, -{b}, \frac{{{a}}}{{{PRIME}}}\right)",
    "sets": lambda a, b: rf"\{{{a}, {b + 100}, {a + 200}\}}",
    "intervals": lambda a, b: rf"[-{a}, {b})",
    "unions": lambda a, b: rf"(-\infty, -{a}] \cup ({b}, \infty)",
    "inequalities": lambda a, b: rf"-{a} < x \le {b}",
    "assignments": lambda a, b: f"x = {a * PRIME + b}",
    "solutions": lambda a, b: f"x = {a}, y = {b}",
    "lines": lambda a, b: f"y = {a}x - {b}",
    "circles": lambda a, b: f"(x-{a})^2 + (y+{b})^2 = {a + b}",
    "polynomials": lambda a, b: f"{a}x^2 + {b}x - {a + b}",
    "monomials": lambda a, b: rf"{a}xy^{{{b % 9 + 2}}}z",
    "roots": lambda a, b: rf"{a}\sqrt{{{PRIME}}} + {b}",
    "multiples of pi": lambda a, b: rf"\frac{{{a}\pi}}{{{PRIME}}}",
    "complex numbers": lambda a, b: f"{a} + {b}i",
    "logarithms": lambda a, b: rf"\log_{{{a % 8 + 2}}} {PRIME + a}",
    "plus and minus": lambda a, b: rf"{a} \pm \sqrt{{{b + 100}}}",
    "matrices": lambda a, b: rf"\begin{{pmatrix}} {a} & {b} \\ -{b} & {a + b} \end{{pmatrix}}",
    "bases": lambda a, b: f"{a * PRIME + b}_{{{a % 7 + 10}}}",
    "exponentials": lambda a, b: rf"{a}e^{{-{b}t}}",
    "choices": lambda a, b: f"({'ABCDE'[a % 5]}) {b}",
    "words": lambda a, b: rf"\text{{{WORDS[a % len(WORDS)]}}}",
    "two words": lambda a, b: f"{WORDS[a % len(WORDS)]} {WORDS[b % len(WORDS)]}",
    "Chinese numerals": lambda a, b: f"{CHINESE[a % 9 + 1]}百{CHINESE[b % 9 + 1]}十{CHINESE[a % 7 + 1]}",
    "full-width digits": lambda a, b: "".join(chr(ord(digit) + 0xFEE0) for digit in f"{a}.{b}1"),
    "repeating decimals": lambda a, b: rf"{b}.\overline{{{a}}}",
}


def gold_pairs(seed: int, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield a kind, a gold of it, and another gold of the same kind with another value."""
    draw = random.Random(seed)
    for number in range(count):
        kind, make = list(KINDS.items())[number % len(KINDS)]
        a, b = draw.randint(11, 96), draw.randint(11, 96)
        gold = neighbor = make(a, b)
        while neighbor == gold:
            neighbor = make(draw.randint(11, 96), draw.randint(11, 96))
        yield kind, gold, neighbor
