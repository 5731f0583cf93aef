"""A tool that computes: LEARNER_TOOLS=calculator.py:calculate."""


def calculate(expression: str) -> str:
    """Compute an expression such as 12*(3+4).

    Args:
        expression: Numbers, brackets and the signs + - * /

    Raises:
        ValueError: There is something else in it.
    """
    if set(expression) - set("0123456789.+-*/() ") or "**" in expression:
        raise ValueError("only numbers, brackets and + - * / can be computed")
    return str(eval(expression))
