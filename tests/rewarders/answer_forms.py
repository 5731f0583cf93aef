"""Forms in which answers are written: gold, answer, and whether a teacher would call them equal.

The verdicts were written down before `accuracy` was first run on them; those that do not hold are in
FAILURES, each with its reason.
"""

from __future__ import annotations

FORMS: list[tuple[str, str, bool]] = [
    # fractions
    ("1/2", "0.5", True),
    (r"\frac{1}{2}", "1/2", True),
    (r"\frac{3}{4}", "0.75", True),
    (r"\dfrac{2}{3}", r"\frac{2}{3}", True),
    (r"\frac{6}{8}", "3/4", True),
    (r"-\frac{1}{2}", "-0.5", True),
    (r"1\frac{1}{2}", "3/2", True),
    ("2/3", "0.66", False),
    ("1/3", "0.3333", False),
    # percent
    ("50%", "50%", True),
    (r"50\%", "50%", True),
    ("50%", "0.5", True),
    (r"12.5\%", "12.5%", True),
    ("50%", "5%", False),
    # units and money
    ("5 cm", "5", True),
    (r"5\text{ cm}", "5", True),
    (r"10\text{ km/h}", "10", True),
    ("18 dollars", "18", True),
    (r"\$18", "18", True),
    ("18", "$18", True),
    ("18", "$18.00", True),
    (r"90^\circ", "90", True),
    ("5 cm", "6 cm", False),
    # intervals and unions
    ("(0,1)", "(0, 1)", True),
    ("[0,1)", "[0,1)", True),
    ("[0,1]", "(0,1)", False),
    (r"(-\infty,3]", r"(-\infty, 3]", True),
    ("(2,5)", "(5,2)", False),
    (r"[1,2] \cup [3,4]", r"[1,2]\cup[3,4]", True),
    # sets, tuples
    (r"\{1,2,3\}", r"\{3,2,1\}", True),
    (r"\{1,2\}", r"\{1,2,3\}", False),
    ("(3,-4)", "(3, -4)", True),
    ("(1,2)", "(2,1)", False),
    # matrices
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    # thousands separators
    ("1,000", "1000", True),
    ("12,345", "12345", True),
    ("1000000", "1,000,000", True),
    ("10{,}000", "10000", True),
    (r"1\,000", "1000", True),
    ("1,000", "1", False),
    ("1,000", "1,001", False),
    # numbers
    ("72", "72.0", True),
    ("3.50", "3.5", True),
    ("+4", "4", True),
    ("0", "0.0", True),
    ("-7", "-7", True),
    ("-7", "7", False),
    ("0.1", "0.1001", False),
    ("100", "99.99", False),
    ("1.5e3", "1500", True),
    ("2^{10}", "1024", True),
    ("10^{-3}", "0.001", True),
    (r"3\times 10^{4}", "30000", True),
    ("5!", "120", True),
    (r"\binom{5}{2}", "10", True),
    # expressions
    (r"\sqrt{2}", "2^{1/2}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt{3}}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("2x+1", "1+2x", True),
    ("x^2", "x^3", False),
    ("e^{2}", "e^2", True),
    (r"2\pi", r"\pi \cdot 2", True),
    (r"\pi", "3.14", False),
    ("3+4i", "4i+3", True),
    ("3+4i", "3-4i", False),
    # equations and inequalities
    ("x=5", "5", True),
    ("5", "x=5", True),
    ("x=5", "x=6", False),
    ("x>3", "x > 3", True),
    (r"x \le 2", r"x\leq 2", True),
    ("x>3", "x<3", False),
    # around the answer
    ("72", "The answer is 72.", True),
    ("72", "First 70, but then 72", True),
    ("72", r"so $x = 72$ clips", True),
    ("72", r"\boxed{72}", True),
    ("72", r"\boxed{72\text{ clips}}", True),
    ("72", r"First \boxed{70}, no: \boxed{72}", True),
    ("72", "The answer is 27.", False),
]

FAILURES: dict[tuple[str, str], str] = {}
"""What does not hold, by gold and answer, and why."""
